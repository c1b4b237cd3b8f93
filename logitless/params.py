"""Sampling parameters: how a completion is generated, by llama-server's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import fields

from logitless.engine.sampling.params import DEFAULT_SAMPLERS, SamplerParams


class SamplingParams(SamplerParams, frozen=True, kw_only=True):
    """Sampling parameters of one request.

    The sampler chain is the same as llama.cpp's, and so are its random numbers: a seed gives the
    same text on each run, whatever else runs at the time. engine/sampling/params.py declares the
    samplers' numbers (temperature, top_k, seed, ...). RequestError names a field that is wrong.

    >>> from logitless import SamplingParams
    >>> SamplingParams(temperature=0.2, stop=["\\n"]).fields()
    {'temperature': 0.2, 'stop': ['\\n']}
    """

    max_tokens: int = -1  # -1: until the model ends it, or the context is full
    stop: str | Sequence[str] = ()  # texts that end it, and are not part of it
    ignore_eos: bool = False
    samplers: Sequence[str] | str = DEFAULT_SAMPLERS  # names in order, or llama.cpp's letters
    logit_bias: Mapping[int, float] = {}  # added to the logits of token ids
    # Structured output
    grammar: str = ""  # GBNF
    json_schema: Mapping[str, Any] | None = None
    # Results
    logprobs: int | None = None  # log-probabilities of the chosen token, and of so many likely ones (1 or more)
    # Engine
    adapters: Mapping[str, float] | None = None  # LoRA adapters by path or name, with their scales
    model: str = ""  # a fine-tuned model by its name (FinetuneJob.model)
    cache_prompt: bool = True
    priority: int = 0  # lower values are scheduled first
    speculation: Mapping[str, Any] = {}  # {"type": "ngram-mod", "n_max": 16}

    def fields(self) -> dict[str, Any]:
        """The parameters that are not the default."""
        found = {}
        for field in fields(self):
            default = field.default_factory() if field.default is NODEFAULT else field.default
            value = getattr(self, field.name)
            if value is not None and value != default:
                found[field.name] = value
        return found
