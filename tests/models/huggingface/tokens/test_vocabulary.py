"""Tokenizers of Hugging Face folders: ids of the `tokenizers` package, templates, special ids, damaged files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.tokens.pretokenizer import pre_tokenizer_name
from logitless.models.huggingface.tokens.vocabulary import vocabulary_keys
from logitless.models.tokenizer import Tokenizer, from_metadata
from logitless.models.tokenizer.bpe import BYTE_OF_CHAR
from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS as known_pre_tokenizers
from tests.helpers.huggingface_folders import tokenizer_json

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
PRE_TOKENIZERS: dict[str, Any] = {  # as the models' own files have them
    "gpt-2": BYTES,
    "mpt": BYTES,
    "qwen2": {"type": "Sequence", "pretokenizers": [SPLIT, {**BYTES, "use_regex": False}]},
    "starcoder": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]},
}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def added(metadata: Any) -> list[dict[str, Any]]:
    kinds = np.asarray(metadata["tokenizer.ggml.token_type"])
    tokens = [token.decode() for token in metadata["tokenizer.ggml.tokens"]]
    return [{"id": int(i), "content": tokens[i], "special": bool(kinds[i] == 3), **FLAGS}
            for i in np.flatnonzero((kinds == 3) | (kinds == 4))]  # fmt: skip


def bpe_json(metadata: Any, name: str) -> dict[str, Any]:
    vocab = {token.decode(): i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [merge.decode() for merge in metadata["tokenizer.ggml.merges"]]
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {"version": "1.0", "added_tokens": added(metadata), "pre_tokenizer": PRE_TOKENIZERS[name], "model": model}


def spm_json(metadata: Any) -> dict[str, Any]:
    """Llama 2's: merges are all ways of making a piece, in the order of scores, as transformers converts them."""
    tokens = [token.decode() for token in metadata["tokenizer.ggml.tokens"]]
    vocab, scores = {token: i for i, token in enumerate(tokens)}, metadata["tokenizer.ggml.scores"]
    merges = []
    for token in sorted((token for token in tokens if not token.startswith("<0x")), key=lambda t: -scores[vocab[t]]):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += sorted(
            (p for p in halves if p[0] in vocab and p[1] in vocab), key=lambda p: (vocab[p[0]], vocab[p[1]])
        )
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"}
    model |= {"fuse_unk": True}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], "special": True, **FLAGS} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": processor,
        "model": model,
    }


def of_folder(folder: Path, whole: dict[str, Any], n: int, **settings: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return from_metadata(vocabulary_values(folder, n))


def vocabulary_values(folder: Path, n: int) -> dict[str, Any]:
    keys = vocabulary_keys(Config(folder / "config.json", {}), n)
    return {name: key.value for name, key in keys.items()}


@pytest.mark.parametrize("name", ["starcoder", "llama-spm"])
def test_ids_of_a_folder_are_those_of_tokenizers(name: str, shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "vocabs" / f"ggml-vocab-{name}.gguf"
    with GGUFFile.open(path) as file:
        spm = name == "llama-spm"
        whole = spm_json(file.metadata) if spm else bpe_json(file.metadata, name)
        n = file.metadata.length("tokenizer.ggml.tokens")
    assert n is not None
    ours = of_folder(tmp_path, whole, n, bos_token="<s>") if spm else of_folder(tmp_path, whole, n)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    assert [ours.encode(text) for text in texts if text] == [theirs.encode(text).ids for text in texts if text]


def test_ids_of_tokenizer_model_are_those_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs", "a lot of foxes"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 4),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,  # as Llama's
        user_defined_symbols=["<|user|>"],
        minloglevel=2,
    )
    ours = from_metadata(vocabulary_values(tmp_path, 320))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (*texts, "the fox, Ünïcode 日本", "  two  spaces", "a<|user|>"):
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
    assert ours.text(319) == "[PAD319]"


def test_ends_that_are_no_tokens_are_left_out_and_those_too_many_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [true, -1, 999, 260, 261, 262, 263]}')
    words = of_folder(tmp_path, tokenizer_json(), 280)
    assert (words.eos_id, {260, 261, 262} <= words.eog_ids, 1 in words.eog_ids) == (260, True, False)
    assert "three ends of a generation; left out of 'eos_token_id': 263" in caplog.text


def test_ends_templates_and_padding_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 260, 261]}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    words = of_folder(
        tmp_path, tokenizer_json(), 280, bos_token={"content": "<s>"}, eos_token="</s>", chat_template="no"
    )
    assert (words.bos_id, words.eos_id, words.n_vocab, words.add_bos) == (256, 257, 280, False)
    assert {257, 260, 261} <= words.eog_ids
    values = vocabulary_values(tmp_path, 272)
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    values = vocabulary_values(tmp_path, 272)
    assert (values["tokenizer.chat_template"], values["tokenizer.chat_template.tool_use"]) == ("d", "t")


@pytest.mark.parametrize(("name", "known"), [(name, "gpt-2" if name == "mpt" else name) for name in PRE_TOKENIZERS])
def test_pre_tokenizer_of_a_folder_has_the_name_of_one_that_cuts_alike(name: str, known: str, tmp_path: Path) -> None:
    whole = {**tokenizer_json(), "pre_tokenizer": PRE_TOKENIZERS[name]}
    assert known_pre_tokenizers[pre_tokenizer_name(tmp_path, whole)] == known_pre_tokenizers[known]


def test_pre_tokenizer_unlike_all_known_ones_is_refused(tmp_path: Path) -> None:
    odd = {**tokenizer_json(), "pre_tokenizer": {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated"}}
    odd["pre_tokenizer"]["invert"] = False
    with pytest.raises(ModelFileError, match="its pre-tokenizer is none of the"):
        of_folder(tmp_path, odd, 272)


@pytest.mark.parametrize(
    "damage",
    [
        *({"added_tokens": [{"id": 256, "content": content, "special": True}]} for content in (None, 5, True)),
        *({"added_tokens": [{"id": id, "content": "<s>", "special": True}]} for id in (True, 1.5, "x", -1, 1 << 40)),
        {"added_tokens": 5},
        *({"post_processor": {"type": "Sequence", "processors": value}} for value in (5, True)),
        {"post_processor": {"single": 5}},
        {"model": {"type": "Unigram", "vocab": [["a", 1e308]], "unk_id": 0}},
    ],
)
def test_tokenizer_json_with_a_value_of_no_possible_kind_is_refused_in_one_line(
    damage: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.json: (is damaged|has a token|has a score|has no tokens)"):
        of_folder(tmp_path, tokenizer_json() | damage, 280)


@pytest.mark.parametrize("tokens", [5, [1], {"300": 5}, {"300": {"content": None}}])
def test_added_tokens_beside_tokenizer_model_that_are_none_are_refused(tokens: object, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick fox", "the dog"]),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=20,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json: 'added_tokens_decoder' does not name a token"):
        vocabulary_values(tmp_path, 320)


N_RANKS = 2000


def write_ranks(path: Path, tokens: list[str]) -> None:
    lines = [
        base64.b64encode(bytes(BYTE_OF_CHAR[char] for char in token)) + b" %d" % i for i, token in enumerate(tokens)
    ]
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("file", "pre", "special"), [("qwen.tiktoken", "qwen2", "<|endoftext|>"), ("tiktoken.model", "kimi-k2", "[BOS]")]
)
def test_ids_of_ranks_of_tiktoken_are_those_of_their_merges(
    file: str, pre: str, special: str, shared_data: Path, tmp_path: Path
) -> None:
    """Qwen 2's tokens are ranks of tiktoken, whose merges its GGUF file has."""
    path = shared_data / "vocabs" / "ggml-vocab-qwen2.gguf"
    with GGUFFile.open(path) as gguf:
        tokens = [token.decode() for token in gguf.metadata["tokenizer.ggml.tokens"][:N_RANKS]]
        merges = gguf.metadata["tokenizer.ggml.merges"][: N_RANKS - 256]
    write_ranks(tmp_path / file, tokens)
    added = {str(N_RANKS): {"content": special, "special": True}, "2001": {"content": "<think>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": special, "added_tokens_decoder": added}))
    values = vocabulary_values(tmp_path, 2300)
    assert values["tokenizer.ggml.merges"] == list(merges)
    assert values["tokenizer.ggml.pre"] == pre
    assert values["tokenizer.ggml.bos_token_id"] == N_RANKS
    assert list(values["tokenizer.ggml.token_type"][N_RANKS - 1 : N_RANKS + 3]) == [1, 3, 4, 3]
    ours = from_metadata(values)
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {t: i for i, t in enumerate(tokens)}, [tuple(merge.decode().split(" ")) for merge in merges]
        )
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            *(
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(p), "isolated")
                for p in known_pre_tokenizers[pre].patterns
            ),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n"):
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, text


def test_ids_of_tekken_are_behind_its_special_tokens(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "vocabs" / "ggml-vocab-qwen2.gguf"
    with GGUFFile.open(path) as gguf:
        tokens = [token.decode() for token in gguf.metadata["tokenizer.ggml.tokens"][:N_RANKS]]
    as_bytes = [bytes(BYTE_OF_CHAR[char] for char in token) for token in tokens]
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(as_bytes)
    ]
    config = {"default_vocab_size": 1520, "default_num_special_tokens": 20, "num_vocab_tokens": N_RANKS}
    whole = {"config": config, "vocab": vocab}
    (tmp_path / "tekken.json").write_text(json.dumps(whole))
    ours = from_metadata(vocabulary_values(tmp_path, 1536))
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.text(1535)) == (1, 2, True, "[PAD1535]")
    assert ours.encode("[IMG]", add_special=False) == [10]
    write_ranks(tmp_path / "qwen.tiktoken", tokens[:1500])
    (tmp_path / "tekken.json").unlink()
    values = vocabulary_values(tmp_path, 1500)
    theirs = from_metadata(values | {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_bos_token": False})
    for text in path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n"):
        assert ours.encode(text, add_special=False) == [20 + id for id in theirs.encode(text)], text
    whole["special_tokens"] = [{"rank": 1, "token_str": "<s>"}, {"rank": 5, "token_str": "[IMG]"}]
    (tmp_path / "qwen.tiktoken").unlink()
    (tmp_path / "tekken.json").write_text(json.dumps(whole))
    assert from_metadata(vocabulary_values(tmp_path, 1536)).encode("[IMG]", add_special=False) == [5]
    odd = (
        {"vocab": vocab[1:]},
        {"config": config | {"default_num_special_tokens": 1}},
        {"vocab": [5]},
        *({"special_tokens": [{"rank": rank, "token_str": "x"}, *whole["special_tokens"]]} for rank in (-1, 1, 20)),
    )
    for damage in odd:
        (tmp_path / "tekken.json").write_text(json.dumps(whole | damage))
        with pytest.raises(
            ModelFileError,
            match=r"tekken.json: (is no vocabulary of M|has not one token|has 1 special|'special_tokens' has a r)",
        ):
            vocabulary_values(tmp_path, 1536)


TOO_LONG = base64.b64encode(b"a" * 1025) + b" 256"


@pytest.mark.parametrize("line", [b"!!! 5", b"YQ== x", b"YQ==", b"YQ== 0", b"YQ== 999999999999", TOO_LONG])
def test_file_of_tiktoken_that_is_none_is_refused(line: bytes, tmp_path: Path) -> None:
    write_ranks(tmp_path / "tiktoken.model", list(BYTE_OF_CHAR))
    with (tmp_path / "tiktoken.model").open("ab") as file:
        file.write(b"\n" + line)
    with pytest.raises(
        ModelFileError, match=r"tiktoken.model: (is no vocabulary of tiktoken|has not one token|has a tok)"
    ):
        vocabulary_values(tmp_path, 272)


def test_token_that_is_added_to_a_vocabulary_that_was_read_before_is_read(tmp_path: Path) -> None:
    write_ranks(tmp_path / "tiktoken.model", list(BYTE_OF_CHAR))
    tokens = []
    for added in ({"300": {"content": "<a>"}}, {"300": {"content": "<bc>"}}, {"300": {"content": "<d>"}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        tokens.append(vocabulary_values(tmp_path, 600)["tokenizer.ggml.tokens"][300])
    assert tokens == [b"<a>", b"<bc>", b"<d>"]


def write_rwkv(path: Path, *more: str) -> None:
    """RWKV's file: all bytes, then some words."""
    tokens = [chr(i) if i < 128 else bytes([i]) for i in range(256)] + ["\n\n", " w", " wor", "é", "日本", "it's"]
    sizes = [len(token.encode() if isinstance(token, str) else token) for token in tokens]
    lines = [f"{i} {token!r} {size}" for i, (token, size) in enumerate(zip(tokens, sizes, strict=True), 1)]
    path.write_text("\n".join([*lines, *more]) + "\n")


def test_ids_of_rwkv_are_of_the_longest_tokens(tmp_path: Path) -> None:
    write_rwkv(tmp_path / "rwkv_vocab_v20230424.txt")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')  # as fla's, of another vocabulary
    values = vocabulary_values(tmp_path, 272)
    ours = from_metadata(values)
    assert ours.encode("worm worm it's日本é\n\n\\") == [120, 112, 115, 110, 259, 110, 33, 262, 261, 260, 257, 93]
    assert ours.decode([262, 261, 257, 200]) == "it's日本\n\n".encode() + bytes([199])
    assert (ours.bos_id, ours.eos_id, values["tokenizer.ggml.eot_token_id"]) == (0, 0, 257)
    assert values["tokenizer.chat_template"] == "rwkv-world"
    assert list(values["tokenizer.ggml.token_type"][[0, 1, 262, 263]]) == [3, 1, 1, 5]


@pytest.mark.parametrize("line", ["263 'a'", "263 'a' 2", "264 'a' 1", "263 5 1", "263 f() 1", "263 'a", "x 'a' 1"])
def test_file_of_rwkv_that_is_none_is_refused(line: str, tmp_path: Path) -> None:
    write_rwkv(tmp_path / "rwkv_vocab_v20230424.txt", line)
    with pytest.raises(ModelFileError, match=r"rwkv_vocab_v20230424.txt: is no vocabulary of RWKV"):
        vocabulary_values(tmp_path, 272)


def test_tokenizer_model_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"none")
    with pytest.raises(ModelFileError, match=r"tokenizer.model: is no SentencePiece model"):
        vocabulary_values(tmp_path, 272)
