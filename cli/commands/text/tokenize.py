"""`logitless tokenize`: token ids of standard input, with the vocabulary of a GGUF file alone."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError


def run(options: SimpleNamespace) -> int:
    if not options.model:
        raise UsageError("tokenize: -m FILE is required")
    from logitless.models import tokenizer
    from logitless.models.gguf.file import GGUFFile

    with GGUFFile.open(options.model) as file:
        vocabulary = tokenizer.from_metadata(file.metadata, path=options.model)
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    ids = vocabulary.encode(text, add_special=options.add_special, parse_special=options.parse_special)
    print(json.dumps(ids) if options.json else " ".join(map(str, ids)))
    return 0
