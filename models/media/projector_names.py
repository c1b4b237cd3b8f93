"""Names of projector files: their words, beside those of their text models."""

from __future__ import annotations

import re

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(  # a tensor type in a file name
    r"(?<![a-z0-9])(?:ud[-_])?(?:i?q\d+(?:_[a-z0-9]+)*|tq\d+_\d+|(?:bf|f|fp)(?:8|16|32)|(?:mx|nv)fp\d+(?:_[a-z]+)*)"
    r"(?![a-z0-9])"
)
_OTHER = re.compile(r"mmproj|imatrix|^mtp-")  # names of files that are no text models
_WITHOUT_MEANING = frozenset({"mmproj", "model", "ggml", "gguf"})


def is_projector_name(name: str) -> bool:
    """True for the name of a projector's file."""
    return "mmproj" in name.lower()


def is_other_name(name: str) -> bool:
    """True for the name of a file that is no text model."""
    return _OTHER.search(name.lower()) is not None


def n_bits(name: str) -> int:
    """The first number of the tensor type that ends a file's name: 4 of Q4_K_M, 16 of BF16; 0 without one."""
    kind = re.search(r"[-.]([A-Za-z0-9_]+)$", _PART.sub("", name.removesuffix(".gguf")))
    digits = re.search(r"\d+", kind[1]) if kind else None
    return int(digits[0]) if digits else 0


def words_of(name: str) -> list[str]:
    """Words and numbers of a file's name without those of the tensor type, the part, or any projector's."""
    text = _TYPE.sub(" ", _PART.sub("", name.lower().removesuffix(".gguf")))
    return [word for word in re.findall(r"[^\W\d_]+|\d+", text) if word not in _WITHOUT_MEANING]


def contains(words: list[str], part: list[str]) -> bool:
    """True if words stand in this order, without others between them, among words."""
    return any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))
