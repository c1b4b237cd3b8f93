"""The sampling fields of a request: names, limits (a hard one refuses, a soft one clamps) and logit bias."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from logitless.engine.sampling.params import FLOAT_MAX, SamplerParams, SamplingParams, chain_from_names, params_of
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.fields import (
    Fields,
    article,
    as_integer,
    as_number,
    as_text,
    limited,
    refuse,
    warn_once,
)

log = logging.getLogger("logitless.http")

_INF = math.inf
_PARAMS = params_of(SamplerParams)
_NUMBERS = [(name, kind, param) for name, (kind, param) in _PARAMS.items() if param.low > -_INF]
_MAX_BREAKERS = _PARAMS["dry_sequence_breakers"][1].most or 0
_TOKEN_ID = re.compile(r"\s*[+-]?\d+")


def parse_sampling(fields: Fields, defaults: SamplingParams, tokenizer: Tokenizer, n_probs: int) -> SamplingParams:
    """The request's sampling settings over the server's."""
    given: dict[str, Any] = {"n_probs": n_probs, "post_sampling_probs": fields.boolean("post_sampling_probs")}
    for name, kind, param in _NUMBERS:
        if (value := fields.body.get(name)) is not None:
            number = as_integer(name, value) if kind is int else as_number(name, value)
            given[name] = kind(limited(name, number, param.low, param.high, param.hard))
    if given.get("dry_base", 1.0) < 1.0:
        given["dry_base"] = defaults.dry_base
    _, seed = fields.find("seed")
    if seed is not None:
        given["seed"] = as_integer("seed", seed) & 0xFFFFFFFF
    breakers = fields.array("dry_sequence_breakers")
    if breakers is not None:
        if not breakers:
            refuse("dry_sequence_breakers", "must be a non-empty array of strings")
        if len(breakers) > _MAX_BREAKERS:
            refuse("dry_sequence_breakers", f"at most {_MAX_BREAKERS} are allowed, got {len(breakers)}")
        given["dry_sequence_breakers"] = tuple(as_text("dry_sequence_breakers", item) for item in breakers)
    _, samplers = fields.find("samplers")
    if samplers is not None:
        given["samplers"] = _samplers(samplers)
    bias = _merged(_logit_bias(fields, tokenizer)) if fields.body.get("logit_bias") is not None else defaults.logit_bias
    if fields.boolean("ignore_eos"):
        bias += tuple((id, -_INF) for id in sorted(tokenizer.eog_ids))
    if len({id for id, value in bias if value == -_INF}.union(tokenizer.suppressed_ids)) == tokenizer.n_vocab:
        refuse("logit_bias", "no token is left")
    given["logit_bias"] = bias
    return replace(defaults, **given)


def _merged(pairs: Iterator[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Biases add up: one for each token, however many were given."""
    sums: dict[int, float] = {}
    for id, bias in pairs:
        sums[id] = min(FLOAT_MAX, sums.get(id, 0.0) + bias)
    return tuple((id, bias if bias >= -FLOAT_MAX else -_INF) for id, bias in sums.items())


def _samplers(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        value = [as_text("samplers", item) for item in value]
    elif not isinstance(value, str):
        refuse("samplers", f"expected an array of names or a string of letters, got {article(value)}")
    try:
        chain, unknown = chain_from_names(value)
    except ValueError as error:
        refuse("samplers", str(error))
    for name in unknown:  # left out, as llama-server does: clients name some that have gone
        warn_once(log, f"samplers: there is none named {name[:32]!r}; it is left out")
    return chain


def _logit_bias(fields: Fields, tokenizer: Tokenizer) -> Iterator[tuple[int, float]]:
    """(id, bias): an array of [token or text, number or false], or an object of the same. An id that the vocabulary
    does not have can never be sampled, so a bias on it changes nothing and is left out."""
    value = fields.body["logit_bias"]
    if isinstance(value, dict):
        pairs = [(int(key) if _TOKEN_ID.fullmatch(key) and len(key) < 20 else key, bias) for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = []
        for item in value:
            if not isinstance(item, list) or len(item) != 2:
                refuse("logit_bias", "expected [token or text, bias] pairs")
            pairs.append((item[0] if isinstance(item[0], str) else as_integer("logit_bias", item[0]), item[1]))
    else:
        refuse("logit_bias", f"expected an array or an object, got {article(value)}")
    for token, given in pairs:
        if given is False:
            bias = -_INF
        elif given is None or isinstance(given, bool):
            refuse("logit_bias", f"a bias must be a number or false, got {article(given)}")
        else:
            bias = float(limited("logit_bias", as_number("logit_bias", given), -FLOAT_MAX, FLOAT_MAX, False))
        if isinstance(token, str):
            for id in tokenizer.encode(token, add_special=False, parse_special=False):
                yield id, bias
        elif 0 <= token < tokenizer.n_vocab:
            yield token, bias
