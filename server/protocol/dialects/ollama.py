"""Models in the shape of Ollama's API, of which llama-server has what clients need to find them: `models` beside
OpenAI's `data`, /api/tags, /api/show; /api/chat takes and gives what /v1/chat/completions does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CAPABILITIES = ["completion"]
DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "",
    "families": [""],
    "parameter_size": "",
    "quantization_level": "",
}


def listed(models: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The body of a list of models, each an item of OpenAI's API."""
    data = list(models)
    return {"models": [_item(each["id"]) for each in data], "object": "list", "data": data}


def _item(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": CAPABILITIES,
        "parameters": "",
        "details": DETAILS,
    }


def shown(template: str, n_ctx: int) -> dict[str, Any]:
    """The body of /api/show: the chat template, and how many tokens a request may have."""
    return {
        "template": template,
        "model_info": {"llama.context_length": n_ctx},
        "modelfile": "",
        "parameters": "",
        "details": DETAILS,
        "capabilities": CAPABILITIES,
    }
