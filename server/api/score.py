"""POST /v1/score: log-probabilities and losses of given texts, as in training."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest
from logitless.engine.requests import Lora
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.vectors import PromptUsage, Scores, TextScore
from logitless.frontend.fields import read
from logitless.frontend.lora import parse_lora
from logitless.frontend.texts.score import ScoreBody, parse_examples
from logitless.server.api.context import CONTEXT, json_response

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.training.data.tokenize_rows import Example
    from logitless.training.score import Score


async def score(request: web.Request) -> web.Response:
    """`input`: a text, token ids, a training row (text, prompt and completion, messages), or an array of these."""
    context = request.app[CONTEXT]
    served = context.writer
    if (engine := served.engine) is None:
        raise InvalidRequest("this server cannot score texts")

    def parse(body: dict[str, Any]) -> tuple[list[Example], bool, str, Lora | None]:
        params = read(ScoreBody, body)
        name, lora = parse_lora(params.model, params.lora, served.adapters)
        n_ctx = engine.hparams.n_ctx_whole
        examples = parse_examples(params.input, context.parser_for(request), served.template, n_ctx)
        return examples, params.gradient_norm, name or context.config.model, lora

    served.info.check_trainable()
    examples, gradient, model, lora = await context.parsed(request, parse)
    await context.embeds(request, model, [example.tokens.tolist() for example in examples])
    scores = [await context.service.ask(partial(_score, engine, e, gradient, lora)) for e in examples]
    n_tokens = sum(len(e.tokens) for e in examples)
    data = [text_score(i, e, s) for i, (e, s) in enumerate(zip(examples, scores, strict=True))]
    return json_response(Scores(model=model, data=data, usage=PromptUsage(n_tokens, n_tokens)))


def _score(engine: ModelRunner, example: Example, gradient: bool, lora: Lora | None, scheduler: Scheduler) -> Score:
    """Between two steps, with the weights and adapters that a request of this kind has."""
    from logitless.training.score import score

    return score(engine.tuned(scheduler.resolve_lora(lora)), example, gradient=gradient)


def text_score(index: int, example: Example, score: Score) -> TextScore:
    """One item of the reply. JSON has no infinity and no NaN: those are null."""
    return TextScore(
        index=index,
        tokens=example.tokens.tolist(),
        token_logprobs=[None, *map(_finite, score.log_probs.tolist())],
        counted=example.learn.tolist(),
        loss=_finite(score.loss),
        n_counted=score.n_counted,
        gradient_norm=UNSET if score.gradient_norm is None else _finite(score.gradient_norm),
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
