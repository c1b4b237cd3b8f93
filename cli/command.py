"""One command of the command line, as a row of the table of commands."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from logitless.cli.flags.flags import Group


@dataclass(frozen=True)
class Command:
    """`<module>` has `run(options) -> int`; `<table>.<NAME>` has its flags. A name may have two words."""

    name: str
    usage: str
    summary: str
    table: str = "logitless.cli.flags.options"
    code: str = ""  # the module below logitless.cli.commands, where it is not named like the command
    words: tuple[str, ...] = ()  # the flags whose values words without a flag are, in their order

    @property
    def module(self) -> str:
        """The module's whole name. That of an extra is written so in its row."""
        code = self.code or self._identifier
        return code if code.startswith("logitless.") else f"logitless.cli.commands.{code}"

    @property
    def _identifier(self) -> str:
        return self.name.replace("-", "_").replace(" ", "_")

    @property
    def groups(self) -> Sequence[Group]:
        groups: Sequence[Group] = getattr(importlib.import_module(self.table), self._identifier.upper())
        return groups
