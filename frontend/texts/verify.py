"""POST /v1/verify: a client's draft → a request that ends with the first token that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec.structs import replace as replace_struct

from logitless.engine.errors import InvalidRequest
from logitless.engine.params import Generation
from logitless.engine.sampling.params import Param
from logitless.frontend.config import FrontendConfig
from logitless.frontend.fields import as_integer, bad_request, limited
from logitless.frontend.parser import MAX_TOP, GenerationJob, Prompt, RequestParser


class Verify(Generation, frozen=True, kw_only=True):
    """POST /v1/verify."""

    prompt: Annotated[
        Any,
        Param(
            "the text or token ids that the draft follows; without it id_slot names them",
            required=True,
            instead=("id_slot",),
        ),
    ] = None
    n_probs: Annotated[int, Param("log-probabilities of so many likely tokens", 0, MAX_TOP, aliases=("logprobs",))] = 0
    rng_used: Annotated[list[int] | None, Param("random numbers that are used up, as an earlier reply said")] = None


def slot_to_continue(body: Mapping[str, Any], config: FrontendConfig) -> int | None:
    """The slot whose tokens stand for the prompt, when there is none."""
    if body.get("prompt") is not None:
        return None
    if body.get("id_slot") is None:
        raise InvalidRequest("field 'prompt': is required, or id_slot to go on after a slot's last tokens")
    return int(limited("id_slot", as_integer("id_slot", body["id_slot"]), 0, config.n_parallel - 1, True))


def parse_verify(body: Mapping[str, Any], parser: RequestParser, known: tuple[int, ...] | None) -> GenerationJob:
    """`prompt` (or `known`, a slot's tokens), `draft_tokens`, sampling settings, `n_probs`, and `rng_used`."""
    params = parser.read(Verify, body)
    if known == ():
        bad_request("id_slot", "this slot holds nothing to go on from")
    if known is not None:
        prompt = known
    else:
        prompts, many = parser.prompts(params.prompt)
        if many:
            bad_request("prompt", "a draft is verified after one prompt")
        prompt = parser.tokens(prompts[0])
    for name in ("stream", "n", "n_cmpl", "best_of", "prediction", "stop", "n_predict", "max_tokens"):
        if body.get(name) not in ((None, False) if name == "stream" else (None, 1, [])):
            bad_request(name, "has no meaning here")
    job = parser.job(replace_struct(params, prompt=None), [Prompt(prompt)], top=params.n_probs or None)
    (request,) = job.requests
    n_draft = len(request.speculation.draft)
    if n_draft == 0:
        bad_request("draft_tokens", "must be a non-empty array of tokens")
    request = replace(
        request,
        n_predict=n_draft + 1,
        stop=(),
        verify=True,
        speculation=replace(request.speculation, kinds=(), n_max=n_draft, n_min=0),
        sampling=replace_struct(request.sampling, rng_used=_rng_used(params.rng_used, 8 * parser.n_ctx)),
    )
    return replace(job, requests=(request,))


def _rng_used(words: Sequence[int] | None, most: int) -> tuple[int, int]:
    if words is None:
        return 0, 0
    if len(words) != 2 or not all(0 <= n <= most for n in words):
        bad_request("rng_used", f"expected two numbers between 0 and {most}, as an earlier reply gave them")
    return words[0], words[1]
