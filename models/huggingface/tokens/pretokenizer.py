"""The pre-tokenizer of a tokenizer.json by GGUF's name: the one that cuts sample texts into the same words."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitless.models.errors import ModelFileError
from logitless.models.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer

log = logging.getLogger("logitless.huggingface")
# texts that some two of the known pre-tokenizers cut in different ways
_SAMPLES = (
    "Hello, World! It's John's; I'LL we've they'd don't DON'T 'tis",
    "x=1+22-333*4444/55555 1234567890 3.14159 v1.2.3 a1b2 10,000",
    "a  b   c    d\te\t\tf  \n g\n\nh\r\n\r\ni \n \n j   ",
    "camelCase HTMLParser snake_case kebab-case iPhone XMLHttpRequest",
    "path/to/file.txt https://example.org/?q=a&b=c#d C:\\dir //comment /* x */",
    "«Bonjour», „Grüße“ – naïve café… São Paulo, Ångström Привет мир",
    "你好，世界！こんにちは、カタカナ。한국어 안녕 ภาษาไทย नमस्ते العربية",
    "🙂👍🏽 ∑∞≠ ©2024 $5.00 €10 100% (a) [b] {c} <d> #tag @me ~x^y`z`|w",
    "foo.bar(baz)[0] = {'k': \"v\"}; // end\n\tif (x != y) { return; }\n",
    "...!!!??? --- === *** ,,, 12ab34 ٣٤٥ Ⅷ ½ x² e\u0301 ￥１２３",
)
_LEAST = 0.6  # of the samples must be cut alike


def pre_tokenizer_name(path: Path, whole: Mapping[str, Any]) -> str:
    """GGUF's name. ModelFileError: none is like it."""
    import tokenizers
    from tokenizers import pre_tokenizers

    alone = {key: whole.get(key) for key in ("normalizer", "pre_tokenizer")}
    alone |= {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    try:
        own = tokenizers.Tokenizer.from_str(json.dumps(alone)).pre_tokenizer
    except Exception as error:  # the package raises nothing more precise
        raise ModelFileError(path, f"'pre_tokenizer' is not one that tokenizers knows: {error}") from None
    if own is None:
        raise ModelFileError(path, "has byte-pair merges without a pre-tokenizer, which is not supported")
    words = [own.pre_tokenize_str(sample) for sample in _SAMPLES]
    ignores = bool(whole["model"].get("ignore_merges"))
    best, most = "", -1.0
    seen: dict[PreTokenizer, float] = {}
    for name, pre in PRE_TOKENIZERS.items():
        if not pre.byte_level:
            continue
        if pre not in seen:
            steps: list[pre_tokenizers.PreTokenizer] = [
                pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
            ]
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            known = pre_tokenizers.Sequence(steps)
            alike = sum(known.pre_tokenize_str(sample) == ours for sample, ours in zip(_SAMPLES, words, strict=True))
            seen[pre] = alike + 0.5 * (pre.ignore_merges == ignores)
        if seen[pre] > most:
            best, most = name, seen[pre]
    alike = int(most)
    if alike < _LEAST * len(_SAMPLES):
        raise ModelFileError(path, f"its pre-tokenizer is none of the {len(PRE_TOKENIZERS)} that GGUF has names for")
    if alike < len(_SAMPLES):
        n = len(_SAMPLES)
        log.warning("%s: the pre-tokenizer is like %s in %d of %d samples: tokens may differ", path, best, alike, n)
    return best
