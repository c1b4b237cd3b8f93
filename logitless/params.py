"""Sampling parameters of the Python API: the samplers' fields, and how a completion ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from logitless.engine.sampling.params import DEFAULT_SAMPLERS, SamplerParams
from logitless.errors import RequestError

_READ_LATER = (  # with the model
    *("logit_bias", "json_schema", "guided_json", "logprobs", "adapters", "speculation", "logits_processors"),
)


def plain(value: Any) -> Any:
    """The value with numpy's scalars and arrays as Python's numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    return {key: plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _frozen(value: Any) -> Any:
    """The value with frozen sets and tuples as mappings and lists: it has a hash."""
    if isinstance(value, Mapping):
        return frozenset((key, _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


class SamplingParams(SamplerParams, frozen=True, kw_only=True):
    """Sampling parameters of one request, by llama-server's names and defaults.

    The samplers' numbers (temperature, top_k, top_p, min_p, repeat_penalty, seed, …) are those of
    SamplerParams (engine/sampling/params.py), which HTTP bodies and flags have too. The sampler
    chain is llama.cpp's, and so are its random numbers: a seed gives the same text on each run,
    whatever else runs at the time. A request with a wrong field raises RequestError, which names it.

    >>> from logitless import SamplingParams
    >>> SamplingParams(temperature=0.2, top_k=40, stop=["\\n"]).fields()
    {'temperature': 0.2, 'stop': ['\\n']}"""

    n: int = 1  # results of each prompt: `outputs` of the completion; their seeds count up
    max_tokens: int = -1  # -1: until the model ends it, or the context is full
    repetition_penalty: float | None = None  # vLLM's: repeat_penalty over the whole text
    stop: str | Sequence[str] = ()  # texts that end it, and are not part of it
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()  # tokens that end it, beside the model's end tokens
    include_stop_str_in_output: bool = False  # the text includes the stop string
    min_tokens: int = 0  # tokens before which nothing but max_tokens ends it
    samplers: str | Sequence[str] = DEFAULT_SAMPLERS  # names in order, or llama.cpp's letters
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()  # texts that must not be generated
    # functions of (generated ids, logits), or (prompt's ids, generated ids, logits), that return the logits, f32
    # arrays of all tokens. Slow: they and the sampler chain of their request run on the host
    logits_processors: Sequence[Callable[..., Any]] | None = ()
    grammar: str = ""  # GBNF
    json_schema: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None  # vLLM's: {"choice": ["yes", "no"]}, {"regex": …}, …
    guided_json: Mapping[str, Any] | str | None = None  # vLLM's older names of the same
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None
    logprobs: int | None = None  # of the chosen token, and of so many likely ones (1 or more)
    prompt_logprobs: int | None = None  # of each token of the prompt, and of so many likely ones; -1: all
    skip_special_tokens: bool = True  # special tokens have no text
    truncate_prompt_tokens: int | None = None  # keep the last so many tokens of the prompt; -1: as many as fit
    adapters: Mapping[str, float] | None = None  # LoRA adapters by path or name, with scales; None: the options'
    model: str = ""  # a fine-tuned model by its name (FinetuneJob.model)
    cache_prompt: bool = True  # reuse the prefix cache
    priority: int = 0  # lower values are scheduled first
    speculation: Mapping[str, Any] | None = None  # {"type": "ngram-mod", "n_max": 16}; None: the options'

    def __post_init__(self) -> None:
        """RequestError: a parameter has the wrong type, or is outside its limits."""
        from logitless.engine.errors import InvalidRequest
        from logitless.engine.params import Generation
        from logitless.frontend.fields import read

        n = plain(self.logprobs)
        if n is not None and (not isinstance(n, int) or n < 0):
            raise RequestError(f"field 'logprobs': must be 0 or more, not {n!r}; prompt_logprobs has all")
        functions = () if self.logits_processors is None else self.logits_processors
        if not isinstance(functions, list | tuple) or not all(map(callable, functions)):
            raise RequestError("field 'logits_processors': expected a list of functions")
        checked = {name: plain(value) for name, value in self.fields().items() if name not in _READ_LATER}
        try:
            read(Generation, checked)
        except InvalidRequest as error:
            raise RequestError(error.message) from None

    def __hash__(self) -> int:
        return hash(_frozen(self.fields()))

    def fields(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        found = {}
        for field in fields(self):
            default = field.default_factory() if field.default is NODEFAULT else field.default
            value = getattr(self, field.name)
            value = plain(value)
            if value is not None and value != default:
                found[field.name] = value
        return found


class BeamSearchParams(Struct, frozen=True, kw_only=True):
    """Parameters of `beam_search`, by vLLM's names."""

    beam_width: int  # sequences that go on, and that are the result
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0  # sequences are ranked by log-probability / length ** length_penalty

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise RequestError(f"field {name!r}: must be a whole number of 1 or more, not {value!r}")


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter of one request, as vLLM has it. `lora_path` is a GGUF file, loaded for its first request.

    The name and the number are the program's own; the path says which adapter it is."""

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
