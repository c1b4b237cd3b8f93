"""A Hugging Face folder's image encoder and projector as the parts of a projector's GGUF file (mmproj)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from logitless.models.errors import ModelFileError
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.parse import Part, TensorInfo
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key, f32, flag, text
from logitless.models.huggingface.checkpoint import Checkpoint, open_checkpoint
from logitless.models.huggingface.config import Config, read_json, repository_name
from logitless.models.huggingface.families.family import made_of
from logitless.models.huggingface.folder import Converted, Names, tensor_info
from logitless.models.huggingface.moves import Move
from logitless.models.huggingface.quantized import weights_of
from logitless.models.huggingface.tokens.vocabulary import token_id
from logitless.models.huggingface.visions import (
    Settings,
    Vision,
    activation_keys,
    common_keys,
    deep_layers,
    image_keys,
    image_settings,
    vision_of,
)

_DEEP = re.compile(r"deepstack_merger_list\.(\d+)\.(?:linear_)?(fc1|fc2|norm)\.(weight|bias)$")
_VIT = re.compile(r"^vision_(?:tower|model)\.(?=embeddings|encoder|pre_layrnorm|post_layernorm)")
_SMALL = re.compile(r"patch_embd|position_embd|norm|ln")


def read_projector(file: Path) -> list[Part]:
    """The parts of the projector for whose folder this preprocessor_config.json stands. ModelFileError: the folder has
    none, or it is damaged."""
    config = Config.read(file.parent)
    vision = vision_of(config)
    if vision is None:
        raise ModelFileError(file.parent, "has no encoder of images or sounds of a supported kind")
    settings = Settings(config, Config.of_vision(config, vision.encoder), image_settings(file))
    checkpoint = open_checkpoint(file.parent)
    try:
        tensors = dict(sorted(checkpoint.by_name(_tensors(settings, vision, checkpoint)).items()))
        keys = _keys(settings, vision)
    except BaseException:
        checkpoint.close()
        raise
    values = {n: float(np.float32(k.value)) if k.type is ValueType.FLOAT32 else k.value for n, k in keys.items()}
    first = checkpoint.parts[0]
    metadata = Metadata(file, first.buffer, values, {name: (key.type, key.item) for name, key in keys.items()})
    return [replace(first, metadata=metadata, tensors=tensors), *checkpoint.parts[1:]]


def _keys(s: Settings, vision: Vision) -> dict[str, Key]:
    keys = {
        "general.architecture": text("clip"),
        "general.type": text("mmproj"),
        "general.name": text(repository_name(s.whole.path.parent)),
        f"clip.has_{(kind := 'audio' if vision.of_sounds else 'vision')}_encoder": flag(True),
        "clip.projector_type": text(vision.kind),
    }
    if vision.of_sounds:
        own = {"attention.layer_norm_epsilon": f32(1e-5), **dict(common_keys(s))}
    else:
        own = {**dict(common_keys(s)), **dict(image_keys(s))}
        keys |= dict(activation_keys(s))
    own |= dict(vision.keys(s))
    return s.whole.checked(keys | {f"clip.{kind}.{name}": key for name, key in own.items()})


def _tensors(s: Settings, vision: Vision, checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    names, config = Names(s.vision, "clip"), s.vision
    of_encoder = re.compile(rf"(?:^|\.)(?:{'|'.join(vision.parts)})(?:\.|$)")
    for name, weight in weights_of(checkpoint, s.whole).items():
        if vision.break_token and name.endswith("embed_tokens.weight"):
            row = _row(_token(s, vision.break_token, weight.shape[0]))
            target, own = "v.token_embd.img_break", (weight.floats or weight,)
            yield target, tensor_info(target, weight.shape[1:], "f32", Converted(own, config, row))
        if not of_encoder.search(name) or re.search(vision.unused, name):
            continue
        targets = list(_targets(s, vision, names, name.removeprefix("model.")))
        if not targets:
            raise checkpoint.error(name, f"is unknown in the projector {vision.kind}")
        for target, move in targets:
            try:
                shape = weight.shape if move is None else move.shape(weight.shape, config)
            except IndexError:
                raise checkpoint.error(name, f"has {len(weight.shape)} dimensions, which no {target} has") from None
            except ValueError as error:
                raise checkpoint.error(name, str(error)) from None
            small = len(shape) < 2 or _SMALL.search(target) is not None
            plain = (weight.floats or weight) if small or move is not None else weight
            dtype = "f32" if small or len(shape) == 4 else plain.dtype
            # llama.cpp computes depthwise convolutions, and those of sounds, of no others
            if (len(shape) == 4 and shape[1] == 1 < shape[3]) or len(shape) == 3:
                dtype = "f16"
            yield target, tensor_info(target, shape, dtype, Converted((plain,), config, move))


def _targets(s: Settings, vision: Vision, names: Names, name: str) -> Iterator[tuple[str, Move | None]]:
    if deep := _DEEP.search(name):
        layers = deep_layers(s.vision)
        if int(deep[1]) < len(layers):
            yield f"v.deepstack.{layers[int(deep[1])]}.{deep[2]}.{deep[3]}", None
        return
    for pattern, targets in vision.splits:
        if match := re.search(pattern, name):
            yield from ((match.expand(target), move) for target, move in made_of(targets))
            return
    known = (names.of(form) for form in (name, _VIT.sub("vision_tower.vision_model.", name)))
    if (target := next((form for form in known if form is not None), None)) is not None:
        yield target, next((move for end, move in vision.moves if re.search(f"{end}$", target)), None)


def _row(i: int) -> Move:
    """One row of a matrix."""
    return Move(lambda array, _: array[i], lambda shape, _: shape[1:])


def _token(s: Settings, text: str, n_vocab: int) -> int:
    """The id of a special token of so many."""
    path = s.whole.path.with_name("tokenizer.json")
    if not path.exists():
        id = token_id(path.parent, text)
        if id is None or id >= n_vocab:
            raise ModelFileError(path.parent, f"has no token {text}, which ends lines of images")
        return id
    added = Config(path, read_json(path)).items("added_tokens")
    ids = [t.get("id") for t in added if isinstance(t, dict) and t.get("content") == text]
    if len(ids) != 1 or type(ids[0]) is not int or ids[0] < 0:
        raise ModelFileError(path, f"has no token {text}, which ends lines of images")
    if ids[0] >= n_vocab:
        raise ModelFileError(path, f"{text!r} is token {ids[0]} of {n_vocab}")
    return ids[0]
