"""Vocabulary of a GGUF file: tokens, scores, attributes and special ids, as in llama.cpp's loader."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from operator import methodcaller
from typing import Any

import numpy as np

from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer

SPM, BPE, WPM, UGM, RWKV = 1, 2, 3, 4, 5  # llama.cpp's vocabulary types

log = logging.getLogger("logitless.tokenizer")
_KEY = "tokenizer.ggml."
_MODELS = {"llama": SPM, "gpt2": BPE, "gemma4": BPE, "bert": WPM, "t5": UGM, "rwkv": RWKV}
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "rwkv": {},
}
_ID_KEYS = (  # (name, key); a later key overrides an earlier one
    ("bos", "cls_token_id"),  # BERT files of before the two were one
    ("bos", "bos_token_id"),
    ("eos", "eos_token_id"),
    ("eot", "eot_token_id"),
    ("eom", "eom_token_id"),
    ("unk", "unknown_token_id"),
    ("sep", "seperator_token_id"),  # the format's spelling
    ("pad", "padding_token_id"),
    ("mask", "mask_token_id"),
    ("fim_pre", "fim_pre_token_id"),
    ("fim_suf", "fim_suf_token_id"),
    ("fim_mid", "fim_mid_token_id"),
    ("fim_pad", "fim_pad_token_id"),
    ("fim_rep", "fim_rep_token_id"),
    ("fim_sep", "fim_sep_token_id"),
    ("fim_pre", "prefix_token_id"),
    ("fim_suf", "suffix_token_id"),
    ("fim_mid", "middle_token_id"),
)
# Special ids that the file does not name are found by their text. llama.cpp takes whichever its
# hash table lists first; here the order counts.
_TEXTS: dict[str, str] = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
_EOG_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_PAIR = methodcaller("partition", " ")  # tokens have no spaces: Ġ or ▁ stands for them
_HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # always shown


class VocabError(ValueError):
    """A vocabulary that cannot be used; one line that names the key."""


class Attr(IntFlag):
    """Token attributes, as llama.cpp's."""

    UNDEFINED = 0
    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 128  # swallows the white space before it
    RSTRIP = 256  # and after it


# by the file's token types 0 … 6
_ATTR_OF_TYPE = np.array(
    [Attr.UNDEFINED, Attr.NORMAL, Attr.UNKNOWN, Attr.CONTROL, Attr.USER_DEFINED, Attr.UNUSED, Attr.BYTE], np.int64
)


@dataclass
class Vocab:
    """Tokens and their meaning. `tokens` are text whose bytes that are not UTF-8 are surrogate-escaped."""

    model: str
    vocab_type: int
    pre: PreTokenizer
    tokens: list[str]
    scores: list[float]
    attrs: list[int]
    ids: dict[str, int]  # of a token's text; the first of equal ones
    special: dict[str, int]  # "bos", "eos", "eot", "eom", "unk", "sep", "pad", "mask", "fim_pre", …
    eog_ids: frozenset[int]
    suppressed_ids: tuple[int, ...]  # ids that must never be sampled, in order
    add_bos: bool
    add_eos: bool
    add_sep: bool
    add_space_prefix: bool
    lowercase: bool
    strip_accents: bool
    merge_spaces: bool
    charsmap: bytes  # normalisations of models/tokenizer/unigram.py


def load_vocab(metadata: Mapping[str, Any]) -> Vocab:
    """Read the vocabulary from a GGUF file's metadata.

    Unlike llama.cpp a token that occurs twice is accepted: the first id encodes, both decode.

    Raises VocabError for a tokenizer or pre-tokenizer that is not supported, and for missing or
    broken arrays."""
    model = _get(metadata, "model", str, None)
    if model is None:
        raise VocabError(f"{_KEY}model is missing")
    if model not in _MODELS:
        raise VocabError(f"{_KEY}model: tokenizer model '{model}' is not supported")
    vocab_type = _MODELS[model]
    pre = _pre_tokenizer(model, _get(metadata, "pre", str, "")) if vocab_type == BPE else PreTokenizer(())
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_texts(metadata, "tokens"))]
    if not tokens:
        raise VocabError(f"{_KEY}tokens is empty")
    scores: list[float] = _numbers(metadata, "scores", len(tokens), 0.0).astype(np.float64).tolist()
    types = _numbers(metadata, "token_type", len(tokens), 1).astype(np.int64)
    attrs: list[int] = np.where((types >= 0) & (types <= 6), _ATTR_OF_TYPE[np.clip(types, 0, 6)], 0).tolist()
    ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    special = _special_ids(metadata, model, pre, ids, attrs)
    eog_ids = _end_of_generation(special, ids, attrs)
    _set_strips(metadata, ids, attrs)
    lowercase = _get(metadata, "normalizer.lowercase", bool, True)
    add_bos = _get(metadata, "add_bos_token", bool, None)
    if add_bos is True and "bos" not in special:
        raise VocabError(f"{_KEY}add_bos_token is true, but {_KEY}bos_token_id names no token")
    add_eos = _get(metadata, "add_eos_token", bool, None)
    if add_eos is True and "eos" not in special:
        raise VocabError(f"{_KEY}add_eos_token is true, but {_KEY}eos_token_id names no token")
    default_bos = vocab_type in (SPM, WPM) or pre.add_bos
    if pre is PRE_TOKENIZERS["gemma4"]:
        add_bos = None  # files that say false are wrong
    return Vocab(
        model=model,
        vocab_type=vocab_type,
        pre=pre,
        tokens=tokens,
        scores=scores,
        attrs=attrs,
        ids=ids,
        special=special,
        eog_ids=eog_ids,
        suppressed_ids=_suppressed(metadata, len(tokens)),
        add_bos=(default_bos if add_bos is None else add_bos) and "bos" in special,
        add_eos=(vocab_type == UGM and "eos" in special) if add_eos is None else add_eos,
        add_sep=_get(metadata, "add_sep_token", bool, vocab_type == WPM) and "sep" in special,
        add_space_prefix=_get(metadata, "add_space_prefix", bool, vocab_type == SPM),
        lowercase=lowercase,
        strip_accents=_get(metadata, "normalizer.strip_accents", bool, lowercase),
        merge_spaces=_get(metadata, "remove_extra_whitespaces", bool, False),
        charsmap=_bytes(metadata, "precompiled_charsmap"),
    )


def read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges in order of rank, without repetitions. Raises VocabError where there are none (kimi-k2 needs none)."""
    if f"{_KEY}merges" not in metadata and _get(metadata, "pre", str, "") == "kimi-k2":
        return []
    merges = dict.fromkeys(_texts(metadata, "merges"))
    pairs = [(a, b) for a, _, b in map(_PAIR, merges) if a and b]
    return pairs if is_unicode(merges) else [pair for pair in pairs if is_unicode(pair)]


def is_unicode(texts: Iterable[str]) -> bool:
    """True if all strings are valid Unicode, without bytes that are not UTF-8."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = metadata.get(_KEY + key, default)
    if isinstance(value, bytes) and kind is str:
        value = value.decode("utf-8", "replace")
    if isinstance(value, np.generic):
        value = value.item()
    if value is not default and not isinstance(value, kind):
        raise VocabError(f"{_KEY}{key} has the wrong type: {type(value).__name__} instead of {kind.__name__}")
    return value


def _pre_tokenizer(model: str, name: str) -> PreTokenizer:
    if not name and model == "gpt2":
        log.warning("key '%spre' is missing: the default pre-tokenizer may give other tokens than the model's", _KEY)
    name = "gemma4" if model == "gemma4" else name or "default"
    if name not in PRE_TOKENIZERS:
        raise VocabError(f"{_KEY}pre: pre-tokenizer '{name}' is not supported")
    return PRE_TOKENIZERS[name]


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(_KEY + key)
    if values is None:
        raise VocabError(f"{_KEY}{key} is missing")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise VocabError(f"{_KEY}{key} is not an array of strings")
    try:
        return [v.decode() for v in values]  # as a file reader gives them, nearly always UTF-8
    except (AttributeError, UnicodeDecodeError):
        pass
    try:
        return [v if isinstance(v, str) else v.decode("utf-8", "surrogateescape") for v in values]
    except AttributeError:
        raise VocabError(f"{_KEY}{key} is not an array of strings") from None


def _numbers(metadata: Mapping[str, Any], key: str, n: int, default: float) -> np.ndarray[Any, np.dtype[Any]]:
    values = metadata.get(_KEY + key)
    if values is None:
        return np.full(n, default)
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise VocabError(f"{_KEY}{key} is not an array of numbers")
    if len(array) < n:
        raise VocabError(f"{_KEY}{key} has {len(array)} entries for {n} tokens")
    return array[:n]


def _bytes(metadata: Mapping[str, Any], key: str) -> bytes:
    """An array of them; nothing where there is none."""
    values = np.asarray(metadata.get(_KEY + key, ()))
    if values.size and (values.ndim != 1 or values.dtype.kind not in "iu" or values.itemsize != 1):
        raise VocabError(f"{_KEY}{key} is not an array of bytes")
    return values.astype(np.int8).tobytes()


def _special_ids(
    metadata: Mapping[str, Any], model: str, pre: PreTokenizer, ids: Mapping[str, int], attrs: list[int]
) -> dict[str, int]:
    special = {name: i for name, i in _DEFAULT_IDS[model].items() if i < len(attrs)}
    if not pre.has_bos:
        special.pop("bos", None)
    for name, key in _ID_KEYS:
        i = _get(metadata, key, int, None)
        if i is not None and 0 <= i < len(attrs):
            special[name] = i
        elif i not in (None, -1, 2**32 - 1):  # how some files write "none"
            log.warning("key '%s%s' is %d, which is none of the %d tokens", _KEY, key, i, len(attrs))
    for name, texts in _TEXTS.items():
        candidates = [ids[text] for text in texts.split(" ") if text in ids]
        if name not in special and candidates:
            special[name] = candidates[0]
            attrs[candidates[0]] |= Attr.CONTROL
    return special


def _end_of_generation(special: Mapping[str, int], ids: Mapping[str, int], attrs: list[int]) -> frozenset[int]:
    """The ids that end a generation; marks tokens that look like control tokens as such."""
    eog = {special[name] for name in ("fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom") if name in special}
    for text in _EOG_TEXTS:
        if text in ids:
            eog.add(ids[text])
            attrs[ids[text]] |= Attr.CONTROL
    for text in _HARMONY_TEXTS:
        if text in ids:
            attrs[ids[text]] = Attr.USER_DEFINED
    ends = {text for text in _EOG_TEXTS if text in ids}
    # gpt-oss and solar end a turn with other tokens: there <|end|> only ends a message
    if "<|end|>" in ends and ({"<|return|>", "<|call|>"} <= ends or {"<|calls|>", "<|flush|>"} <= ends):
        eog.discard(ids["<|end|>"])
        attrs[ids["<|end|>"]] = Attr.USER_DEFINED
    if {"<|tool_response>", "</s>"} <= ends:  # gemma4, where </s> is HTML
        eog.discard(ids["</s>"])
        attrs[ids["</s>"]] = Attr.NORMAL
    return frozenset(eog)


def _suppressed(metadata: Mapping[str, Any], n_vocab: int) -> tuple[int, ...]:
    """The ids that the file says must never be sampled (Gemma 4's ends of images and sounds)."""
    array = np.asarray(metadata.get(f"{_KEY}suppress_tokens", ()))
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise VocabError(f"{_KEY}suppress_tokens is not an array of integers")
    ids = sorted(set(array.tolist()))
    for id in ids:
        if not 0 <= id < n_vocab:
            raise VocabError(f"{_KEY}suppress_tokens: there is no token {id}, ids end at {n_vocab - 1}")
    if len(ids) == n_vocab:
        raise VocabError(f"{_KEY}suppress_tokens leaves no token")
    return tuple(ids)


def _set_strips(metadata: Mapping[str, Any], ids: Mapping[str, int], attrs: list[int]) -> None:
    """White space that special tokens swallow; GGUF does not say, so it goes by model name as in llama.cpp."""
    pre, arch = _get(metadata, "pre", str, ""), str(metadata.get("general.architecture", ""))
    name = str(metadata.get("general.name", "")).lower()
    jina = any(x in pre for x in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
    if jina or arch in ("nomic-bert-moe", "jina-bert-v3"):
        if "<mask>" in ids:
            attrs[ids["<mask>"]] |= Attr.LSTRIP
    elif "phi-3" in name or "phi3" in name:
        keep = {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids}
        for i, attr in enumerate(attrs):
            if i not in keep and (attr & (Attr.CONTROL | Attr.USER_DEFINED | Attr.UNKNOWN) or i == ids.get("</s>")):
                attrs[i] |= Attr.RSTRIP
    elif "modern-bert" in name and "[MASK]" in ids:
        attrs[ids["[MASK]"]] |= Attr.LSTRIP
