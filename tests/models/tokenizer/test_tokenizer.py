"""Tokenizers against llama.cpp's ids; special tokens, odd vocabularies, streams, speed."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import Sequence, Split

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.tokenizer import Attr, StreamDecoder, Tokenizer, base, from_metadata
from logitless.models.tokenizer.base import blocks
from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS

VOCABS = ("bert-bge", "gpt-2", "llama-spm", "mpt", "qwen2", "starcoder")
Load = Callable[[str], Tokenizer]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="session")
def load(shared_data: Path) -> Load:
    cache: dict[str, Tokenizer] = {}

    def tokenizer_of(name: str) -> Tokenizer:
        if name not in cache:
            with GGUFFile.open(shared_data / name) as file:
                cache[name] = from_metadata(file.metadata, path=name)
        return cache[name]

    return tokenizer_of


@pytest.fixture(scope="session")
def vocabulary(load: Load) -> Load:
    return lambda name: load(f"vocabs/ggml-vocab-{name}.gguf")


def metadata(tokens: list[tuple[str, float, int]], model: str = "llama", **more: Any) -> dict[str, Any]:
    values = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text.encode() for text, _, _ in tokens],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in tokens], np.int32),
    }
    return values | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


SPECIALS = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
LETTERS = [("▁", -1.0, NORMAL), ("a", -2.0, NORMAL), ("b", -3.0, NORMAL), ("ab", -0.5, NORMAL), ("▁a", -0.7, NORMAL)]


def bpe(tokens: list[str], merges: list[str], types: dict[str, int] | None = None, **more: Any) -> Tokenizer:
    rows = [(text, 0.0, (types or {}).get(text, NORMAL)) for text in tokens]
    return from_metadata(metadata(rows, "gpt2", merges=merges, **more))


# -- llama.cpp's own ids


@pytest.mark.parametrize("name", VOCABS)
def test_ids_equal_llama_cpp(name: str, shared_data: Path, vocabulary: Load) -> None:
    path = shared_data / "vocabs" / f"ggml-vocab-{name}.gguf"
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    with open(f"{path}.out") as file:
        expected = [[int(id) for id in line.split()] for line in file.read().split("\n")]
    assert len(texts) == len(expected) == 47
    tokenizer = vocabulary(name)
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, repr(text)


def test_prompts_and_generated_text_of_the_models(shared_data: Path, load: Load) -> None:
    paths = sorted((shared_data / "expected").glob("*.gguf.json"))
    assert len(paths) == 13
    for path in paths:
        expected = json.loads(path.read_text())
        tokenizer = load(f"models/{expected['file']}")
        assert tokenizer.encode(expected["prompt"]) == expected["prompt_ids"]
        ids = expected["prompt_ids"] + expected["greedy_ids"]
        assert tokenizer.decode(ids).decode() == expected["greedy_text"]


def test_special_ids_of_real_vocabularies(vocabulary: Load) -> None:
    qwen2 = vocabulary("qwen2")
    assert (qwen2.bos_id, qwen2.eos_id, qwen2.eot_id, qwen2.pad_id) == (151643, 151645, 151645, 151643)
    assert qwen2.eog_ids == {151643, 151645, 128247}  # <|endoftext|> <|im_end|> </s>
    assert (qwen2.vocab_type, qwen2.add_bos, qwen2.add_space_prefix) == (2, False, False)
    llama = vocabulary("llama-spm")
    assert (llama.bos_id, llama.eos_id, llama.unk_id, llama.pad_id) == (1, 2, 0, None)
    assert (llama.vocab_type, llama.add_bos, llama.add_eos, llama.add_space_prefix) == (1, True, False, True)
    bert = vocabulary("bert-bge")
    assert (bert.vocab_type, bert.bos_id, bert.sep_id, bert.unk_id, bert.pad_id) == (3, 101, 102, 100, 0)
    assert bert.encode("hello") == [101, 7592, 102]


def test_a_padding_id_of_all_ones_means_none(load: Load) -> None:
    tokenizer = load("models/stories260K.gguf")
    assert (tokenizer.pad_id, tokenizer.sep_id, tokenizer.bos_id, tokenizer.eos_id) == (None, None, 1, 2)


# -- special tokens


def test_control_tokens_are_parsed_only_when_asked(vocabulary: Load) -> None:
    tokenizer = vocabulary("qwen2")
    text = "<|im_start|>user\nHi<|im_end|>"
    parsed = tokenizer.encode(text)
    assert parsed == [151644, 872, 198, 13048, 151645]
    plain = tokenizer.encode(text, parse_special=False)
    assert not {151644, 151645} & set(plain)
    assert tokenizer.decode(plain) == tokenizer.decode(parsed, special=True) == text.encode()
    assert tokenizer.decode(parsed) == b"user\nHi"
    assert tokenizer.piece(151644, special=False) == b""
    assert tokenizer.is_eog(151645)


def test_spm_puts_a_space_at_the_start_and_after_special_tokens(vocabulary: Load) -> None:
    tokenizer = vocabulary("llama-spm")
    assert tokenizer.encode("Hello<s>Hello Hello", add_special=False) == [15043, 1, 15043, 15043]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", add_special=False) == []
    assert tokenizer.decode([15043, 15043]) == b"Hello Hello"
    assert tokenizer.pieces([15043, 15043]) == b" Hello Hello"
    assert tokenizer.text(15043) == "▁Hello"


def test_user_defined_tokens_are_always_parsed_and_the_longest_wins() -> None:
    tokens = [*SPECIALS, *LETTERS, ("aa", 0.0, USER_DEFINED), ("aaaa", 0.0, USER_DEFINED), ("a<s>", 0.0, CONTROL)]
    tokenizer = from_metadata(metadata(tokens, add_space_prefix=False))
    assert tokenizer.encode("aaaaaab", add_special=False, parse_special=False) == [9, 8, 5]
    assert tokenizer.encode("ba<s>", add_special=False) == [5, 10]
    assert tokenizer.piece(8, special=False) == b"aa"


def test_phi3_tokens_swallow_the_white_space_after_them() -> None:
    tokens = [*SPECIALS, *LETTERS, ("<|end|>", 0.0, CONTROL)]
    values = metadata(tokens, add_space_prefix=False) | {"general.name": "Phi-3 mini"}
    tokenizer = from_metadata(values)
    assert tokenizer.encode("a<|end|> \n\tb<s> b", add_special=False) == [4, 8, 5, 1, 3, 5]
    assert tokenizer.attr(8) & Attr.RSTRIP
    assert tokenizer.eot_id == 8


def test_masks_swallow_the_white_space_before_them() -> None:
    tokenizer = bpe(["a", "Ġ", "<mask>"], ["Ġ a"], {"<mask>": CONTROL}, pre="jina-v2-code")
    assert tokenizer.encode("a <mask> a", add_special=False) == [0, 2, 1, 0]


def test_tokens_that_end_a_generation_by_their_text() -> None:
    tokens = ["<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|fim_pad|>", "a"]
    harmony = bpe(tokens, [], dict.fromkeys(tokens[:-1], CONTROL), eos_token_id=1)
    assert harmony.eog_ids == {0, 1, 2, 5}  # <|end|> only ends a message there
    assert harmony.attr(3) == harmony.attr(4) == Attr.USER_DEFINED
    plain = bpe(["a", "<|end|>", "<｜end▁of▁sentence｜>"], [], eos_token_id=4294967295)
    assert plain.eog_ids == {1, 2}
    assert plain.eos_id is None
    assert plain.attr(1) & Attr.CONTROL  # though the file calls it normal


def test_tokens_that_must_never_be_sampled() -> None:
    assert bpe(["a", "b"], []).suppressed_ids == ()
    for ids in ([2, 0, 2], np.array([2, 0], np.int32)):
        assert bpe(["a", "b", "c"], [], suppress_tokens=ids).suppressed_ids == (0, 2)
    for wrong, told in (
        ([0, 3], "suppress_tokens: there is no token 3, ids end at 2"),
        ([-1], "suppress_tokens: there is no token -1, ids end at 2"),
        ([0, 1, 2], "suppress_tokens leaves no token"),
        ([0.5], "suppress_tokens is not an array of integers"),
        (["a"], "suppress_tokens is not an array of integers"),
        (7, "suppress_tokens is not an array of integers"),
    ):
        with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{told}$"):
            bpe(["a", "b", "c"], [], suppress_tokens=wrong)


def test_fill_in_the_middle_ids_are_found() -> None:
    tokenizer = bpe(["a", "<fim_prefix>", "<|fim_suffix|>", "x"], [], fim_mid_token_id=3)
    assert (tokenizer.fim_pre_id, tokenizer.fim_suf_id, tokenizer.fim_mid_id) == (1, 2, 3)


def test_add_eos_and_missing_ids() -> None:
    assert from_metadata(metadata([*SPECIALS, *LETTERS], add_eos_token=True)).encode("ab") == [1, 3, 6, 2]
    tiny = bpe(["a", "b"], [], pre="llama-bpe")  # the defaults, 11, are out of range
    assert (tiny.bos_id, tiny.eos_id, tiny.encode("ab")) == (None, None, [0, 1])


# -- odd vocabularies


def test_spm_without_byte_tokens_gives_unknown() -> None:
    tokenizer = from_metadata(metadata([*SPECIALS, *LETTERS], add_space_prefix=False))
    assert tokenizer.encode("aé😀b", add_special=False) == [4, 0, 0, 5]


def test_spm_merges_by_score_then_from_the_left() -> None:
    tokens = [*SPECIALS, *LETTERS, ("aa", -0.2, NORMAL), ("aab", -9.0, NORMAL)]
    tokenizer = from_metadata(metadata(tokens, add_space_prefix=False))
    assert tokenizer.encode("aaa", add_special=False) == [8, 4]
    assert tokenizer.encode("aab", add_special=False) == [9]
    assert tokenizer.encode("bab", add_special=False) == [5, 6]


def test_spm_cuts_words_only_where_no_token_spans_the_gap() -> None:
    tokens = [*SPECIALS, *LETTERS, ("a▁", -0.1, NORMAL), ("a▁a", -0.05, NORMAL)]
    tokenizer = from_metadata(metadata(tokens, add_space_prefix=False))
    assert tokenizer.encode("a a", add_special=False) == [9]
    assert tokenizer.encode("b a", add_special=False) == [5, 7]


def test_odd_tokens_have_pieces() -> None:
    tokens = [
        *SPECIALS,
        ("", 0.0, NORMAL),
        ("<0x41>", 0.0, BYTE),
        ("odd", 0.0, BYTE),
        ("u", 0.0, UNUSED),
        ("w", 0.0, 77),
    ]
    values = metadata([*tokens, ("x", 0.0, NORMAL)])
    values["tokenizer.ggml.tokens"][8] = b"\xff\xfe"
    tokenizer = from_metadata(values)
    assert [tokenizer.piece(i) for i in range(3, 9)] == [b"[EMPTY_3]", b"A", b"", b"", b"", b"\xff\xfe"]
    assert tokenizer.text(8) == "\ufffd\ufffd"
    with pytest.raises(IndexError, match="token id 9 is outside"):
        tokenizer.piece(9)
    with pytest.raises(IndexError, match="token id -1 is outside"):
        tokenizer.piece(-1)


def test_repeated_tokens_encode_as_the_first() -> None:
    tokenizer = from_metadata(metadata([*SPECIALS, *LETTERS, ("b", 0.0, NORMAL)], add_space_prefix=False))
    assert tokenizer.encode("b", add_special=False) == [5]
    assert tokenizer.piece(8) == b"b"


def test_bpe_symbols_outside_the_vocabulary_become_their_known_bytes() -> None:
    tokenizer = bpe(["a", "b", "abc"], ["a b", "x y", "ab c"])
    assert tokenizer.encode("ab", add_special=False) == [0, 1]  # merged to "ab", which is no token
    assert tokenizer.encode("abc", add_special=False) == [2]
    assert tokenizer.encode("axyb", add_special=False) == [0, 1]
    assert tokenizer.encode("azb", add_special=False) == [0, 1]


def test_bpe_merges_and_tokens_that_make_no_sense_are_passed_over() -> None:
    values = metadata([("a", 0.0, NORMAL), ("b", 0.0, NORMAL), ("ab", 0.0, NORMAL), ("c", 0.0, NORMAL)], "gpt2")
    values["tokenizer.ggml.tokens"][3] = b"\xff"
    values["tokenizer.ggml.merges"] = [b"\xff a", b"a ", b"ab", b" a b", b"", b"a b", b"a b"]
    tokenizer = from_metadata(values)
    assert tokenizer.encode("abc", add_special=False) == [2]
    assert tokenizer.piece(3) == b"[UNK_BYTE_0xff\xff]"  # llama.cpp's mark for what is no byte of GPT-2's alphabet


def test_ignore_merges_keeps_whole_words() -> None:
    tokens = ["a", "b", "c", "bc", "abc"]
    assert bpe(tokens, ["b c"], pre="llama-bpe").encode("abc", add_special=False) == [4]
    assert bpe(tokens, ["b c"], pre="gpt-2").encode("abc", add_special=False) == [0, 3]


def test_gemma4_merges_text_with_byte_fallback() -> None:
    tokens = ["<bos>", "a", "▁", "▁a", "\n\n", *(f"<0x{b:02X}>" for b in range(256))]
    rows = [(t, 0.0, BYTE if t.startswith("<0x") else CONTROL if t == "<bos>" else NORMAL) for t in tokens]
    tokenizer = from_metadata(metadata(rows, "gemma4", merges=["▁ a"], bos_token_id=0, add_bos_token=False))
    ids = tokenizer.encode("a a\n\né")
    assert ids == [0, 1, 3, 4, 5 + 0xC3, 5 + 0xA9]
    assert tokenizer.decode(ids) == "a a\n\né".encode()


def test_bert_words() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁!", "▁中", "▁c", "afe"]
    rows = [(t, 0.0, CONTROL if t[0] == "[" else NORMAL) for t in words]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    tokenizer = from_metadata(metadata(rows, "bert", **ids))
    assert tokenizer.encode("HELLO  world!中 café xyz") == [2, 4, 5, 6, 7, 8, 9, 10, 1, 3]
    assert tokenizer.encode("hello[SEP]hello", add_special=False) == [4, 3, 4]
    assert tokenizer.encode("he\u200bllo\ufffd", add_special=False) == [4]  # format characters vanish
    cased = from_metadata(metadata(rows, "bert", **ids) | {"tokenizer.ggml.normalizer.lowercase": False})
    assert cased.encode("Hello café", add_special=False) == [1, 1]


def test_lone_surrogates_count_as_replacement_characters(vocabulary: Load) -> None:
    for name in ("llama-spm", "gpt-2"):
        tokenizer = vocabulary(name)
        assert tokenizer.encode("a\ud800b\udc80") == tokenizer.encode("a\ufffdb\ufffd")
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=2, max_size=4), max_size=30), st.text("ab\n\\'\x00é😀", max_size=40))
def test_rwkv_takes_the_longest_token_of_bytes(words: list[bytes], text: str) -> None:
    """Tokens are written as Python's bytes literals, as llama.cpp's converter does."""
    tokens = list(dict.fromkeys([*(bytes([i]) for i in range(256)), *words, *(b * 2 for b in words)]))
    literals = [("<s>", 0.0, CONTROL), *((repr(token)[2:-1], 0.0, NORMAL) for token in tokens)]
    tokenizer = from_metadata(metadata(literals, "rwkv"))
    left, want = text.encode(), []
    while left:
        longest = max((token for token in tokens if left.startswith(token)), key=len)
        want.append(1 + tokens.index(longest))
        left = left[len(longest) :]
    assert tokenizer.encode(text) == want
    assert tokenizer.decode(want) == text.encode()
    assert from_metadata(metadata(literals[:1], "rwkv")).encode("a<s>b") == [0]  # bytes that no token has


# -- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "plamo"}, "tokenizer.ggml.model: tokenizer model 'plamo' is not supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 7}, "tokenizer.ggml.model has the wrong type: int instead of str"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is not an array of strings"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not an array of strings"),
        ({"scores": np.zeros(3)}, "tokenizer.ggml.scores has 3 entries for 8 tokens"),
        ({"scores": ["a"] * 8}, "tokenizer.ggml.scores is not an array of numbers"),
        ({"token_type": np.zeros(1, int)}, "tokenizer.ggml.token_type has 1 entries for 8 tokens"),
        ({"bos_token_id": "1"}, "tokenizer.ggml.bos_token_id has the wrong type: str instead of int"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "pre": "nonsense"}, "tokenizer.ggml.pre: pre-tokenizer 'nonsense' is not supported"),
        (
            {"model": "gpt2", "merges": [], "add_bos_token": True},
            "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id names no token",
        ),
    ],
)
def test_broken_vocabularies_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    values = metadata([*SPECIALS, *LETTERS]) | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(ModelFileError) as caught:
        from_metadata(values, path="m.gguf")
    assert str(caught.value) == f"m.gguf: {message}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -- pre-tokenizers


def cut(name: str, text: str) -> list[str]:
    splits = [Split(tokenizers.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return [piece for piece, _ in Sequence(splits).pre_tokenize_str(text)]


def test_every_pre_tokenizer_keeps_the_text() -> None:
    text = "Hello, y'ALL'S 12345 año 中文かな ไทย éa\u0301 \n\n x\t\ty <sentinel:12>IMGIMGABZ…"
    assert {name: again for name in PRE_TOKENIZERS if (again := "".join(cut(name, text))) != text} == {}


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'm  12a\n\n b", ["I", "'m", " ", " 12", "a", "\n\n", " b"]),
        ("llama-bpe", "I'M 12345  x!\n\ny", ["I", "'M", " ", "123", "45", " ", " x", "!\n\n", "y"]),
        ("qwen2", "a12\n \nb", ["a", "1", "2", "\n \n", "b"]),
        ("grok-2", "a123 '", ["a", "1", "2", "3", " '"]),
        ("dbrx", "a1234 '", ["a", "123", "4", " '"]),
        ("starcoder", "x 12", ["x", " ", "1", "2"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("default", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("deepseek-llm", "Ab 中文12 ", ["Ab", " ", "中文", "12", " "]),
        ("deepseek-v3", "Ab.c中文1234", ["Ab", ".c", "中文", "123", "4"]),
        ("tekken", "fooBar HTTPServer1", ["foo", "Bar", " HTTPServer", "1"]),
        ("gpt-4o", "fooBar's 1234//\n", ["foo", "Bar's", " ", "123", "4", "//\n"]),
        ("viking", "hey, 12", ["hey", ",", " ", "1", "2"]),
        ("superbpe", "a b 1234567", ["a b ", "1", "234", "567"]),
        ("afmoe", "x 1234567", ["x", " ", "1", "234", "567"]),
        ("tiny_aya", "1234567 1234x", ["1", "234", "567", " ", "123", "4", "x"]),
        ("kimi-k2", "中文abc's", ["中文", "abc's"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("exaone-moe", "one two3", ["one two", "3"]),
        ("chameleon", "a  b!", ["a", "  ", "b", "!"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_pre_tokenizers_cut(name: str, text: str, pieces: list[str]) -> None:
    assert cut(name, text) == pieces


# -- properties


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "mpt"])  # starcoder lacks some bytes
@settings(max_examples=60)
@given(text=st.text())
def test_bpe_round_trip(name: str, text: str, vocabulary: Load) -> None:
    tokenizer = vocabulary(name)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text.encode()


@pytest.mark.parametrize("name", ["vocabs/ggml-vocab-llama-spm.gguf", "models/prometheus-shakespeare-2.3M-F16.gguf"])
@settings(max_examples=100)
@given(text=st.text())
def test_spm_round_trip(name: str, text: str, load: Load) -> None:
    tokenizer, text = load(name), text.replace("▁", "_")
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text.encode()


@settings(max_examples=200)
@given(text=st.text(alphabet="ab ▁é"))
def test_spm_words_apart_equal_words_together(text: str, vocabulary: Load) -> None:
    tokenizer: Any = vocabulary("llama-spm")
    escaped = text.replace(" ", "▁")
    assert list(chain.from_iterable(tokenizer._encode_text(text))) == (
        tokenizer._encode_word(escaped) if escaped else []
    )


@given(pieces=st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=2).map(str.encode))), cut=st.integers(1, 4))
def test_stream_decoder_equals_decoding_the_whole(pieces: list[bytes], cut: int) -> None:
    whole = b"".join(pieces)
    decoder = StreamDecoder(from_metadata(metadata([*SPECIALS])))
    texts = [decoder.push_bytes(whole[i : i + cut]) for i in range(0, len(whole), cut)]
    assert "".join([*texts, decoder.flush()]) == whole.decode("utf-8", "replace")
    assert decoder.pending == b""


def test_stream_decoder_holds_back_what_is_not_complete(vocabulary: Load) -> None:
    tokenizer = vocabulary("llama-spm")
    decoder = StreamDecoder(tokenizer)
    ids = [tokenizer.vocab.ids[f"<0x{b:02X}>"] for b in "😀".encode()]
    assert [decoder.push(id) for id in ids] == ["", "", "", "😀"]
    assert [decoder.push(id) for id in ids[:2]] == ["", ""]
    assert decoder.pending == "😀".encode()[:2]
    assert decoder.push(15043) == "\ufffd Hello"
    assert decoder.push(ids[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(1) == ""
    assert StreamDecoder(tokenizer, special=True).push(1) == "<s>"


# -- time; generous, for they guard against quadratic growth, not against a slow machine


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def test_a_150k_vocabulary_loads_fast(shared_data: Path) -> None:
    with GGUFFile.open(shared_data / "vocabs" / "ggml-vocab-qwen2.gguf") as file:
        assert seconds(lambda: from_metadata(file.metadata)) < 3


@pytest.mark.parametrize("name", ["llama-spm", "qwen2", "bert-bge"])
def test_long_texts_take_linear_time(name: str, shared_data: Path, vocabulary: Load) -> None:
    tokenizer = vocabulary(name)
    prose = (shared_data / "corpora" / "tinyshakespeare.txt").read_text()[:100_000]
    for text in (prose, "a" * 100_000, " " * 100_000, "1" * 100_000, "<s>" * 30_000, "<" * 100_000):
        assert seconds(lambda text=text: tokenizer.encode(text)) < 4


# -- long texts


@settings(max_examples=30)
@given(
    words=st.lists(
        st.sampled_from([*"aB é1\n\r\t./中", "a b", "a\nB", "a1", "a \nb", "'s t", "a\n\nb", "A  b"]), min_size=3
    ),
    size=st.integers(1, 8),
)
def test_blocks_are_cut_where_no_piece_reaches_across(words: list[str], size: int) -> None:
    text = "".join(words)
    for pre in set(PRE_TOKENIZERS.values()):
        split = Sequence([Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns])

        def pieces(part: str, split: Any = split) -> list[str]:
            return [piece for piece, _ in split.pre_tokenize_str(part)]

        parts = list(blocks(text, re.compile(pre.gap), size))
        assert "".join(parts) == text
        assert [piece for part in parts for piece in pieces(part)] == pieces(text), pre


@pytest.mark.parametrize("name", VOCABS)
def test_long_texts_come_in_parts(name: str, vocabulary: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = vocabulary(name)
    text = "Of all the things\nthat are, Aé 12 of <s> them\n\n three... " * 20 + "x" * 300
    whole = tokenizer.encode(text)
    monkeypatch.setattr(base.blocks, "__defaults__", (50,))
    parts = list(tokenizer.encode_parts(text))
    assert list(chain.from_iterable(parts)) == whole
    assert len(parts) > 10


def test_a_long_word_can_be_given_up(vocabulary: Load) -> None:
    parts = vocabulary("llama-spm").encode_parts("a" * 100_000, add_special=False)
    assert [len(next(parts)) for _ in range(5)] == [0] * 5
    assert sum(map(len, parts)) > 1000
