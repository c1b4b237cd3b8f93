"""A small unigram vocabulary, with normalisations in sentencepiece's format."""

from __future__ import annotations

import struct

from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
TOKENS: list[tuple[str, float, int]] = [
    *(("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<mask>", 0.0, USER_DEFINED)),
    *(("New York", 0.0, USER_DEFINED), ("zz", -9.0, UNUSED), ("▁", -2.0, NORMAL), ("a", -3.0, NORMAL)),
    *(("b", -3.5, NORMAL), ("ab", -4.0, NORMAL), ("▁a", -3.25, NORMAL), ("▁ab", -7.5, NORMAL), ("é", -5.0, NORMAL)),
    *(("fi", -4.5, NORMAL), ("f", -6.0, NORMAL), ("i", -5.5, NORMAL), ("ne", -4.25, NORMAL), ("e", -3.75, NORMAL)),
    *(("▁the", -2.5, NORMAL), ("日本", -6.5, NORMAL), ("日", -8.0, NORMAL), ("c", -6.25, NORMAL), ("!", -5.25, NORMAL)),
]
RULES = {"\t": " ", "\n": " ", "\u00a0": " ", "\u200b": "", "ﬁ": "fi", "Ａ": "a", "e\u0301": "é", "…": "..."}


def charsmap(rules: dict[str, str]) -> bytes:
    """A trie as a double array; each node's children have a block of 256."""
    texts, starts = b"", {}
    for new in rules.values():
        starts[new] = len(texts)
        texts += new.encode() + b"\0"
    keys = {old.encode(): starts[new] for old, new in rules.items()}
    nodes = [0] * 256

    def place(at: int, prefix: bytes, label: int) -> None:
        base = len(nodes)
        nodes.extend([0] * 256)
        nodes[at] = label | (prefix in keys) << 8 | (base ^ at) << 10
        if prefix in keys:
            nodes[base] = keys[prefix] | 1 << 31
        for byte in sorted({key[len(prefix)] for key in keys if key.startswith(prefix) and key != prefix}):
            place(base ^ byte, prefix + bytes([byte]), byte)

    place(0, b"", 0)
    return struct.pack(f"<I{len(nodes)}I", 4 * len(nodes), *nodes) + texts


def add_unigrams(writer: GGUFWriter) -> None:
    """Write the vocabulary keys as llama.cpp's converter does for XLM-RoBERTa."""
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text.encode() for text, _, _ in TOKENS])
    writer.add_token_scores([score for _, score, _ in TOKENS])
    writer.add_token_types([kind for _, _, kind in TOKENS])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap(RULES))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
