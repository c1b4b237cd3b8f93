"""Default sampling parameters of a model: the keys `general.sampling.*` of its file, which llama.cpp reads, too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from logitless.engine.sampling.params import SamplerParams, chain_from_names, params_of
from logitless.models.errors import shown
from logitless.models.hparams.keys import Keys

log = logging.getLogger("logitless.loading")
_PREFIX = "general.sampling"


def model_defaults(metadata: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Fields of a request by name. ModelFileError names a key whose value is impossible."""
    keys, fields = Keys(metadata, _PREFIX, str(path)), dict[str, Any]()
    for name, (kind, param) in params_of(SamplerParams).items():
        if param.key and param.key in keys:
            if isinstance(keys.get(param.key), np.ndarray):
                raise keys.error(param.key, "must be one number")
            value = kind(number := keys.number(param.key))
            if (kind is int and value != number) or (param.hard and not param.low <= value <= param.high):
                whole = "a whole number" if kind is int else "a number"
                raise keys.error(param.key, f"is {number:g}, not {whole} from {param.low:g} to {param.high:g}")
            fields[name] = kind(min(max(value, param.low), param.high))
    if keys.get("sequence", "") != "":  # llama.cpp keeps its chain where the text is empty
        fields["samplers"] = _chain(keys)
    return fields


def _chain(keys: Keys) -> tuple[str, ...]:
    """The sampler chain; llama.cpp leaves unknown names out, too."""
    names = keys.get("sequence")
    if not isinstance(names, str):
        raise keys.error("sequence", "is no list of samplers, such as top_k;top_p;temperature")
    try:
        chain, unknown = chain_from_names([name for name in names.split(";") if name])
    except ValueError as error:
        raise keys.error("sequence", f"is too long: {error}") from None
    if unknown:
        log.warning("%s: key '%s.sequence': there is no sampler %s", keys.file, keys.arch, shown(unknown[0]))
    return chain
