"""Ollama's model details: sizes, family, quantization and metadata, from the GGUF header alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from logitless.frontend.answers.ollama import ModelDetails
from logitless.frontend.dialects.ollama_names import timestamp
from logitless.models.chat.tool_calls.families import reasoning_tags
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import FILE_TYPES

_LONG = 5  # items of an array that only `verbose` shows


@dataclass(frozen=True)
class ModelFile:
    """A file as far as it can be read. `info`: the metadata without long arrays."""

    size: int = 0
    modified: float = 0.0
    digest: str = ""
    details: ModelDetails = field(default_factory=ModelDetails)
    info: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    capabilities: tuple[str, ...] = ("completion",)

    @property
    def modified_at(self) -> str:
        return timestamp(self.modified)


def model_file(path: str) -> ModelFile:
    """The file at this path, read once for each version of it; "" or none there: nothing is known."""
    try:
        result = Path(path).stat()
    except (OSError, ValueError):
        return ModelFile()
    return _read(path, result.st_size, result.st_mtime_ns)


@lru_cache(256)
def _read(path: str, size: int, modified_ns: int) -> ModelFile:
    digest = hashlib.sha256(f"{Path(path).name} {size} {modified_ns}".encode()).hexdigest()
    modified = modified_ns / 1e9
    try:
        with GGUFFile.open(path) as file:
            metadata, n_params, size = file.metadata, file.n_params, file.size
            family, kind = str(metadata.get("general.architecture", "")), metadata.get("general.file_type")
            quant = FILE_TYPES.get(kind, "") if isinstance(kind, int) else ""
            template = metadata.get("tokenizer.chat_template", "")
            template = template if isinstance(template, str) else ""
            info = {key: None if (metadata.length(key) or 0) > _LONG else _plain(metadata[key]) for key in metadata}
            details = ModelDetails(family, [family], shown_size(n_params), quant)
            can = _capabilities(info, family, template)
            return ModelFile(size, modified, digest, details, info | _counted(n_params), template, can)
    except (OSError, ModelFileError):
        return ModelFile(size, modified, digest)


def whole_info(path: str) -> dict[str, Any]:
    """The metadata with its arrays (`verbose`)."""
    try:
        with GGUFFile.open(path) as file:
            return {key: _plain(file.metadata[key]) for key in file.metadata} | _counted(file.n_params)
    except (OSError, ModelFileError):
        return {}


def shown_size(n: int) -> str:
    """A number of parameters as 1.2B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)


def _counted(n_params: int) -> dict[str, int]:
    return {"general.parameter_count": n_params}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value]
    return value


def _capabilities(info: dict[str, Any], family: str, template: str) -> tuple[str, ...]:
    """Ollama's capabilities of a model, by its file."""
    if f"{family}.pooling_type" in info:
        return ("embedding",)
    result = ["completion"]
    if "tools" in template:
        result.append("tools")
    if template and reasoning_tags(template) is not None:
        result.append("thinking")
    if "tokenizer.ggml.fim_pre_token_id" in info or "tokenizer.ggml.prefix_token_id" in info:
        result.append("insert")
    return tuple(result)
