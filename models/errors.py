"""ModelFileError: a model file that cannot be used."""

from __future__ import annotations

from collections.abc import Sized
from os import PathLike, fspath

_ONE_LINE = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029)}


class ModelFileError(ValueError):
    """A model file that cannot be used: missing, not a GGUF, corrupt, truncated, or of a kind that
    we do not support.

    The text is always one line, `<file>: <what is wrong>`, and `problem` names the key, tensor or
    byte offset at fault."""

    def __init__(self, path: str | PathLike[str], problem: str) -> None:
        super().__init__(path, problem)  # both as args, so that the exception survives pickling
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{fspath(self.path)}: {self.problem}".translate(_ONE_LINE)


def unsupported(kind: str, name: object, known: Sized) -> str:
    """The text about a name that is none of the known ones, which are too many for a line."""
    return f"{kind} {str(name)[:40]!r} is not supported; docs/models.md lists the {len(known)} that are"


def shown(name: str | bytes) -> str:
    """A name from a file as an error message quotes it: escaped, and cut when it is absurdly long."""
    text = repr(name)
    return text if len(text) <= 100 else text[:96] + "...'"
