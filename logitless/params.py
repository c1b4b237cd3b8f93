"""Sampling parameters: how a completion is generated, by llama-server's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; None stands for llama-server's default.

    The sampler chain is the same as llama.cpp's, and so are its random numbers: a seed gives the
    same text on each run, whatever else runs at the time. RequestError names a field that is wrong.

    >>> from logitless import SamplingParams
    >>> SamplingParams(temperature=0.2, stop=["\\n"]).fields()
    {'stop': ['\\n'], 'temperature': 0.2}
    """

    max_tokens: int | None = None  # -1: until the model ends it, or the context is full (default)
    stop: str | Sequence[str] | None = None  # texts that end it, and are not part of it
    ignore_eos: bool | None = None
    seed: int | None = None  # -1: a random one (default)
    # Sampler chain
    samplers: Sequence[str] | str | None = None  # names in order, or llama.cpp's letters
    temperature: float | None = None  # 0: greedy; default 0.8
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None  # 0: all tokens; default 40
    top_p: float | None = None  # 1: all tokens; default 0.95
    min_p: float | None = None  # 0: all tokens; default 0.05
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_keep: int | None = None
    # Penalties
    repeat_last_n: int | None = None  # tokens; -1: the context; default 64
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] | None = None
    logit_bias: Mapping[int, float] | None = None  # added to the logits of token ids
    # Structured output
    grammar: str | None = None  # GBNF
    json_schema: Mapping[str, Any] | None = None
    # Results
    logprobs: int | None = None  # log-probabilities of the chosen token, and of so many likely ones (1 or more)
    # Engine
    adapters: Mapping[str, float] | None = None  # LoRA adapters by path or name, with their scales
    model: str | None = None  # a fine-tuned model by its name (FinetuneJob.model)
    cache_prompt: bool | None = None
    priority: int | None = None  # lower values are scheduled first; default 0
    speculation: Mapping[str, Any] | None = None  # {"type": "ngram-mod", "n_max": 16}

    def fields(self) -> dict[str, Any]:
        """The parameters that are set."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
