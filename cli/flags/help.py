"""Help texts from the flag tables: a column of names, a column of explanations, 80 to 100 wide."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress

from logitless.cli.flags.flags import IGNORED, LATER, WORKS, Flag, Group

NAMES_WIDTH = 34  # columns for the names
FEW = 60  # flags that one page may show


def width() -> int:
    """Columns for a text: those of the terminal, also when the text goes through a pipe; 80 without one."""
    with suppress(KeyError, ValueError):
        return _bounded(int(os.environ["COLUMNS"]))
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        with suppress(OSError, ValueError, AttributeError):  # it is no terminal, or closed
            return _bounded(os.get_terminal_size(stream.fileno()).columns)
    return 80


def _bounded(columns: int) -> int:
    return min(100, max(60, columns)) if columns > 0 else 80


def wrapped(text: str, indent: int = 0, begin: str = "") -> str:
    """Lines of a text within the width, behind `begin` and then blanks; words that fit stay whole."""
    lines = textwrap.wrap(text, width() - indent, break_on_hyphens=False) or [""]
    return f"{begin:<{indent}}" + f"\n{'':<{indent}}".join(lines)


def table(rows: Iterable[tuple[str, str]], width: int = NAMES_WIDTH) -> str:
    """Two columns; a name that is too long stands on a line of its own."""
    lines = []
    for name, explanation in rows:
        head = f"  {name}"
        if len(head) > width - 1:
            lines.append(wrapped(name, 6, "  ").replace(" " * 6, "  ", 1))
            head = ""
        lines.append(wrapped(explanation, width, head).rstrip())
    return "\n".join(lines)


def of_command(usage: str, summary: str, groups: Sequence[Group], *, everything: bool = False) -> str:
    """The text of --help, of --help-all with `everything`. A long one has a first page, of the common flags."""
    parts = [wrapped(f"logitless {usage}", 7, "usage: "), wrapped(summary)]
    working = [f for group in groups for f in group.flags if f.status == WORKS]
    page = working if everything or len(working) <= FEW else [f for f in working if f.common]
    for group in groups:
        flags = [f for f in group.flags if f in page]
        if flags:
            parts.append(wrapped(f"{group.title}:") + "\n" + table((names(f), explanation(f)) for f in flags))
    if len(page) < len(working):
        return "\n\n".join([*parts, f"--help-all shows {len(working) - len(page)} more flags."])
    for status, title in (
        (IGNORED, "Accepted for compatibility, without effect:"),
        (LATER, "Flags of llama-server that are refused (not supported yet):"),
    ):
        of_status = [n for g in groups for f in g.flags if f.status == status for n in (*f.all_names, *f.off_names)]
        if of_status:
            listing = textwrap.fill(" ".join(of_status), width() - 2, break_on_hyphens=False, break_long_words=False)
            parts.append(f"{wrapped(title)}\n" + textwrap.indent(listing, "  "))
    return "\n\n".join(parts)


def names(f: Flag) -> str:
    """A flag's names and the name of its value: `-c, --ctx-size N`."""
    text = ", ".join((*f.all_names, *f.off_names))
    if not f.takes_value:
        return text
    return f"{text} [{f.metavar}]" if f.optional else f"{text} {f.metavar}"


def explanation(f: Flag) -> str:
    """A flag's meaning, default and environment variable."""
    notes = []
    if f.off_names and f.default is not None:
        notes.append(f"default: {'on' if f.default else 'off'}")
    elif f.takes_value and f.default not in (None, "", [], ()):
        default = ",".join(map(str, f.default)) if isinstance(f.default, (list, tuple)) else f.default
        notes.append(f"default: {default}")
    if f.env:
        notes.append(f"env: {f.env.split()[0]}")
    return f.help + (f" ({'; '.join(notes)})" if notes else "")
