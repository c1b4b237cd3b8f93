"""Sampling parameters of a request: sampler chain, logit bias, and the numbers of SamplerParams."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from logitless.engine.params import Generation, Text
from logitless.engine.sampling.params import FLOAT_MAX, SamplerParams, SamplingParams, chain_from_names
from logitless.frontend.fields import (
    article,
    as_integer,
    as_number,
    bad_request,
    limited,
    warn_once,
)
from logitless.frontend.workers import check
from logitless.models.tokenizer import Tokenizer

log = logging.getLogger("logitless.http")

MAX_TEXT = 1 << 20  # characters of all texts of logit_bias
_INF = math.inf
_TOKEN_ID = re.compile(r"\s*[+-]?\d+")


def parse_sampling(params: Generation, defaults: SamplingParams, tokenizer: Tokenizer, n_probs: int) -> SamplingParams:
    """The sampling parameters of a request."""
    numbers = {name: getattr(params, name) for name in SamplerParams.__struct_fields__}
    if params.repetition_penalty is not None:  # vLLM's, which has no window
        whole = params.repeat_last_n == defaults.repeat_last_n
        numbers |= {"repeat_penalty": params.repetition_penalty, "repeat_last_n": -1 if whole else params.repeat_last_n}
    if params.dry_base < 1.0:
        numbers["dry_base"] = defaults.dry_base
    bias = defaults.logit_bias if params.logit_bias is None else _merged(_logit_bias(params.logit_bias, tokenizer))
    if params.ignore_eos:
        bias += tuple((id, -_INF) for id in sorted(tokenizer.eog_ids))
    allowed, bad_words = _allowed(params.allowed_token_ids, tokenizer), _bad_words(params.bad_words, tokenizer)
    stop_token_ids = tuple(id for id in params.stop_token_ids if 0 <= id < tokenizer.n_vocab)
    banned = {id for id, value in bias if value == -_INF}.union(tokenizer.suppressed_ids)
    banned |= {word[-1] for word in bad_words}  # at one place or another
    if params.min_tokens > 0:
        banned |= {*tokenizer.eog_ids, *stop_token_ids}
    if len(banned) == tokenizer.n_vocab if allowed is None else banned.issuperset(allowed):
        bad_request("logit_bias" if allowed is None else "allowed_token_ids", "no token is left")
    return SamplingParams(
        **{**numbers, "seed": params.seed & 0xFFFFFFFF},
        samplers=defaults.samplers if params.samplers is None else _samplers(params.samplers),
        logit_bias=bias,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        min_tokens=params.min_tokens,
        stop_token_ids=stop_token_ids,
        n_probs=n_probs,
        post_sampling_probs=params.post_sampling_probs,
        grammar=defaults.grammar,
    )


def _allowed(ids: Sequence[int] | None, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    for id in ids or ():
        if not 0 <= id < tokenizer.n_vocab:
            bad_request("allowed_token_ids", f"token {id} is outside the vocabulary of {tokenizer.n_vocab}")
    return None if ids is None else tuple(sorted(set(ids)))


def _bad_words(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each text without blanks at its ends, as it is written at a text's start and after a blank.

    A blank belongs to the token of the word behind it, so that one at an end would match nothing.
    """
    words: dict[tuple[int, ...], None] = {}
    for i, text in enumerate(texts):
        if not text.strip():
            bad_request(f"bad_words[{i}]", "must not be empty")
        for spelled in (text.strip(" "), " " + text.strip(" ")):
            words[tuple(tokenizer.encode(spelled, add_special=False, parse_special=False))] = None
    return tuple(words)


def _merged(pairs: Iterator[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Biases add up: one for each token, however many were given."""
    sums: dict[int, float] = {}
    for id, bias in pairs:
        sums[id] = min(FLOAT_MAX, sums.get(id, 0.0) + bias)
    return tuple((id, bias if bias >= -FLOAT_MAX else -_INF) for id, bias in sums.items())


def _samplers(value: Text) -> tuple[str, ...]:
    try:
        chain, unknown = chain_from_names(value)
    except ValueError as error:
        bad_request("samplers", str(error))
    for name in unknown:  # left out, as llama-server does: clients name some that have gone
        warn_once(log, f"samplers: there is none named {name[:32]!r}; it is left out")
    return chain


def _logit_bias(value: dict[str, Any] | list[Any], tokenizer: Tokenizer) -> Iterator[tuple[int, float]]:
    """(id, bias): an array of [token or text, number or false], or an object of the same. An id that the vocabulary
    does not have can never be sampled, so a bias on it changes nothing and is left out. At most as many as it has."""
    if len(value) > tokenizer.n_vocab:
        bad_request("logit_bias", f"has more than the {tokenizer.n_vocab} tokens of the vocabulary")
    if isinstance(value, dict):
        pairs = [(int(key) if _TOKEN_ID.fullmatch(key) and len(key) < 20 else key, bias) for key, bias in value.items()]
    else:
        pairs = []
        for item in value:
            if not isinstance(item, list) or len(item) != 2:
                bad_request("logit_bias", "expected [token or text, bias] pairs")
            pairs.append((item[0] if isinstance(item[0], str) else as_integer("logit_bias", item[0]), item[1]))
    if sum(len(token) for token, _ in pairs if isinstance(token, str)) > MAX_TEXT:
        bad_request("logit_bias", f"has texts of more than {MAX_TEXT} characters")
    for token, source in pairs:
        check()
        if source is False:
            bias = -_INF
        elif source is None or isinstance(source, bool):
            bad_request("logit_bias", f"a bias must be a number or false, got {article(source)}")
        else:
            bias = float(limited("logit_bias", as_number("logit_bias", source), -FLOAT_MAX, FLOAT_MAX, False))
        if isinstance(token, str):
            for id in tokenizer.encode(token, add_special=False, parse_special=False):
                yield id, bias
        elif 0 <= token < tokenizer.n_vocab:
            yield token, bias
