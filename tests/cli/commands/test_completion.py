"""Completion scripts: what a shell offers after some words."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from logitless.cli.command_table import COMMANDS
from logitless.cli.commands import completion
from logitless.cli.flags.flags import UsageError
from logitless.cli.main import main

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bash") / "completion"
    path.write_text(completion.script(["bash"], COMMANDS))
    return path


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sel", ["selftest"]),
        ("pl", ["plan"]),
        ("serve --cache-type-", ["--cache-type-k", "--cache-type-v", "--cache-type-k-draft", "--cache-type-v-draft"]),
        ("--cache-type-k ", ["f32", "f16", "q8_0"]),
        ("serve -ctk q", ["q8_0"]),
        ("serve --model mo", ["model.gguf", "models"]),
        ("serve --models-dir mo", ["models"]),
        ("serve --ctx-size ", []),
        ("plan finetune --lora-o", ["--lora-out"]),
        ("synth --see", ["--seed"]),
    ],
)
def test_bash_offers(words: str, expected: list[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "models").mkdir()
    array = " ".join(map(shlex.quote, ["logitless", *words.split(" ")]))
    code = f"source {script}; COMP_WORDS=({array}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _logitless; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run([str(BASH), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(expected)
    assert not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str, tmp_path: Path) -> None:
    text = completion.script([shell], COMMANDS)
    assert "selftest" in text
    assert "ctx-size" in text
    if (program := shutil.which(shell)) is not None:
        path = tmp_path / "completion"
        path.write_text(text)
        subprocess.run([program, "-n", str(path)], check=True)


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
