"""`lora: [{id, scale}]` of a request or of POST /lora-adapters, and a model's name that means an adapter."""

from __future__ import annotations

from logitless.engine.adapters import Adapters
from logitless.engine.errors import NotFound
from logitless.engine.requests import Lora
from logitless.server.protocol.fields import Fields, article, as_integer, as_number, limited, refuse

MAX_SCALE = 1e4


def parse_lora(fields: Fields, adapters: Adapters | None) -> Lora | None:
    """The adapters of a request; None: it leaves that to the server."""
    named = model_adapter(fields.text("model"), adapters)
    listed = fields.array("lora")
    if listed is None:
        return None if named is None else ((named, 1.0),)
    scales = lora_scales(listed, adapters, "lora")
    if named is not None:
        scales = {named: 1.0, **scales}
    return tuple(sorted(scales.items()))


def model_adapter(model: str, adapters: Adapters | None) -> int | None:
    """The adapter or whole finetune that a model's name stands for. Names of OpenAI's fine-tuned form that are not
    known are refused: the base model's answer would be a wrong one. Any other name means the base model, as with
    llama-server."""
    found = None if adapters is None or not model else adapters.find(model)
    if found is None and model.startswith("ft:"):
        raise NotFound(f"field 'model': the model {model[:200]!r} does not exist", param="model")
    return found


def tuned_name(fields: Fields, adapters: Adapters | None) -> str:
    """What a reply calls the model where the request named an adapter or a whole finetune; "": what the server does."""
    model = fields.text("model")
    return model if model_adapter(model, adapters) is not None else ""


def lora_scales(listed: object, adapters: Adapters | None, name: str) -> dict[int, float]:
    """[{id, scale}] as scales by id."""
    if not isinstance(listed, list):
        refuse(name, f"expected an array, got {article(listed)}")
    scales: dict[int, float] = {}
    n = 0 if adapters is None else len(adapters.entries)
    for i, item in enumerate(listed):
        if not isinstance(item, dict):
            refuse(f"{name}[{i}]", f"expected an object, got {article(item)}")
        id = as_integer(f"{name}[{i}].id", item.get("id"))
        if not 0 <= id < n:
            refuse(f"{name}[{i}].id", f"there is no adapter {str(id)[:20]}; the server has {n}")
        if adapters is not None and adapters.entries[id].whole:
            refuse(f"{name}[{i}].id", f"{id} is a whole model: ask for it by the field 'model'")
        if id in scales:
            refuse(f"{name}[{i}].id", f"adapter {id} is listed twice")
        scale = as_number(f"{name}[{i}].scale", 1.0 if item.get("scale") is None else item["scale"])
        scales[id] = float(limited(f"{name}[{i}].scale", scale, -MAX_SCALE, MAX_SCALE, True))
    return scales
