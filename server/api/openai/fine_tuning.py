"""OpenAI's fine-tuning jobs: create, list, pause, resume, cancel, events, checkpoints; trials of their graders."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from logitless.engine.errors import InvalidRequest, NotFound
from logitless.engine.finetuning.status import ENDED, RUNNING
from logitless.engine.finetuning.tuned_models import find
from logitless.engine.records.store import Row
from logitless.frontend.answers.fine_tuning import (
    Checkpoint,
    Deleted,
    Graded,
    GraderErrors,
    GraderMetadata,
    Job,
    JobEvent,
    ValidGrader,
)
from logitless.frontend.fields import read
from logitless.frontend.fine_tuning import GraderBody, JobModel, grader_of, new_job, parse_grading
from logitless.frontend.graders import surroundings
from logitless.frontend.replies.encoding import sse
from logitless.frontend.workers import to_thread
from logitless.server.api.context import CONTEXT, json_response
from logitless.server.api.openai.files import as_struct, listed, visible_row, visible_rows
from logitless.server.api.openai.tuning_context import LISTENERS, desk_of, on_disk, tuning_of
from logitless.server.clients import CLIENT
from logitless.training.graders.grade import Grade, graded


async def create(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/jobs."""
    context, tuning, client = request.app[CONTEXT], tuning_of(request), request[CLIENT]
    config = context.config
    context.writer.info.check_trainable()
    names = config.names | {tuning.base}
    n_ctx = tuning.engine.hparams.n_ctx_whole

    def parse(body: dict[str, Any]) -> Row:
        name = body.get("model")
        if config.behind_router and isinstance(name, str) and not name.startswith("ft:"):
            body = {**body, "model": tuning.base}  # a router has visible_row this server by a name that only it knows
        row = new_job(
            body,
            tuning.store,
            JobModel(tuning.base, names, n_ctx, tuning.weights),
            client.may_see,
            around=surroundings(context.service, config),
            trackers=config.allow_integrations,
        )
        return row | {"owner": client.owner}

    job = await context.parsed(request, parse)

    def keep() -> None:
        tuning.store.put("jobs", job)
        tuning.store.add_event(job["id"], f"Created fine-tuning job: {job['id']}")

    await on_disk("the job cannot be kept", keep)
    tuning.created()
    return json_response(as_struct(job, Job))


async def jobs(request: web.Request) -> web.Response:
    """GET /v1/fine_tuning/jobs."""
    return json_response(listed(request, visible_rows(request, "jobs"), Job))


async def job(request: web.Request) -> web.Response:
    """GET /v1/fine_tuning/jobs/{id}."""
    return json_response(as_struct(_job_row(request), Job))


async def cancel(request: web.Request) -> web.Response:
    return await _set(request, (*RUNNING, "paused"), "cancelled")


async def pause(request: web.Request) -> web.Response:
    return await _set(request, RUNNING, "paused")


async def resume(request: web.Request) -> web.Response:
    return await _set(request, ("paused", "failed"), "queued")


async def _set(request: web.Request, allowed: tuple[str, ...], status: str) -> web.Response:
    row = _job_row(request)
    desk = desk_of(request)
    changed = await on_disk("the job cannot be changed", lambda: desk.set_status(row["id"], allowed, status))
    if changed is None:
        raise InvalidRequest(f"the job {row['id']} is {_job_row(request)['status']}, so it cannot be {status}")
    return json_response(as_struct(changed, Job))


async def delete_model(request: web.Request) -> web.Response:
    """DELETE /v1/models/{id}: a fine-tuned model with its files."""
    name, desk = request.match_info["id"], desk_of(request)
    model = await to_thread(lambda: find(desk.store, name))
    if model is None or not request[CLIENT].may_see(model.job):
        raise NotFound(f"there is no fine-tuned model {name[:200]!r}")
    await on_disk("the model cannot be deleted", partial(desk.delete_model, model))
    return json_response(Deleted(id=name, object="model"))


async def checkpoints(request: web.Request) -> web.Response:
    """GET /v1/fine_tuning/jobs/{id}/checkpoints."""
    rows = desk_of(request).store.checkpoints(_job_row(request)["id"])
    return json_response(listed(request, rows, Checkpoint, 10))


async def events(request: web.Request) -> web.StreamResponse:
    """GET /v1/fine_tuning/jobs/{id}/events; with ?stream=true or Accept: text/event-stream as they come."""
    row, store = _job_row(request), desk_of(request).store
    as_stream = request.query.get("stream") == "true" or "text/event-stream" in request.headers.get("Accept", "")
    if not as_stream:
        rows = [event for _, event in reversed(store.events(row["id"]))]
        return json_response(listed(request, rows, JobEvent))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    changed = asyncio.Event()
    listeners = request.app[LISTENERS]
    listeners.add(changed)
    try:
        after = 0
        while True:
            changed.clear()
            current = store.get("jobs", row["id"])
            for number, event in store.events(row["id"], after):
                after = number
                await response.write(sse(event))
            if current is None or current["status"] in ENDED:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await changed.wait()
                continue
            await response.write(b":\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionError:
        pass
    finally:
        listeners.discard(changed)
    return response


def _job_row(request: web.Request) -> Row:
    return visible_row(request, "jobs", "Could not find fine tune")


async def validate_grader(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/validate."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)

    def parse(body: dict[str, Any]) -> Mapping[str, Any]:
        params = read(GraderBody, body)
        grader_of(params.grader, around)
        return params.grader

    return json_response(ValidGrader(grader=dict(await context.parsed(request, parse))))


async def grade(request: web.Request) -> web.Response:
    """POST /v1/fine_tuning/alpha/graders/run."""
    context = request.app[CONTEXT]
    around = surroundings(context.service, context.config)
    grader, sample, item = await context.parsed(request, lambda body: parse_grading(body, around))
    began = time.monotonic()
    result = await to_thread(partial(graded, grader, sample, item))
    seconds = time.monotonic() - began
    metadata = GraderMetadata(
        name=grader.name,
        type=grader.kind,
        errors=_errors(result),
        execution_time=seconds,
        scores=result.parts or {grader.name: result.reward},
        token_usage=sum(result.tokens.values()) if result.tokens else None,
        sampled_model_name=next(iter(result.tokens), None),
    )
    return json_response(
        Graded(
            reward=result.reward,
            sub_rewards=result.parts,
            metadata=metadata,
            model_grader_token_usage_per_model=result.tokens,
        )
    )


def _errors(grade: Grade) -> GraderErrors:
    flags: dict[str, Any] = dict.fromkeys(grade.errors, True)
    for name in ("python_grader_runtime_error", "model_grader_server_error"):
        if name in grade.errors:
            flags[f"{name}_details"] = grade.errors[name]
    if "python_grader_server_error" in grade.errors:
        flags["python_grader_server_error_type"] = grade.errors["python_grader_server_error"]
    return GraderErrors(**flags, details=grade.problem or None)
