"""Graders of reinforcement learning: their trial by hand, and the means that the operator gives them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from logitless.frontend.answers.fine_tuning import (
    Graded,
    GraderErrors,
    GraderMetadata,
    ValidGrader,
)
from logitless.frontend.fields import read
from logitless.frontend.fine_tuning import GraderBody, grader_of, parse_grading
from logitless.frontend.graders import surroundings
from logitless.frontend.workers import to_thread
from logitless.server.api.context import CONTEXT, json_response
from logitless.training.graders.grade import Grade, graded


async def validate(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/validate."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)

    def parse(body: dict[str, Any]) -> Mapping[str, Any]:
        params = read(GraderBody, body)
        grader_of(params.grader, around)
        return params.grader

    return json_response(ValidGrader(grader=dict(await context.parsed(request, parse))))


async def run(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/run."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)
    grader, sample, item = await context.parsed(request, lambda body: parse_grading(body, around))
    began = time.monotonic()
    grade = await to_thread(partial(graded, grader, sample, item))
    seconds = time.monotonic() - began
    metadata = GraderMetadata(
        name=grader.name,
        type=grader.kind,
        errors=_errors(grade),
        execution_time=seconds,
        scores=grade.parts or {grader.name: grade.reward},
        token_usage=sum(grade.tokens.values()) if grade.tokens else None,
        sampled_model_name=next(iter(grade.tokens), None),
    )
    return json_response(
        Graded(
            reward=grade.reward,
            sub_rewards=grade.parts,
            metadata=metadata,
            model_grader_token_usage_per_model=grade.tokens,
        )
    )


def _errors(grade: Grade) -> GraderErrors:
    flags: dict[str, Any] = dict.fromkeys(grade.errors, True)
    for name in ("python_grader_runtime_error", "model_grader_server_error"):
        if name in grade.errors:
            flags[f"{name}_details"] = grade.errors[name]
    if "python_grader_server_error" in grade.errors:
        flags["python_grader_server_error_type"] = grade.errors["python_grader_server_error"]
    details = grade.problem or None
    return GraderErrors(**flags, details=details)
