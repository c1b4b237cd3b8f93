"""LoRA of a request (`lora: [{id, scale}]`, a fine-tuned model's name) and POST /lora-adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Struct

from logitless.engine.adapters import Adapters
from logitless.engine.errors import NotFound
from logitless.engine.params import LoraScale
from logitless.engine.requests import Lora
from logitless.engine.sampling.params import Param
from logitless.frontend.fields import as_number, bad_request, limited

MAX_SCALE = 1e4


class Scales(Struct, frozen=True, kw_only=True):
    """POST /lora-adapters: the body is an array."""

    body: Annotated[Sequence[LoraScale], Param("every adapter's scale; unlisted adapters get 0")]


def parse_lora(model: str, listed: Sequence[LoraScale] | None, adapters: Adapters | None) -> tuple[str, Lora | None]:
    """The adapters of a request, by its fields `model` and `lora` (None: it leaves that to the server), and the
    model's name in the reply where it is that of an adapter or a full finetune."""
    named = model_adapter(model, adapters)
    name = model if named is not None else ""
    if listed is None:
        return name, None if named is None else ((named, 1.0),)
    scales = lora_scales(listed, adapters, "lora")
    if named is not None:
        scales = {named: 1.0, **scales}
    return name, tuple(sorted(scales.items()))


def model_adapter(model: str, adapters: Adapters | None) -> int | None:
    """The adapter or whole finetune that a model's name stands for. Names of OpenAI's fine-tuned form that are not
    known are refused: the base model's answer would be a wrong one. Any other name means the base model, as with
    llama-server."""
    result = None if adapters is None or not model else adapters.find(model)
    if result is None and model.startswith("ft:"):
        raise NotFound(f"field 'model': the model {model[:200]!r} does not exist", param="model")
    return result


def lora_scales(listed: Sequence[LoraScale], adapters: Adapters | None, name: str) -> dict[int, float]:
    """[{id, scale}] as scales by id; `name`: what stands before [i] where one is refused."""
    scales: dict[int, float] = {}
    n = 0 if adapters is None else len(adapters.entries)
    for i, item in enumerate(listed):
        place, id = f"{name}[{i}]", item.id
        if adapters is None or not 0 <= id < n or adapters.entries[id].removed:
            bad_request(f"{place}.id", f"there is no adapter {str(id)[:20]}; the server has {n}")
        if adapters.entries[id].whole:
            bad_request(f"{place}.id", f"{id} is a whole model: ask for it by the field 'model'")
        if id in scales:
            bad_request(f"{place}.id", f"adapter {id} is listed twice")
        scale = 1.0 if item.scale is None else as_number(f"{place}.scale", item.scale)
        scales[id] = float(limited(f"{place}.scale", scale, -MAX_SCALE, MAX_SCALE, True))
    return scales
