"""Tokenizers built from a GGUF file's own vocabulary, with llama.cpp's results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from logitless.models.errors import ModelFileError
from logitless.models.tokenizer.base import Tokenizer
from logitless.models.tokenizer.bpe import BpeTokenizer
from logitless.models.tokenizer.detokenizer import StreamDecoder
from logitless.models.tokenizer.rwkv import RwkvTokenizer
from logitless.models.tokenizer.sentencepiece import SpmTokenizer
from logitless.models.tokenizer.unigram import UgmTokenizer
from logitless.models.tokenizer.vocab import BPE, RWKV, SPM, UGM, WPM, Attr, Vocab, VocabError, load_vocab, read_merges
from logitless.models.tokenizer.wordpiece import WpmTokenizer

__all__ = ["BPE", "RWKV", "SPM", "UGM", "WPM", "Attr", "StreamDecoder", "Tokenizer", "from_metadata"]


_KINDS: Mapping[int, Callable[[Vocab], Tokenizer]] = {  # without merges
    SPM: SpmTokenizer,
    RWKV: RwkvTokenizer,
    WPM: WpmTokenizer,
    UGM: UgmTokenizer,
}


def from_metadata(metadata: Mapping[str, Any], *, path: str | PathLike[str] = "the model file") -> Tokenizer:
    """The tokenizer of a GGUF file, from its metadata; `path` is for error messages only.

    Raises ModelFileError, naming the key, for a kind of tokenizer that is not supported and for a
    vocabulary that is broken."""
    try:
        vocab = load_vocab(metadata)
        kind = _KINDS.get(vocab.vocab_type)
        return BpeTokenizer(vocab, read_merges(metadata)) if kind is None else kind(vocab)
    except VocabError as error:
        raise ModelFileError(path, str(error)) from None
