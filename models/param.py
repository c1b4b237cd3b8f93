"""Param: declaration of a struct's field, from which HTTP bodies, flags, keywords and documents follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from msgspec import Struct

FLOAT_MAX = 3.4028234663852886e38  # the device computes in f32
INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Param:
    """Declaration of one field: help text, bounds, flag and aliases.

    A value outside hard limits is refused; one outside other limits counts as the nearest limit."""

    doc: str
    low: float = -math.inf
    high: float = math.inf
    hard: bool = False
    choices: tuple[str, ...] = ()
    least: int = 0  # items of an array
    most: int | None = None
    required: bool = False  # refused without it, by the function that reads it where it has a default
    instead: tuple[str, ...] = ()  # fields that may stand in its place
    aliases: tuple[str, ...] = ()  # names that count where the field itself is not given, in order
    flag: str = ""  # "--temp --temperature", of the server's default
    env: str = ""  # its variable
    common: bool = False  # the flag is on the first page of --help
    key: str = ""  # general.sampling.…, the default of a model that has it in its file
    fields: tuple[type[Struct], ...] = ()  # of an object: structs of its fields, one of which it has


@cache
def params_of(kind: type[Struct]) -> Mapping[str, tuple[Any, Param]]:
    """The declared fields of a struct: (type, declaration) by name."""
    declared = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        params = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Param)]
        if params:
            declared[name] = (hint.__origin__, params[0])
    return declared
