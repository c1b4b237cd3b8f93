"""Flags by declaration: one `Flag` has its names, environment variable, type, default and help; `parse` reads them.

Rules, the same for every command: `_` and `-` are equal inside a `--flag`; `--flag=value` and `--flag value` are equal;
the command line beats the environment; `LLAMA_ARG_NO_X` is the negative of the switch whose variable is `LLAMA_ARG_X`.
A flag of llama-server that does nothing here is either ignored (it only tunes llama.cpp) or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from logitless.engine.loading.options import Option

TRUE = frozenset({"1", "true", "on", "yes", "enabled"})
FALSE = frozenset({"0", "false", "off", "no", "disabled"})
WORKS, IGNORED, LATER = "works", "ignored", "later"


class CliError(Exception):
    """An error that ends the program with one line on stderr."""

    code = 1


class UsageError(CliError):
    """The command line (or an environment variable) is wrong."""

    code = 2


@dataclass(frozen=True)
class Flag(Option):
    """`kind` turns the text into the value (ValueError has the error's text); a flag without `kind` is a switch."""

    optional: tuple[str, ...] = ()  # the value may be left out, and is one of these
    status: str = WORKS
    # of a flag that does nothing here: the values that ask for what is always so
    off_values: tuple[str | bool, ...] = ()
    only_on: str = ""  # of a switch that cannot be turned off: the reason
    means: str = ""  # of a switch: the flags that it stands for, where they are not given themselves

    @cached_property
    def all_names(self) -> tuple[str, ...]:
        return tuple(self.names.split())

    @cached_property
    def off_names(self) -> tuple[str, ...]:
        return tuple(self.off.split())

    @property
    def dest(self) -> str:
        return self.long.lstrip("-").replace("-", "_")

    @property
    def takes_value(self) -> bool:
        return self.kind is not None


@dataclass(frozen=True)
class Group:
    """Flags that belong together in the help."""

    title: str
    flags: tuple[Flag, ...]


def parse(
    flags: Sequence[Flag], argv: Sequence[str], environ: Mapping[str, str], words: Sequence[str] = ()
) -> SimpleNamespace:
    """Values of all flags by `dest`, and three more attributes: `notices` are the ignored flags,
    `given` is the command line flag by flag, as (dest, words), and `settled` are the flags of the command line, of
    variables and of switches that stand for others. `words`: the flags whose values words without a flag are, in
    their order."""
    values: dict[str, Any] = {f.dest: ([] if f.many else f.default) for f in flags}
    notices: list[str] = []
    walked = list(_walk(flags, argv, words))
    settled = {f.dest for f, _, _ in walked}
    for f in flags:
        variable = None if f.dest in settled else from_environment(f, environ)
        if variable is not None:
            _apply(f, variable[1], variable[0], values, notices, replace=True)
            settled.add(f.dest)
    given: list[tuple[str, list[str]]] = []
    for f, name, value in walked:
        _apply(f, value, name, values, notices, replace=all(f.dest != dest for dest, _ in given))
        given.append((f.dest, [name, value] if isinstance(value, str) else [name]))
    all_implied = set[str]()
    for f in flags:
        implied = set[str]()
        for other, _, value in _walk(flags, f.means.split(), ()) if f.means and values[f.dest] else ():
            if other.dest not in settled:
                _apply(other, value, f.long, values, notices, replace=other.dest not in implied)
                implied.add(other.dest)
        all_implied |= implied
    for f in flags:
        if f.many and not values[f.dest]:
            values[f.dest] = list(f.default or [])
    return SimpleNamespace(**values, notices=notices, given=given, settled=settled | all_implied)


def _walk(flags: Sequence[Flag], argv: Sequence[str], words: Sequence[str]) -> Iterable[tuple[Flag, str, str | bool]]:
    """The flags of a command line in order, each with its name as written and its text (or True / False)."""
    by_name = {n: (f, True) for f in flags for n in f.all_names} | {n: (f, False) for f in flags for n in f.off_names}
    named = {by_name[name][0].dest for name in (word.partition("=")[0] for word in argv) if name in by_name}
    rest, nameless = list(reversed(argv)), [name for name in reversed(words) if by_name[name][0].dest not in named]
    while rest:
        word = rest.pop()
        name, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        key = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if key not in by_name and nameless and not word.startswith("-"):
            name = nameless.pop()
            yield by_name[name][0], name, word
            continue
        if key not in by_name:
            raise UsageError(unknown(name, by_name))
        f, on = by_name[key]
        if not f.takes_value or not on:
            if equals:
                raise UsageError(f"{name} takes no value")
            yield f, name, on
        elif equals:
            yield f, name, inline
        elif f.optional:
            yield f, name, (rest.pop() if rest and rest[-1].lower() in f.optional else f.optional[0])
        elif not rest:
            raise UsageError(f"{name} expects a value ({f.metavar})")
        elif rest[-1].partition("=")[0] in by_name:
            raise UsageError(
                f"{name} expects a value ({f.metavar}); if {rest[-1]!r} is meant, write {f.long}={rest[-1]}"
            )
        else:
            value = rest.pop()
            if f.then_number and rest and _is_number(rest[-1]):
                value += f":{rest.pop()}"
            yield f, name, value


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def unknown(word: str, names: Iterable[str]) -> str:
    """Error line for an unknown word, with the nearest flag."""
    if not word.startswith("-"):
        return f"unexpected argument: {word}"
    written = word.replace("_", "-")
    near = difflib.get_close_matches(written, list(names), n=3, cutoff=0.6)
    near.sort(key=lambda name: sorted(name) != sorted(written))  # swapped letters are likelier than others
    return f"unknown flag: {word}" + (f" (did you mean {near[0]}?)" if near else "")


def from_environment(f: Flag, environ: Mapping[str, str]) -> tuple[str, str | bool] | None:
    """The variable that sets this flag and its text (True or False for a switch); None when none does."""
    for name in f.env.split():
        if name.startswith("LLAMA_ARG_") and (f.off or not f.takes_value):
            negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
            if negative in environ:
                return negative, False
        text = environ.get(name)
        if text is None:
            continue
        if f.takes_value:
            return name, text
        lowered = text.strip().lower()
        if lowered not in TRUE | FALSE:
            raise UsageError(f"{name}: {text!r} is not one of 1, 0, true, false, on, off")
        return name, lowered in TRUE
    return None


def _apply(
    f: Flag, value: str | bool, source: str, values: dict[str, Any], notices: list[str], *, replace: bool
) -> None:
    if f.status == LATER and value is not False and value not in f.off_values:
        raise CliError(f"not supported yet: {source}" + (f": {f.help}" if f.help else ""))
    if f.only_on and value is False:
        raise CliError(f"not supported: {source}: {f.only_on}")
    parsed: Any = value
    if f.kind is not None and isinstance(value, str):
        try:
            parsed = f.kind(value)
        except ValueError as error:
            raise UsageError(f"{source}: {value!r} {error}") from None
    if f.status != WORKS:
        if value not in f.off_values:
            notices.append(source)
        return
    if f.many:
        values[f.dest] = ([] if replace else values[f.dest]) + (parsed if isinstance(parsed, list) else [parsed])
    else:
        values[f.dest] = parsed


# Checks of values. Each returns a function from text to value whose ValueError completes "--flag: 'text' ...".
