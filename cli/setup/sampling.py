"""Sampling flags: default sampling parameters of requests."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

from msgspec.structs import replace

from logitless.cli.flags.flags import UsageError
from logitless.cli.flags.options import SAMPLERS
from logitless.cli.setup import escapes
from logitless.engine.loading.options import text_file

if TYPE_CHECKING:
    from logitless.engine.loading.open_model import OpenModel
    from logitless.engine.sampling.grammar_mask import GrammarConstraint
    from logitless.engine.sampling.params import SamplingParams
    from logitless.models.tokenizer import Tokenizer

_GRAMMARS = {  # flag → kind of grammar
    "grammar": "gbnf",
    "grammar_file": "gbnf",
    "json_schema": "json_schema",
    "json_schema_file": "json_schema",
}
_BIAS = re.compile(r"(\d+)([+-].+)")


def sampling_defaults(options: SimpleNamespace, model: OpenModel, *, ignore_eos: bool = False) -> SamplingParams:
    """Sampling parameters of the flags, else of the model's file, parsed as the fields of a request."""
    from logitless.engine.errors import InvalidRequest
    from logitless.engine.params import Generation
    from logitless.engine.sampling.params import SamplingParams, chain_from_names
    from logitless.frontend.fields import read
    from logitless.frontend.sampling import parse_sampling

    body = {name: getattr(options, flag.dest) for name, flag in SAMPLERS.items()}
    body["samplers"] = options.sampler_seq or [name for name in re.split("[;,]", options.samplers) if name]
    if options.dry_sequence_breaker:
        body["dry_sequence_breakers"] = escapes.texts(options, "dry_sequence_breaker")
    body["ignore_eos"] = ignore_eos
    flags = {name: {flag.dest} for name, flag in SAMPLERS.items()} | {"samplers": {"samplers", "sampler_seq"}}
    body |= {name: value for name, value in model.sampling.items() if not flags[name] & options.settled}
    flag = "--sampler-seq" if options.sampler_seq else "--samplers"
    try:
        _, unknown = chain_from_names(body["samplers"])
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if unknown:
        raise UsageError(f"{flag}: unknown sampler {unknown[0][:32]!r}")
    try:
        params = parse_sampling(read(Generation, body), SamplingParams(), model.tokenizer, 0)
    except InvalidRequest as error:
        raise UsageError(error.message.replace("field '", "flag '")) from None
    if options.dry_sequence_breaker == ["none"]:
        params = replace(params, dry_sequence_breakers=())
    bias = tuple(_bias(text, model.tokenizer.n_vocab) for text in options.logit_bias)
    return replace(params, logit_bias=(*bias, *params.logit_bias), grammar=_constraint(options, model.tokenizer))


def _constraint(options: SimpleNamespace, tokenizer: Tokenizer) -> GrammarConstraint | None:
    """The grammar of the flags, if any."""
    flags = [flag for flag in _GRAMMARS if getattr(options, flag)]
    if not flags:
        return None
    from logitless.engine.sampling.grammar_mask import GrammarConstraint
    from logitless.models.grammar import Grammar, GrammarError

    names = [f"--{flag.replace('_', '-')}" for flag in flags]
    if len(flags) > 1:
        raise UsageError(f"{names[1]}: cannot be given together with {names[0]}")
    value, kind = getattr(options, flags[0]), _GRAMMARS[flags[0]]
    source = text_file(value) if flags[0].endswith("_file") else value
    try:
        return GrammarConstraint(Grammar.compile(kind, source, tokenizer), source if kind == "gbnf" else "")
    except GrammarError as error:
        raise UsageError(f"{names[0]}: {error}") from None


def _bias(text: str, n_vocab: int) -> tuple[int, float]:
    match = _BIAS.fullmatch(text)
    try:
        token, value = int(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise UsageError(f"--logit-bias: {text!r} is not a token id and a number, such as 15043+1") from None
    if token >= n_vocab or math.isnan(value) or value == math.inf:
        raise UsageError(f"--logit-bias: {text!r}: ids end at {n_vocab - 1}, and the bias is a number or -inf")
    return token, value
