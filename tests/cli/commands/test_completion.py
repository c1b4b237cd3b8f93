"""Shell completion scripts: the words that a shell offers."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from logitless.cli.command_table import COMMANDS
from logitless.cli.commands import completion
from logitless.cli.flags.flags import UsageError
from logitless.cli.main import main

CASES = [
    ("sel", ["selftest"]),
    ("pl", ["plan"]),
    ("plan tr", ["train"]),
    ("serve --cache-type-", ["--cache-type-k", "--cache-type-v", "--cache-type-k-draft", "--cache-type-v-draft"]),
    ("--cache-type-k ", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]),
    ("serve -ctk q5", ["q5_1", "q5_0"]),
    ("serve --models-dir mo", ["models"]),
    ("serve --ctx-size ", []),
    ("plan finetune --lora-o", ["--lora-out"]),
    ("synth --see", ["--seed"]),
    ("completion z", ["zsh"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three scripts, a file and a folder."""
    path = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        (path / f"{shell}-script").write_text(completion.script([shell], COMMANDS))
    (path / "model.gguf").touch()
    (path / "models").mkdir()
    return path


def program(name: str) -> str:
    return shutil.which(name) or pytest.skip(f"needs {name}")


@pytest.mark.parametrize(("words", "expected"), [*CASES, ("serve --model mo", ["model.gguf", "models"])])
def test_bash_offers(words: str, expected: list[str], folder: Path) -> None:
    array = " ".join(map(shlex.quote, ["logitless", *words.split(" ")]))
    code = f"source ./bash-script; COMP_WORDS=({array}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _logitless; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run([program("bash"), "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(expected)
    assert not done.stderr


def test_fish_offers(folder: Path) -> None:
    lines = "; echo ----; ".join(f"complete -C {shlex.quote('logitless ' + words)}" for words, _ in CASES)
    code = f"source ./fish-script; {lines}"
    command = [program("fish"), "--no-config", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stderr
    for (words, expected), shown in zip(CASES, done.stdout.split("----\n"), strict=True):
        offered = [line.partition("\t")[0].removesuffix("/") for line in shown.splitlines()]
        assert sorted(offered) == sorted(expected), words


def test_zsh_completes(folder: Path) -> None:
    """At a terminal: the only way to ask it. Words with one continuation are completed, others are not."""
    command, environ = [program("zsh"), "-f", "-i"], {**os.environ, "TERM": "dumb", "HOME": str(folder)}
    fd, end = pty.openpty()
    pipes: Any = {"stdin": end, "stdout": end, "stderr": end}
    zsh = subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **pipes)
    os.close(end)
    seen = b""

    def until(pattern: bytes) -> str:
        nonlocal seen
        while (match := re.search(pattern, seen, re.DOTALL)) is None:
            assert select.select([fd], [], [], 60)[0], seen[-500:]
            seen += os.read(fd, 1 << 16)
        seen = seen[match.end() :]
        return match[1].decode()

    begin = (
        "stty -echo; PROMPT=; autoload -Uz compinit && compinit -u -D; source ./zsh-script; "
        'show() { print -r -- "<<$BUFFER>>"; BUFFER=; }; zle -N show; bindkey ^X show; print "<<"ready">>"\n'
    )
    os.write(fd, begin.encode())
    assert until(b"<<(ready)>>") == "ready"
    for words, expected in CASES:
        if len(expected) == 1:
            os.write(fd, f"logitless {words}\t\x18".encode())
            whole = f"logitless {words.rpartition(' ')[0]}".strip()
            assert until(b"<<(.*?)>>") == f"{whole} {expected[0]} "
    os.close(fd)
    zsh.wait(60)


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="completion: give one shell of bash, zsh, fish"):
        completion.script(words, COMMANDS)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("_logitless() {")
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "--version" in told
    assert "completion" in told
