"""POST /v1/score: log-probabilities and losses of given texts, as the trainer would measure them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from logitless.engine.errors import ExceedsContext, InvalidRequest, NotSupported
from logitless.engine.requests import Lora
from logitless.server.api.context import CONTEXT, Context, json_response
from logitless.server.protocol.fields import Fields, article, refuse
from logitless.server.protocol.lora import parse_lora, tuned_name

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.training.data.tokenize_rows import Example
    from logitless.training.score import Score

MAX_TEXTS = 256


async def score(request: web.Request) -> web.Response:
    """`input`: a text, token ids, a training row (text, prompt and completion, messages), or an array of these."""
    context = request.app[CONTEXT]
    served = context.writer
    if served.engine is None:
        raise NotSupported("this server cannot score texts")

    def parse(body: dict[str, Any]) -> tuple[list[Example], bool, str, Lora | None]:
        fields = Fields(body)
        shown = tuned_name(fields, served.adapters) or context.config.model
        return _examples(context, body), fields.boolean("gradient_norm"), shown, parse_lora(fields, served.adapters)

    examples, gradient, model, lora = await context.parsed(request, parse)
    scores = [await context.service.ask(partial(_score, served.engine, e, gradient, lora)) for e in examples]
    n_tokens = sum(len(e.tokens) for e in examples)
    return json_response(
        {
            "object": "list",
            "model": model,
            "data": [shown(i, e, s) for i, (e, s) in enumerate(zip(examples, scores, strict=True))],
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _score(engine: Engine, example: Example, gradient: bool, lora: Lora | None, scheduler: Scheduler) -> Score:
    """Between two steps, with the weights and adapters that a request of this kind has."""
    from logitless.training.score import score

    return score(engine.tuned(scheduler.resolve_lora(lora)), example, gradient=gradient)


def shown(index: int, example: Example, score: Score) -> dict[str, Any]:
    """One item of the reply. JSON has no infinity and no NaN: those are null."""
    told: dict[str, Any] = {
        "index": index,
        "object": "score",
        "tokens": example.tokens.tolist(),
        "token_logprobs": [None, *map(_finite, score.log_probs.tolist())],
        "counted": example.learn.tolist(),
        "loss": _finite(score.loss),
        "n_counted": score.n_counted,
    }
    if score.gradient_norm is not None:
        told["gradient_norm"] = _finite(score.gradient_norm)
    return told


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _examples(context: Context, body: Mapping[str, Any]) -> list[Example]:
    value = body.get("input")
    if value is None:
        raise InvalidRequest("field 'input': is required")
    is_ids = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    items = value if isinstance(value, list) and not is_ids else [value]
    if not 1 <= len(items) <= MAX_TEXTS:
        refuse("input", f"must have from 1 to {MAX_TEXTS} texts, got {len(items)}")
    n_ctx = context.served.info.n_ctx_train or context.served.info.n_ctx
    examples = []
    for i, item in enumerate(items):
        example = _example(context, item, f"input[{i}]")
        if len(example.tokens) > n_ctx:
            raise ExceedsContext(
                f"field 'input[{i}]': {len(example.tokens)} tokens exceed the context of {n_ctx}",
                n_prompt_tokens=len(example.tokens),
                n_ctx=n_ctx,
            )
        if len(example.tokens) < 2:
            refuse(f"input[{i}]", "needs at least two tokens")
        examples.append(example)
    return examples


def _example(context: Context, item: object, name: str) -> Example:
    from logitless.training.data.dataset_rows import parse_row
    from logitless.training.data.tokenize_rows import Example, examples_of
    from logitless.training.errors import TrainingError

    tokenizer = context.served.tokenizer
    if isinstance(item, dict):
        try:
            rows = [parse_row(item, 1, f"field '{name}'")]
            found = list(examples_of(rows, tokenizer, context.served.template, name))
        except TrainingError as error:
            raise InvalidRequest(str(error)) from None
        if len(found) != 1:
            refuse(name, "the chat template rewrites earlier turns: give one turn of the assistant a row")
        return found[0]
    if isinstance(item, str):
        ids = tokenizer.encode(item)
    elif isinstance(item, list):
        ids = list(context.parser.tokens(item, name))
    else:
        refuse(name, f"expected a text, token ids or a row, got {article(item)}")
    learn = np.ones(len(ids), np.bool_)
    learn[:1] = False
    return Example(np.array(ids, np.int32), learn)
