"""Answers of the API as typed structs; /openapi.json and docs/http.md are made of them."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from msgspec import UNSET, Meta, UnsetType

__all__ = ["UNSET", "Opt", "doc"]

T = TypeVar("T")
Opt: TypeAlias = T | UnsetType
"""A field that an answer has only where its request asks for it, or where it says something."""


def doc(text: str) -> Meta:
    """The meaning of a field."""
    return Meta(description=text)
