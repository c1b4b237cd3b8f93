"""Flag parser: names, negatives, environment variables, limits, suggestions."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.cli.command_table import COMMANDS
from logitless.cli.flags import help
from logitless.cli.flags.flags import CliError, Flag, UsageError, parse, unknown
from logitless.cli.main import main
from logitless.engine.loading.values import (
    address,
    choice,
    json_object,
    metadata_rules,
    number,
    text,
    whole,
    wholes,
    words,
)

FLAGS = (
    Flag("-m --model", "", text, None, env="LLAMA_ARG_MODEL"),
    Flag("-c --ctx-size", "", whole(0, 4096), 512, env="LLAMA_ARG_CTX_SIZE"),
    Flag("--slots", "", default=True, env="LLAMA_ARG_ENDPOINT_SLOTS", off="--no-slots"),
    Flag("--stop", "", text, None, many=True),
    Flag("--api-key", "", words, None, env="LLAMA_API_KEY", many=True),
    Flag("-fa --flash-attn", "", text, None, optional=("auto", "on", "off"), status="ignored"),
    Flag("--lora", "", text, status="later"),
    Flag("-s --lora-scaled", "", words, None, many=True, then_number=True),
    Flag("--cache-reuse", "", text, status="later", off_values=("0",), env="LLAMA_ARG_CACHE_REUSE"),
)


def test_defaults() -> None:
    got = parse(FLAGS, [], {})
    assert (got.model, got.ctx_size, got.slots, got.stop, got.notices) == (None, 512, True, [], [])


@pytest.mark.parametrize("words", [["-c", "7"], ["--ctx-size", "7"], ["--ctx_size", "7"], ["--ctx_size=7"]])
def test_spellings_of_a_flag(words: list[str]) -> None:
    assert parse(FLAGS, words, {}).ctx_size == 7


@pytest.mark.parametrize("given", [["-s", "a:0.5"], ["-s", "a", "0.5"], ["--lora_scaled", "a", "0.5"]])
def test_a_file_and_its_scale_are_one_word_or_two(given: list[str]) -> None:
    got = parse(FLAGS, [*given, "-c", "7", "-s", "b,c:2", "-s", "d", "-1e-1", "--slots"], {})
    assert (got.lora_scaled, got.ctx_size) == (["a:0.5", "b", "c:2", "d:-1e-1"], 7)
    assert got.given[0][1][1] == "a:0.5"


def test_underscores_in_values_stay() -> None:
    assert parse(FLAGS, ["--model=a_b", "--stop", "c_d"], {}).model == "a_b"


def test_command_line_beats_environment() -> None:
    environ = {"LLAMA_ARG_CTX_SIZE": "9", "LLAMA_ARG_MODEL": "x", "LLAMA_API_KEY": "a,b"}
    got = parse(FLAGS, ["-c", "7", "--api-key", "c", "--api-key", "d"], environ)
    assert (got.ctx_size, got.model, got.api_key) == (7, "x", ["c", "d"])
    assert parse(FLAGS, [], environ).api_key == ["a", "b"]


@pytest.mark.parametrize(
    ("environ", "argv", "expected"),
    [
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "0"}, [], False),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "on"}, [], True),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": "1"}, [], False),
        ({"LLAMA_ARG_NO_ENDPOINT_SLOTS": "1"}, ["--slots"], True),
        ({}, ["--no_slots"], False),
        ({}, ["--no-slots", "--slots"], True),
    ],
)
def test_switches(environ: dict[str, str], argv: list[str], expected: bool) -> None:
    assert parse(FLAGS, argv, environ).slots is expected


def test_rules_for_keys() -> None:
    text = "a.b=int:-7,tokenizer.x=bool:false,name=str:a,b=c:1,x=float:1e-3"
    assert metadata_rules(text) == [("a.b", -7), ("tokenizer.x", False), ("name", "a,b=c:1"), ("x", 0.001)]
    for wrong in ("", "a", "a=1", "a=int:", "a=int:1.5", "a=bool:1", "a=float:nan", "=str:x", f"a=int:{9**99}"):
        with pytest.raises(ValueError, match=r"is not|has a"):
            metadata_rules(wrong)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--ctx-sise", "3"], "unknown flag: --ctx-sise (did you mean --ctx-size?)"),
        (["--zzzzzz"], "unknown flag: --zzzzzz"),
        (["model.gguf"], "unexpected argument: model.gguf"),
        (["-c"], "-c expects a value (N)"),
        (["-m", "--slots"], "-m expects a value (N); if '--slots' is meant, write -m=--slots"),
        (["--slots=1"], "--slots takes no value"),
        (["-c", "-5"], "-c: '-5' is not a whole number from 0 to 4096"),
        (["-c", "9" * 5000], f"-c: '{'9' * 5000}' is not a whole number from 0 to 4096"),
        (["--ctx_size", "1e3"], "--ctx_size: '1e3' is not a whole number from 0 to 4096"),
    ],
)
def test_wrong_usage(argv: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(FLAGS, argv, {})
    assert str(caught.value) == line.replace("-m=--slots", "--model=--slots")


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"LLAMA_ARG_CTX_SIZE": "x"}, "LLAMA_ARG_CTX_SIZE: 'x' is not a whole number from 0 to 4096"),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "maybe"}, "LLAMA_ARG_ENDPOINT_SLOTS: 'maybe' is not one of 1, 0,"),
    ],
)
def test_wrong_environment_names_the_variable(environ: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line[:40]):
        parse(FLAGS, [], environ)


def test_flags_of_llama_server() -> None:
    got = parse(FLAGS, ["-fa", "-c", "3", "-fa", "on", "--cache-reuse", "0"], {})
    assert got.ctx_size == 3
    assert got.notices == ["-fa", "-fa"]
    for argv, environ in ((["--lora", "f"], {}), ([], {"LLAMA_ARG_CACHE_REUSE": "256"})):
        with pytest.raises(CliError, match=r"^not supported yet: ") as caught:
            parse(FLAGS, argv, environ)
        assert caught.value.code == 1


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (whole(1, 8, or_minus_one="all"), ["1", "8", "-1"], ["0", "9", "-2", "", "x", "1.0"]),
        (number(), ["1", "-2.5", "1e9"], ["nan", "inf", "", "x"]),
        (number(0, 1), ["0", "1", "0.5"], ["1.1", "-1"]),
        (choice("f16", "q8_0"), ["f16", "Q8_0"], ["q4_0", ""]),
        (json_object, ['{"a": [1]}'], ["", "[]", "{", "1"]),
        (wholes(1, 8), ["1", "1,4, 8"], ["", "1,,2", "0", "1,x"]),
    ],
)
def test_kinds(kind: object, good: list[str], bad: list[str]) -> None:
    assert callable(kind)
    for value in good:
        kind(value)
    for value in bad:
        with pytest.raises(ValueError, match=r"^is not "):
            kind(value)


def test_a_number_beyond_the_devices_type() -> None:
    with pytest.raises(ValueError, match=r"is not a number from 0 to 3\.4e\+38"):
        number(0)("1e308")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_tables(command: object) -> None:
    """Names are unique within a command, and the help mentions every flag in lines of at most 100 columns."""
    groups = command.groups  # type: ignore[attr-defined]
    flags = [f for g in groups for f in g.flags]
    names = [n for f in flags for n in (*f.all_names, *f.off_names)]
    assert len(names) == len(set(names))
    assert len({f.dest for f in flags}) == len(flags)
    shown = help.of_command(command.name, "Summary.", groups, everything=True)  # type: ignore[attr-defined]
    assert all(name in shown for name in names)
    assert max(map(len, shown.splitlines())) <= 100
    assert all(f.help for f in flags if f.status == "works")
    parse(flags, [], {})
    first = help.of_command(command.name, "Summary.", groups)  # type: ignore[attr-defined]
    assert all(f"\n  {name}" in first for name in ("-h, --help", "--version"))
    rows = [line for line in first.splitlines() if line.startswith("  -")]
    if command.name == "serve":  # type: ignore[attr-defined]
        assert len(rows) in range(25, 41)
        assert "(default: )" not in shown
    if len(rows) < len([f for f in flags if f.status == "works"]):
        assert "\n  --help-all" in first
        assert all(f.common == any(f"  {', '.join(f.all_names)}" in row for row in rows) for f in flags if f.help)
    else:
        assert "--help-all" not in first


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_a_path_is_not_empty(command: object) -> None:
    """A variable of the shell that is not set must not turn off what it was to name."""
    flags = [f for g in command.groups for f in g.flags]  # type: ignore[attr-defined]
    paths = [f for f in flags if f.metavar.startswith(("FILE", "FOLDER", "DIR")) and f.status == "works"]
    for f in paths:
        with pytest.raises(UsageError, match=rf"^{f.long}: '' names no (file|folder)$"):
            parse(flags, [f"{f.long}="], {})
        for name in f.env.split():
            with pytest.raises(UsageError, match=rf"^{name}: '' names no (file|folder)$"):
                parse(flags, [], {name: ""})


def test_a_variable_that_is_no_value_is_none_of_a_flag_that_is_given() -> None:
    flags = (Flag("--host", "", address, "127.0.0.1", env="LLAMA_ARG_HOST"),)
    assert parse(flags, ["--host", "::1"], {"LLAMA_ARG_HOST": ""}).host == "::1"


MEANING = (
    *FLAGS,
    Flag("-x --preset", "", means="--ctx-size 9 --no-slots --stop a --stop b", env="LLAMA_ARG_PRESET", default=False),
    Flag("--jinja", "", env="LLAMA_ARG_JINJA", off="--no-jinja", status="ignored", only_on="is always on"),
    Flag("--poll", "", whole(0, 100), status="ignored"),
)


def test_a_flag_that_stands_for_others_leaves_those_that_are_given() -> None:
    got = parse(MEANING, ["-x"], {})
    assert (got.ctx_size, got.slots, got.stop) == (9, False, ["a", "b"])
    got = parse(MEANING, ["--ctx-size", "3", "-x", "--stop", "c"], {"LLAMA_ARG_ENDPOINT_SLOTS": "1"})
    assert (got.ctx_size, got.slots, got.stop) == (3, True, ["c"])
    assert parse(MEANING, [], {"LLAMA_ARG_PRESET": "1"}).ctx_size == 9
    assert parse(MEANING, [], {"LLAMA_ARG_PRESET": "0"}).ctx_size == 512


def test_a_switch_that_cannot_be_off_says_so() -> None:
    assert parse(MEANING, ["--jinja"], {"LLAMA_ARG_JINJA": "0"}).notices
    for argv, environ, name in (
        (["--no-jinja"], {}, "--no-jinja"),
        ([], {"LLAMA_ARG_JINJA": "off"}, "LLAMA_ARG_JINJA"),
        ([], {"LLAMA_ARG_NO_JINJA": "1"}, "LLAMA_ARG_NO_JINJA"),
    ):
        with pytest.raises(CliError, match=f"not supported: {name}: is always on"):
            parse(MEANING, argv, environ)


def test_values_of_flags_without_effect_are_checked() -> None:
    assert parse(MEANING, ["--poll", "50"], {}).notices == ["--poll"]
    with pytest.raises(UsageError, match="--poll: 'x' is not a whole number"):
        parse(MEANING, ["--poll", "x"], {})


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_help_fits_the_terminal(command: str, columns: int, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for argv in ([*command.split(), "--help"], [*command.split(), "--help-all"], []):
        main(argv)
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > columns] == []


def test_help_through_a_pipe_has_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout is the pipe, stderr the terminal; without either it is 80."""
    monkeypatch.delenv("COLUMNS", raising=False)
    widths = {2: 92}

    def size(fd: int) -> os.terminal_size:
        if fd not in widths:
            raise OSError(25, "no terminal")
        return os.terminal_size((widths[fd], 24))

    monkeypatch.setattr(os, "get_terminal_size", size)
    for fd, name in ((1, "stdout"), (2, "stderr"), (0, "stdin")):
        monkeypatch.setattr(sys, name, SimpleNamespace(fileno=lambda fd=fd: fd))
    assert help.width() == 92
    widths[2] = 0  # a terminal that does not know
    assert help.width() == 80
    widths.clear()
    assert help.width() == 80


@pytest.mark.parametrize(
    ("word", "flag"), [("--prot", "--port"), ("--hots", "--host"), ("--prioo", "--prio"), ("--modle", "--model")]
)
def test_unknown_flag_suggests_swapped_letters_first(word: str, flag: str) -> None:
    serve = next(c for c in COMMANDS if c.name == "serve")
    names = [name for group in serve.groups for f in group.flags for name in (*f.all_names, *f.off_names)]
    assert unknown(word, names) == f"unknown flag: {word} (did you mean {flag}?)"
