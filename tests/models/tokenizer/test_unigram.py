"""Unigram tokenizer: llama.cpp's ids, the likeliest segmentation, broken tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.models.errors import ModelFileError
from logitless.models.tokenizer import UGM, Tokenizer, from_metadata
from logitless.models.tokenizer.unigram import Charsmap
from tests.helpers.unigram import NORMAL, RULES, TOKENS, UNUSED, charsmap


def unigram(**more: Any) -> Tokenizer:
    values = {
        "model": "t5",
        "tokens": [text.encode() for text, _, _ in TOKENS],
        "scores": np.array([score for _, score, _ in TOKENS], np.float32),
        "token_type": np.array([kind for _, _, kind in TOKENS], np.int32),
        "precompiled_charsmap": np.frombuffer(charsmap(RULES), np.uint8),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
    } | more
    return from_metadata({f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None})


# text → ids: with a space in front and several as one; with neither. All by llama-server's
# /tokenize.
RECORDED: dict[str, tuple[list[int], list[int]]] = {
    "ab": ([6, 9], [9]),
    " a  b\tab": ([10, 6, 8, 6, 9], [10, 6, 6, 8, 6, 9]),
    "the\u00a0ﬁne\u200bb!": ([18, 6, 13, 16, 8, 22], [0, 17, 6, 13, 16, 8, 22]),
    "e\u0301é": ([6, 12, 12], [12, 12]),
    "日本 日": ([6, 19, 6, 20], [19, 6, 20]),
    "xyz x": ([6, 0, 6, 0], [0, 6, 0]),
    "New York<mask>ab zz": ([4, 3, 6, 9, 6, 5], [4, 3, 9, 6, 5]),
    "a</s> ab": ([10, 2, 6, 9], [7, 2, 6, 9]),
    "": ([], []),
    "  ": ([], [6, 6]),
    "……c": ([6, 0, 21], [0, 21]),
    "Ａb\n": ([6, 9], [9, 6]),
}


@pytest.mark.parametrize("text", RECORDED)
def test_ids_are_llama_cpps(text: str) -> None:
    merging = unigram(add_space_prefix=True, remove_extra_whitespaces=True)
    plain = unigram(add_space_prefix=False, remove_extra_whitespaces=False)
    assert merging.vocab_type == UGM
    result = tuple(t.encode(text, add_special=False) for t in (merging, plain))
    assert result == RECORDED[text]
    assert merging.encode(text) == [1, *RECORDED[text][0], 2]  # an end unless the file says otherwise


def test_missing_keys_have_defaults() -> None:
    without = unigram(bos_token_id=None, add_bos_token=None, precompiled_charsmap=None, eos_token_id=None)
    assert without.encode("ﬁ a") == [0, 10, 1]  # no normalisation; T5's end is 1
    assert unigram(add_eos_token=False).encode("a") == [1, 7]


def test_text_comes_back() -> None:
    tokenizer = unigram(add_space_prefix=True, remove_extra_whitespaces=True)
    assert tokenizer.decode(tokenizer.encode("the ab", add_special=False)) == b"the ab"


def spellings(word: str) -> list[tuple[float, list[int]]]:
    """All ways to cut a word: the sum of scores, and the ids, in which unknown neighbours are
    one."""
    ids = {text: id for id, (text, _, kind) in enumerate(TOKENS) if kind in (NORMAL, UNUSED)}
    least = min(score for _, score, kind in TOKENS if kind == NORMAL)
    if not word:
        return [(0.0, [])]
    result = []
    for n in range(1, min(len(word), 4) + 1):
        id = ids.get(word[:n], 0)
        if id or n == 1:
            for total, rest in spellings(word[n:]):
                score = TOKENS[id][1] if id else least - 10
                result.append((total + score, rest if id == 0 and rest[:1] == [0] else [id, *rest]))
    return result


@given(st.text("abefinc日本z", max_size=9))
def test_a_word_is_spelt_in_the_likeliest_way(word: str) -> None:
    tokenizer = unigram(precompiled_charsmap=None, add_eos_token=False, add_bos_token=False)
    ways = spellings(word)
    most = max(total for total, _ in ways)
    assert tokenizer.encode(word) in [ids for total, ids in ways if total == pytest.approx(most)]


def test_a_token_of_a_hundred_thousand_letters_costs_little() -> None:
    tokens = [*((text.encode(), score) for text, score, _ in TOKENS), (b"a" * 100_000, -3.0)]
    types = np.array([kind for *_, kind in TOKENS] + [NORMAL], np.int32)
    scores = np.array([score for _, score in tokens], np.float32)
    tokenizer = unigram(tokens=[text for text, _ in tokens], scores=scores, token_type=types, add_eos_token=False)
    assert tokenizer.encode("a" * 30_000, add_special=False) == [7] * 30_000


def test_the_longest_beginning_counts() -> None:
    table = Charsmap(charsmap({"a": "1", "ab": "2", "abcd": "3", "日": "4"}))
    assert [table.longest("xabcabcd日", at) for at in (0, 1, 4, 8)] == [(0, ""), (2, "2"), (4, "3"), (1, "4")]
    assert Charsmap(b"").longest("a", 0) == (0, "")


@pytest.mark.parametrize("data", [b"\x01", b"\x10\0\0\0abcd", b"\x03\0\0\0abc", b"\xff\xff\xff\xff"])
def test_a_table_that_is_cut_off(data: bytes) -> None:
    with pytest.raises(ModelFileError, match="precompiled_charsmap is cut off"):
        unigram(precompiled_charsmap=np.frombuffer(data, np.uint8))


@given(st.binary(max_size=64), st.text(max_size=8))
def test_a_table_of_anything_ends(nodes: bytes, text: str) -> None:
    nodes = nodes[: len(nodes) // 4 * 4]
    table = Charsmap(len(nodes).to_bytes(4, "little") + nodes + b"x\0")
    assert all(0 <= table.longest(text, at)[0] <= len(text) - at for at in range(len(text)))


@pytest.mark.parametrize("value", ["text", np.zeros(4, np.float32), np.zeros(4, np.int32), 7])
def test_a_table_of_the_wrong_type(value: object) -> None:
    with pytest.raises(ModelFileError, match="precompiled_charsmap is not an array of bytes"):
        unigram(precompiled_charsmap=value)
