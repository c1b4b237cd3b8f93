"""Command line: output, exit codes and refusals; in a process of its own where it needs one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from logitless.cli.main import main
from tests.helpers.commands import command as run
from tests.helpers.paths import ROOT

Refused = Callable[..., str]


def one_line_error(*args: str, code: int, **environ: str) -> str:
    got = run(*args, **environ)
    return line_of((got.returncode, got.stdout.decode(), got.stderr.decode()), code)


def line_of(got: tuple[int, str, str], code: int) -> str:
    """The only line, which is an error: of a code, standard output and standard error."""
    assert (got[0], got[1]) == (code, ""), got[2]
    assert got[2].startswith("logitless: ")
    assert got[2].endswith("\n")
    assert got[2].count("\n") == 1, got[2]
    return got[2][len("logitless: ") : -1]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """`one_line_error` in this process: the line of a command that ends before it does anything."""
    for name in [name for name in os.environ if name.startswith("LLAMA_")]:
        monkeypatch.delenv(name)
    return lambda *args, code: line_of((main(args), *capfd.readouterr()), code)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    got = run("synth", "--shape", "tiny", "--type", "Q8_0", "-o", str(path))
    assert got.returncode == 0, got.stderr
    return path


def test_help_and_version() -> None:
    got = run("--help")
    assert got.returncode == 0
    for command in ("serve", "generate", "bench", "plan", "devices", "selftest", "tokenize", "synth"):
        assert f"  {command} " in got.stdout.decode()
        assert run(command, "--help").stdout.startswith(b"usage: logitless " + command.encode())
    assert run("--version").stdout.startswith(b"logitless ")
    assert run("serve", "--version").stdout.startswith(b"logitless ")
    assert run().returncode == 2


@pytest.mark.parametrize("argv", [["--help"], ["tokenize", "--help"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        f"import sys; from logitless.cli.main import main; main({argv!r}); "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True, timeout=60)
    assert got.stdout.decode().splitlines()[-1] == "[]"


HEAVY = ("numpy", "numba", "llvmlite", "aiohttp", "asyncio", "rich", "gguf")


def test_tokenize_imports_neither_kernels_nor_http(tiny_model: Path) -> None:
    code = (
        "import sys; from logitless.cli.main import main; "
        f"main(['tokenize', '-m', {str(tiny_model)!r}]); "
        "print([m for m in ('numba', 'llvmlite', 'aiohttp') if m in sys.modules])"
    )
    got = subprocess.run(
        [sys.executable, "-c", code], input=b"a", capture_output=True, cwd=ROOT, check=True, timeout=60
    )
    assert got.stdout.decode().splitlines()[-1] == "[]"


def test_a_server_imports_neither_compilers_nor_what_writes_files() -> None:
    code = (
        "import sys, logitless.server.app, logitless.cli.commands.serve; "
        "print([m for m in ('numba', 'llvmlite', 'gguf', 'yaml', 'sentencepiece') if m in sys.modules])"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=True, timeout=60)
    assert got.stdout.decode().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["sever"], 2, ["sever", "serve"]),
        (["serve", "--prt", "1"], 2, ["--prt", "--port"]),
        (["serve", "--port", "-1"], 2, ["--port", "-1"]),
        (["serve", "-t", "-2"], 2, ["-t", "'-2'"]),
        (["serve", "-ub", "0"], 2, ["-ub"]),
        (["serve", "-c", "99999999999"], 2, ["-c"]),
        (["serve", "-ctk", "q4"], 2, ["-ctk", "q4_0"]),
        (["serve", "--device", "cuda"], 2, ["--device", "cpu"]),
        (["serve", "--temp", "hot"], 2, ["--temp"]),
        (["--spec-replace", "x"], 1, ["not supported yet: --spec-replace"]),
        (["serve", "--log-file", "/no/such/folder/x"], 1, ["--log-file /no/such/folder/x: No such file"]),
        (["serve", "--spec_replace", "x"], 1, ["not supported yet: --spec_replace"]),
        (["serve", "-m", ""], 2, ["-m", "names no file"]),
        (["serve", "--api-key-file", ""], 2, ["--api-key-file", "names no file"]),
        (["serve", "--lora", ","], 2, ["--lora", "names no file"]),
        (["serve", "--models-dir", ""], 2, ["--models-dir", "names no folder"]),
        (["generate", "-m", "x", "-f", ""], 2, ["-f", "names no file"]),
        (["generate", "-m", "x", "-p", "x", "--json-schema", ""], 2, ["--json-schema", "must not be empty"]),
        (["serve", "--admin-api-key", ""], 2, ["--admin-api-key", "must have a key"]),
        (["serve", "--admin-api-key", " "], 2, ["--admin-api-key", "must have a key"]),
        (["serve", "--host", ""], 2, ["--host", "names no address"]),
        (["rpc-server", "--host", " "], 2, ["--host", "names no address"]),
        (["serve", "-m", "/does/not/exist.gguf"], 1, ["/does/not/exist.gguf"]),
        (["generate", "-m", "/does/not/exist.gguf", "-p", "x"], 1, ["/does/not/exist.gguf"]),
        (["bench", "-m", "/does/not/exist.gguf"], 1, ["/does/not/exist.gguf"]),
        (["plan", "-m", "/does/not/exist.gguf"], 1, ["/does/not/exist.gguf"]),
        (["selftest", "-m", "/does/not/exist.gguf"], 1, ["/does/not/exist.gguf"]),
        (["tokenize", "-m", "/does/not/exist.gguf"], 1, ["/does/not/exist.gguf"]),
        (["tokenize"], 2, ["-m"]),
        (["generate"], 2, ["-m"]),
        (["synth", "--type", "Q9_9", "-o", "x"], 2, ["--type", "Q8_0"]),
        (["synth", "--shape", "9T", "-o", "x"], 2, ["--shape", "135M"]),
        (["synth"], 2, ["-o"]),
        (["synth", "--shape", "tiny", "-o", "/no/such/folder/x.gguf"], 1, ["/no/such/folder"]),
    ],
)
def test_errors_are_one_line(argv: list[str], code: int, words: list[str], refused: Refused) -> None:
    line = refused(*argv, code=code)
    assert all(word in line for word in words), line


def test_environment_is_read_and_named() -> None:
    assert "LLAMA_ARG_PORT" in one_line_error("serve", code=2, LLAMA_ARG_PORT="x")
    assert "LOGITLESS_ADMIN_API_KEY: '' must have a key" in one_line_error("serve", code=2, LOGITLESS_ADMIN_API_KEY="")
    assert "LLAMA_ARG_HOST: '' names no address" in one_line_error("serve", code=2, LLAMA_ARG_HOST="")
    assert "/from/env.gguf" in one_line_error("tokenize", code=1, LLAMA_ARG_MODEL="/from/env.gguf")
    assert "/from/cli.gguf" in one_line_error("tokenize", "-m", "/from/cli.gguf", code=1, LLAMA_ARG_MODEL="/from/env")


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "folder"])
@pytest.mark.parametrize("command", ["tokenize", "plan", "serve"])
def test_broken_files_are_one_line(
    command: str, damage: str, tiny_model: Path, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "broken.gguf"
    if damage == "folder":
        path.mkdir()
    else:
        whole = tiny_model.read_bytes()
        path.write_bytes({"empty": b"", "text": b"no model at all", "truncated": whole[: len(whole) // 2]}[damage])
    assert "broken.gguf" in refused(command, "-m", str(path), code=1)


def test_devices() -> None:
    found = json.loads(run("devices", "--json").stdout)["devices"]
    assert found[0]["name"] == "cpu"
    assert found[0]["available"]
    assert {d["name"].partition(":")[0] for d in found} == {"cpu", "opencl", "vulkan"}
    assert all(d["description"] for d in found)
    first, second = (
        re.sub(rb"[\d.]+ GiB", b"", run(*command).stdout) for command in (["serve", "--list-devices"], ["devices"])
    )
    assert first == second  # but for the memory, which PoCL measures anew


def test_synth_is_deterministic(tiny_model: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert run("synth", "--shape", "TINY", "--type", "q8_0", "-o", str(again)).returncode == 0
    assert run("synth", "--shape", "tiny", "--type", "Q8_0", "--seed", "1", "-o", str(other)).returncode == 0
    assert again.read_bytes() == tiny_model.read_bytes() != other.read_bytes()


def test_synth_lists_its_shapes_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("synth", "--list")) == 0
    *shapes, types = capsys.readouterr().out.splitlines()
    assert len({line.index(" width ") for line in shapes}) == 1
    assert "tiny-moe   width 64, 2 layers, 4 heads (2 KV), ffn 96 of 8 experts, 3 used, vocabulary 512" in shapes
    assert types.startswith("types: F32, ")


def test_tokenize_options(shared_data: Path) -> None:
    model = str(shared_data / "vocabs" / "ggml-vocab-llama-spm.gguf")
    plain = run("tokenize", "-m", model, stdin=b"Hello world\n").stdout
    assert plain == b"15043 3186 13\n"
    assert run("tokenize", "-m", model, "--json", stdin=b"Hello world\n").stdout == b"[15043, 3186, 13]\n"
    assert run("tokenize", "-m", model, "--add-special", stdin=b"Hello world\n").stdout == b"1 " + plain
    assert run("tokenize", "-m", model, "--parse_special", stdin=b"<s>").stdout == b"1\n"
    assert run("tokenize", "-m", model, stdin=b"<s>").stdout != b"1\n"
    assert run("tokenize", "-m", model, stdin=b"").stdout == b"\n"
    assert run("tokenize", "-m", model, stdin=b"\xff\xfe").returncode == 0


@pytest.mark.parametrize("name", ["bert-bge", "gpt-2", "llama-spm"])
def test_tokenize_agrees_with_llama_cpp(shared_data: Path, name: str) -> None:
    """One of each kind; tests/models/tokenizer/test_tokenizer.py has every vocabulary and text."""
    model = shared_data / "vocabs" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{model}.inp").read_bytes().split(b"\n__ggml_vocab_test__\n")
    expected = Path(f"{model}.out").read_bytes().split(b"\n")
    for text, ids in list(zip(texts, expected, strict=False))[::9]:
        assert run("tokenize", "-m", str(model), stdin=text).stdout.split() == ids.split(), text


def test_a_closed_pipe_is_silent(tiny_model: Path) -> None:
    command = f'"{sys.executable}" -m logitless tokenize -m "{tiny_model}" | true'
    got = subprocess.run(command, shell=True, input=b"a " * 100_000, capture_output=True, cwd=ROOT, timeout=60)
    assert got.stderr == b""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is what LC_ALL=C is
def test_character_unknown_to_terminal_is_replaced(tiny_model: Path, errors: str) -> None:
    got = run("plan", "-m", str(tiny_model), "-t", "1", encoding="ascii", errors=errors)
    assert got.returncode == 0, got.stderr
    assert b"cpu runs " in got.stdout
    assert b" ? 2" in got.stdout  # attention × 2


def test_a_plan_lists_where_each_result_lies(tiny_model: Path) -> None:
    """In the order wanted, on whole cache lines, and no further than what the order is said to need."""
    needed = {}
    for order in ("left", "right", "auto"):
        got = run("plan", "-m", str(tiny_model), "-t", "1", "--json", "--dump-plan", "--eval-order", order)
        assert got.returncode == 0, got.stderr
        report = json.loads(got.stdout)
        places = [re.search(r" @ (\d+) \+(\d+)$", line) for line in report["nodes"]]
        results = [(int(p[1]), int(p[2])) for p in places if p]
        assert len(results) > 20
        assert all(start % 64 == 0 for start, _ in results)
        needed[order] = max(start + -(-size // 64) * 64 for start, size in results)
    assert report["arena_by_order"] == {"left": needed["left"], "right": needed["right"]}
    assert needed["auto"] == min(needed["left"], needed["right"])


def test_error_handler_of_the_user_replaces_characters(tiny_model: Path) -> None:
    got = run("plan", "-m", str(tiny_model), "-t", "1", encoding="ascii", errors="backslashreplace")
    assert got.returncode == 0, got.stderr
    assert rb" \xd7 2" in got.stdout


def test_closed_streams_are_empty_ones(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "logitless", "tokenize", "-m", str(tiny_model)]
    words = ["sh", "-c", 'exec "$0" "$@" <&- >&-', *command]
    got = subprocess.run(words, stderr=subprocess.PIPE, timeout=120, cwd=ROOT)
    assert (got.returncode, got.stderr) == (0, b"")
