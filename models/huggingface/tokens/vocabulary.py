"""Vocabulary, special ids and chat templates of a folder, as the tokenizer keys of GGUF.

Tokens are those of tokenizer.json, else of tokenizer.model, else of a file of ranks."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterator, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, flag, text, u32
from logitless.models.huggingface.config import Config, read_json
from logitless.models.huggingface.tokens.pretokenizer import pre_tokenizer_name
from logitless.models.huggingface.tokens.sentencepiece_model import BPE, UNIGRAM, read_model
from logitless.models.huggingface.tokens.tiktoken import (
    TIKTOKEN_FILES,
    as_text,
    merges_of,
    read_ranks,
    read_rwkv,
    read_tekken,
)
from logitless.models.param import FLOAT_MAX

log = logging.getLogger(__name__)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF's token types
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPECIAL = {  # name in tokenizer_config.json and config.json → GGUF's
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "cls_token": "cls_token_id",
}
_MORE_ENDS = ("eot_token_id", "eom_token_id")
_PREFIX = "tokenizer.ggml."
_RWKV = "rwkv_vocab_v20230424.txt"
_OF_ADDED = ("added_tokens.json", "tokenizer_config.json")  # files of tokens behind those of the vocabulary


class Vocabulary:
    """Tokens by id, with what GGUF says about each."""

    def __init__(self, model: str, tokens: Mapping[int, str], path: Path) -> None:
        if not all(type(i) is int and isinstance(token, str) for i, token in tokens.items()):
            raise ModelFileError(path, "has a token that is no text, or whose id is no number")
        size = max(tokens, default=-1) + 1
        if not 0 < size < 1 << 24 or min(tokens) < 0:
            raise ModelFileError(path, "has no tokens, or impossible ids")
        self.model, self.path = model, path
        self.tokens = [tokens.get(i, f"[PAD{i}]") for i in range(size)]
        self.types = [_NORMAL if i in tokens else _UNUSED for i in range(size)]
        self.scores: list[float] = []
        self.keys: dict[str, Key] = {}  # further ones, without the prefix
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def set_type(self, token: str, kind: int) -> None:
        if token in self.ids:
            self.types[self.ids[token]] = kind

    def resized(self, n: int) -> None:
        """Cut it, or fill it up, to the rows of the embedding."""
        for i in range(len(self.tokens), n):
            self.tokens.append(f"[PAD{i}]")
            self.types.append(_UNUSED)
        self.scores += [-1000.0] * (n - len(self.scores)) if self.scores else []
        del self.tokens[n:], self.types[n:], self.scores[n:]

    def as_keys(self) -> dict[str, Key]:
        keys = {
            "model": text(self.model),
            "tokens": Key([token.encode() for token in self.tokens], ValueType.ARRAY, ValueType.STRING),
            "token_type": Key(np.array(self.types, np.int32), ValueType.ARRAY, ValueType.INT32),
        }
        if self.scores:
            if not max(map(abs, self.scores)) <= FLOAT_MAX:
                raise ModelFileError(self.path, "has a score beyond 32-bit floats")
            keys["scores"] = Key(np.array(self.scores, np.float32), ValueType.ARRAY, ValueType.FLOAT32)
        return keys | self.keys


def vocabulary_keys(config: Config, n_rows: int) -> dict[str, Key]:
    """All keys of the tokenizer. ModelFileError: there is none, or of an unknown kind."""
    folder = config.path.parent
    vocabulary = _read(_file(folder))
    settings = read_json(folder / "tokenizer_config.json")
    vocabulary.resized(n_rows)
    keys = vocabulary.as_keys()
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    has_own = vocabulary.model == "rwkv"  # ends; those of its configurations are of other vocabularies
    ends = [id for id in _ends(config) if 0 <= id < n_rows and not has_own]
    for name, key in ({} if has_own else _SPECIAL).items():
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        id = ids.get(token) if isinstance(token, str) else None
        if id is None and name in ("bos_token", "eos_token", "pad_token"):
            fallback = ends[0] if name == "eos_token" and ends else config.get(f"{name}_id")
            id = fallback if type(fallback) is int else None
        if id is not None and 0 <= id < n_rows:
            keys[key] = u32(id)
            keys["token_type"].value[id] = _UNKNOWN if name == "unk_token" else _CONTROL
    eos = keys["eos_token_id"].value if "eos_token_id" in keys else None
    more = [id for id in ends if id != eos]
    if len(more) > len(_MORE_ENDS):
        log.warning(
            "%s: GGUF has three ends of a generation; left out of 'eos_token_id': %s",
            folder,
            str(more[len(_MORE_ENDS) :])[1:-1],
        )
    keys |= {key: u32(id) for key, id in zip(_MORE_ENDS, more, strict=False)}
    for which in ("bos", "eos"):
        name = f"add_{which}_token"
        if name not in keys and isinstance(settings.get(name), bool):
            keys[name] = flag(settings[name])
        if f"{which}_token_id" not in keys:
            keys.pop(name, None)
    keys = {_PREFIX + name: key for name, key in keys.items()}
    if has_own:
        keys["tokenizer.chat_template"] = text("rwkv-world")  # llama.cpp's name of it
    return keys | dict(_templates(folder, settings))


def _ends(config: Config) -> list[int]:
    """Ids that end a generation, by generation_config.json and config.json."""
    ends: list[int] = []
    for source in (read_json(config.path.with_name("generation_config.json")), config.values):
        ids = source.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        ends += [id for id in ids if type(id) is int and id not in ends]
    return ends


def _templates(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, Key]]:
    """Chat templates: a file of its own, else those of a JSON file."""
    source: object = None
    for name in ("chat_template.jinja", "chat_template.json"):
        path = folder / name
        if path.exists():
            try:
                source = path.read_text("utf-8") if name.endswith("jinja") else read_json(path).get("chat_template")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFileError(path, f"cannot be read: {error}") from None
            break
    source = settings.get("chat_template") if source is None else source
    if isinstance(source, str):
        yield "tokenizer.chat_template", text(source)
    for item in source if isinstance(source, list) else ():
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
            end = "" if item["name"] == "default" else f".{item['name']}"
            yield f"tokenizer.chat_template{end}", text(item["template"])


def _file(folder: Path) -> Path:
    names = ("tokenizer.json", "tokenizer.model", *TIKTOKEN_FILES, "tekken.json", _RWKV)
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is not None:
        return path
    others = [name for name in ("vocab.json", "vocab.txt") if (folder / name).exists()]
    hint = f", and {others[0]} is not read" if others else ""
    cure = "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes it"
    raise ModelFileError(folder, f"has neither tokenizer.json nor tokenizer.model{hint}: {cure}")


def _read(path: Path) -> Vocabulary:
    """A copy of the file's vocabulary, for whoever opens a model reads it several times."""
    files = [path, *(path.with_name(name) for name in _OF_ADDED)]
    stats = [file.stat() for file in files if file.exists()]
    vocabulary = copy(_parsed(path, tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)))
    for name in ("tokens", "types", "scores", "keys"):
        setattr(vocabulary, name, copy(getattr(vocabulary, name)))
    return vocabulary


@lru_cache(maxsize=1)
def _parsed(path: Path, version: tuple[tuple[int, int, int], ...]) -> Vocabulary:
    if path.name == "tokenizer.json":
        return _of_json(path)
    if path.name == "tekken.json":
        return _of_tekken(path)
    if path.name == _RWKV:
        return _of_rwkv(path)
    return _of_tiktoken(path) if path.name in TIKTOKEN_FILES else _of_sentencepiece(path)


def token_id(folder: Path, token: str) -> int | None:
    """The id of a token in the folder's vocabulary."""
    return _read(_file(folder)).ids.get(token)


def _of_json(path: Path) -> Vocabulary:
    whole = read_json(path)
    model = whole.get("model")
    model = model if isinstance(model, dict) else {}
    kind = model.get("type", "BPE" if "merges" in model else None)
    try:
        if kind == "BPE":
            vocabulary = _bpe(path, whole, model)
        elif kind == "Unigram":
            vocabulary = _unigram(path, whole, model)
        elif kind == "WordPiece":
            vocabulary = _wordpiece(path, whole, model)
        else:
            raise ModelFileError(
                path, f"'model' is of the kind {shown(str(kind))}; supported are BPE, Unigram, WordPiece"
            )
        for token in whole.get("added_tokens") or ():
            if vocabulary.model == "llama" and _BYTE_TOKEN.fullmatch(token["content"]):
                continue
            vocabulary.set_type(token["content"], _CONTROL if token["special"] else _USER_DEFINED)
        first, last = _template(whole.get("post_processor"))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(path, f"is damaged: {type(error).__name__} {error}") from None
    if first or last or whole.get("post_processor") is not None:
        vocabulary.keys |= {"add_bos_token": flag(first), "add_eos_token": flag(last)}
    return vocabulary


def _template(processor: Any) -> tuple[bool, bool]:
    """(before a text, behind it): true where a special token is put."""
    if not isinstance(processor, dict):
        return False, False
    if processor.get("type") == "Sequence":
        ends = [_template(inner) for inner in processor.get("processors") or ()]
        return any(first for first, _ in ends), any(last for _, last in ends)
    single: list[Any] = processor.get("single") or []
    return bool(single) and "SpecialToken" in single[0], len(single) > 1 and "SpecialToken" in single[-1]


def _tokens(whole: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[int, str]:
    tokens = {i: token for token, i in vocab.items()}
    added = whole.get("added_tokens") or ()
    if any(type(token["id"]) is bool for token in added):
        raise ValueError("an id is no number")
    return tokens | {token["id"]: token["content"] for token in added}


def _bpe(path: Path, whole: Mapping[str, Any], model: Mapping[str, Any]) -> Vocabulary:
    tokens = _tokens(whole, model["vocab"])
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if not model.get("byte_fallback"):
        vocabulary = Vocabulary("gpt2", tokens, path)
        pairs = [f"{a} {b}".encode() for a, b in merges]
        vocabulary.keys["merges"] = Key(pairs, ValueType.ARRAY, ValueType.STRING)
        vocabulary.keys["pre"] = text(pre_tokenizer_name(path, whole))
        return vocabulary
    vocabulary = Vocabulary("llama", tokens, path)
    ranks: dict[str, int] = {}
    for rank, (a, b) in enumerate(merges):
        ranks.setdefault(a + b, rank)
    # SentencePiece merges by the scores of unions: the earlier a merge, the higher
    vocabulary.scores = [-float(ranks.get(token, len(ranks) + i)) for i, token in enumerate(vocabulary.tokens)]
    _set_pieces(vocabulary, model.get("unk_token"))
    vocabulary.keys["add_space_prefix"] = flag(_prepends(whole))
    return vocabulary


def _set_pieces(vocabulary: Vocabulary, unknown: object) -> None:
    for i, token in enumerate(vocabulary.tokens):
        if _BYTE_TOKEN.fullmatch(token):
            vocabulary.types[i] = _BYTE
    if isinstance(unknown, str):
        vocabulary.set_type(unknown, _UNKNOWN)


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, or the steps of a sequence."""
    if isinstance(step, dict):
        yield from (part for item in step[inner] for part in _steps(item, inner)) if inner in step else (step,)


def _prepends(whole: Mapping[str, Any]) -> bool:
    """True if a text gets a space before it."""
    for step in _steps(whole.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            return True
    for step in _steps(whole.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            default = "always" if step.get("add_prefix_space", True) else "never"
            return bool(step.get("prepend_scheme", default) != "never")
    return False


def _unigram(path: Path, whole: Mapping[str, Any], model: Mapping[str, Any]) -> Vocabulary:
    vocab = model["vocab"]
    vocabulary = Vocabulary("t5", _tokens(whole, {piece: i for i, (piece, _) in enumerate(vocab)}), path)
    vocabulary.scores = [float(score) for _, score in vocab] + [-1000.0] * (len(vocabulary.tokens) - len(vocab))
    unknown = model.get("unk_id")
    _set_pieces(vocabulary, vocabulary.tokens[unknown] if isinstance(unknown, int) else None)
    vocabulary.keys["add_space_prefix"] = flag(_prepends(whole))
    strips = False
    for step in _steps(whole.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled" and step.get("precompiled_charsmap"):
            charsmap = np.frombuffer(base64.b64decode(step["precompiled_charsmap"]), np.uint8)
            vocabulary.keys["precompiled_charsmap"] = Key(charsmap, ValueType.ARRAY, ValueType.UINT8)
        strips |= step.get("type") in ("Strip", "Replace")
    vocabulary.keys["remove_extra_whitespaces"] = flag(strips)
    return vocabulary


def _wordpiece(path: Path, whole: Mapping[str, Any], model: Mapping[str, Any]) -> Vocabulary:
    prefix = model.get("continuing_subword_prefix", "##")
    tokens = _tokens(whole, model["vocab"])
    special = {token["content"] for token in whole.get("added_tokens") or ()}

    def piece(token: str) -> str:  # GGUF marks beginnings of words, not their continuations
        if token in special:
            return token
        return token.removeprefix(prefix) if token.startswith(prefix) else "▁" + token

    vocabulary = Vocabulary("bert", {i: piece(token) for i, token in tokens.items()}, path)
    for step in _steps(whole.get("normalizer"), "normalizers"):
        if step.get("type") == "BertNormalizer":
            lower = step.get("lowercase") is not False
            vocabulary.keys["normalizer.lowercase"] = flag(lower)
            vocabulary.keys["normalizer.strip_accents"] = flag(
                bool(step.get("strip_accents", None) or (lower and step.get("strip_accents") is None))
            )
    return vocabulary


def _of_sentencepiece(path: Path) -> Vocabulary:
    model = read_model(path)
    if model.kind not in (UNIGRAM, BPE):
        raise ModelFileError(path, "is neither a unigram nor a BPE model, which is not supported")
    n = len(model.pieces)
    more, special = _added_tokens(path, n)
    pieces = {i: piece for i, (piece, _, _) in enumerate(model.pieces)}
    vocabulary = Vocabulary("t5" if model.kind == UNIGRAM else "llama", pieces | more, path)
    vocabulary.scores = [score for _, score, _ in model.pieces] + [-1000.0] * (len(vocabulary.tokens) - n)
    vocabulary.types[:n] = [kind for _, _, kind in model.pieces]
    for token in more.values():
        vocabulary.set_type(token, _CONTROL if token in special else _USER_DEFINED)
    vocabulary.keys["add_space_prefix"] = flag(model.add_space_prefix)
    if model.kind == UNIGRAM:
        vocabulary.keys["remove_extra_whitespaces"] = flag(model.merge_spaces)
    if model.charsmap and model.kind == UNIGRAM:
        charsmap = np.frombuffer(model.charsmap, np.uint8)
        vocabulary.keys["precompiled_charsmap"] = Key(charsmap, ValueType.ARRAY, ValueType.UINT8)
    return vocabulary


def _added_tokens(path: Path, n: int) -> tuple[dict[int, str], set[str]]:
    """Tokens behind the file's n, by added_tokens.json and tokenizer_config.json, and those that are special."""
    plain, config = (path.with_name(name) for name in _OF_ADDED)
    added = read_json(plain)
    settings = read_json(config).get("added_tokens_decoder") or {}
    tokens = settings.values() if isinstance(settings, dict) else (settings,)
    if not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens):
        raise ModelFileError(config, "'added_tokens_decoder' does not name a token by each id")
    more = {i: token for token, i in added.items() if isinstance(i, int) and i >= n}
    more |= {int(i): token["content"] for i, token in settings.items() if i.isdecimal() and len(i) < 9 and int(i) >= n}
    return more, {token["content"] for token in settings.values() if token.get("special")}


def _of_tiktoken(path: Path) -> Vocabulary:
    kind, ranks = TIKTOKEN_FILES[path.name], read_ranks(path)
    n = len(ranks)
    more, special = _added_tokens(path, n)
    reserved = {n + i: name.format(n + i) for i, name in enumerate(kind.special)}
    tokens = {rank: as_text(token) for token, rank in ranks.items()} | reserved | more
    vocabulary = Vocabulary("gpt2", tokens, path)
    for i, token in (reserved | more).items():
        vocabulary.set_type(token, _CONTROL if i not in more or token in special else _USER_DEFINED)
    vocabulary.keys |= _merges(ranks, kind.pre)
    return vocabulary


def _of_tekken(path: Path) -> Vocabulary:
    ranks, special = read_tekken(path)
    n = len(special)
    vocabulary = Vocabulary("gpt2", dict(enumerate(special)) | {n + i: as_text(t) for t, i in ranks.items()}, path)
    vocabulary.types[:n] = [_CONTROL] * n
    vocabulary.keys |= _merges(ranks, "tekken") | {"add_bos_token": flag(True)}
    for token, key in (("<unk>", "unknown"), ("<s>", "bos"), ("</s>", "eos"), ("<pad>", "padding")):
        if token in special:
            vocabulary.keys[f"{key}_token_id"] = u32(special.index(token))
    return vocabulary


def _of_rwkv(path: Path) -> Vocabulary:
    """Text 0 ends a document, and an empty line an answer."""
    vocabulary = Vocabulary("rwkv", dict(enumerate(["<s>", *read_rwkv(path)])), path)
    vocabulary.types[0] = _CONTROL
    vocabulary.keys |= {f"{which}_token_id": u32(0) for which in ("bos", "eos")}
    if "\\n\\n" in vocabulary.ids:
        vocabulary.keys["eot_token_id"] = u32(vocabulary.ids["\\n\\n"])
    return vocabulary


def _merges(ranks: dict[bytes, int], pre: str) -> dict[str, Key]:
    pairs = [f"{as_text(a)} {as_text(b)}".encode() for a, b in merges_of(ranks)]
    return {"merges": Key(pairs, ValueType.ARRAY, ValueType.STRING), "pre": text(pre)}
