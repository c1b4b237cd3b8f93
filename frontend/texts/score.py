"""Score request bodies → token ids and the tokens that count. A 400 names its field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from logitless.engine.errors import ExceedsContext, InvalidRequest
from logitless.engine.sampling.params import Param
from logitless.frontend.fields import article, bad_request
from logitless.frontend.parser import RequestParser
from logitless.frontend.texts.embeddings import Embedded
from logitless.training.errors import TrainingError

if TYPE_CHECKING:
    from logitless.training.data.tokenize_rows import Example

MAX_TEXTS = 256


class ScoreBody(Embedded, frozen=True, kw_only=True):
    """POST /v1/score."""

    input: Annotated[Any, Param("a text, token ids, a training row, or an array of these")]
    gradient_norm: Annotated[bool, Param("add the norm of the loss's gradient")] = False


def parse_examples(value: object, parser: RequestParser, n_ctx: int) -> list[Example]:
    """The `input` of POST /v1/score: a text, token ids, a training row, or an array of these."""
    is_ids = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    items = value if isinstance(value, list) and not is_ids else [value]
    if not 1 <= len(items) <= MAX_TEXTS:
        bad_request("input", f"must have from 1 to {MAX_TEXTS} texts, got {len(items)}")
    examples = []
    for i, item in enumerate(items):
        example = _example(parser, item, f"input[{i}]", n_ctx)
        if len(example.tokens) > n_ctx:
            raise ExceedsContext(
                f"field 'input[{i}]': {len(example.tokens)} tokens exceed the context of {n_ctx}",
                n_prompt_tokens=len(example.tokens),
                n_ctx=n_ctx,
            )
        if len(example.tokens) < 2:
            bad_request(f"input[{i}]", "needs at least two tokens")
        examples.append(example)
    return examples


def _example(parser: RequestParser, item: object, name: str, n_ctx: int) -> Example:
    from logitless.training.data.formats import parse_row
    from logitless.training.data.tokenize_rows import Example, examples_of

    if isinstance(item, dict):
        try:
            rows = [parse_row(item, 1, f"field '{name}'")]
            examples = list(examples_of(rows, parser.tokenizer, parser.template, name))
        except TrainingError as error:
            raise InvalidRequest(str(error)) from None
        if len(examples) != 1:
            bad_request(name, "the chat template rewrites earlier turns: give one turn of the assistant a row")
        return examples[0]
    if isinstance(item, str):
        ids = parser.encode(item, add_special=True, parse_special=True, most=n_ctx)
    elif isinstance(item, list):
        ids = list(parser.tokens(item, name, most=n_ctx))
    else:
        bad_request(name, f"expected a text, token ids or a row, got {article(item)}")
    learn = np.ones(len(ids), np.bool_)
    learn[:1] = False
    return Example(np.array(ids, np.int32), learn)
