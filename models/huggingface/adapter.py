"""A peft folder (adapter_config.json, adapter_model.safetensors) as the parts of a GGUF adapter of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from logitless.models.adapters.low_rank import EMBEDDING
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.parse import Part, TensorInfo
from logitless.models.gguf.types import ValueType
from logitless.models.hparams.hparams import Hparams
from logitless.models.huggingface.checkpoint import FLOATS, Array, Checkpoint, as_f32, open_checkpoint, plain
from logitless.models.huggingface.config import Config, read_json
from logitless.models.huggingface.families.family import Family
from logitless.models.huggingface.families.rows import FAMILIES
from logitless.models.huggingface.folder import Constant, Converted, Names, targets_of, tensor_info
from logitless.models.huggingface.moves import TRANSPOSED, Move, then
from logitless.models.weights.weights import check_weights, numbers_of

CONFIG = "adapter_config.json"
_MAGNITUDE = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_magnitude_vector(?:\.\w+)*")
# A module that is trained as a whole, or rows of one (2).
_WHOLE = re.compile(
    r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save(?:\.\w+)?)?"
    r"(?:\.weight|(\.token_adapter\.trainable_tokens_delta)(?:\.\w+)?)"
)
OUTPUT = "output.weight"
_MOST_ROWS = 256  # the rank of the pair that they become
_HALF = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.\w+)?(?:\.weight)?")


def read_peft(folder: Path, h: Hparams, base: GGUFFile) -> list[Part]:
    """The folder's files as those of an adapter of this model; B has the factor of its pair, and DoRA's of each row.
    ModelFileError names what is missing or not supported."""
    settings = read_json(folder / CONFIG)
    for name, value, known in (
        ("peft_type", settings.get("peft_type"), "LORA"),
        ("bias", settings.get("bias"), "none"),
    ):
        if value not in (known, None):
            raise ModelFileError(folder / CONFIG, f"{name!r} is {shown(str(value))}; supported is {known}")
    checkpoint = open_checkpoint(folder)
    try:
        tensors = checkpoint.by_name(_tensors(checkpoint, settings, h, base))
        pairs = [name for name, info in tensors.items() if name.endswith(".lora_a") and not _is_of_rows(info)]
        for target in [name.removesuffix(".lora_a") for name in pairs]:
            if target == EMBEDDING and settings.get("ensure_weight_tying") and OUTPUT not in base.tensors:
                raise ModelFileError(folder, "'ensure_weight_tying' adapts the LM head, too: merge it into its model")
            if settings.get("use_dora") and target != EMBEDDING:
                tensors |= _dora(checkpoint, tensors, target, base, h)
    except BaseException:
        checkpoint.close()
        raise
    texts = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": h.arch}
    first = checkpoint.parts[0]
    metadata = Metadata(folder / CONFIG, first.buffer, dict(texts), dict.fromkeys(texts, (ValueType.STRING, None)))
    return [replace(first, metadata=metadata, tensors=tensors), *checkpoint.parts[1:]]


def _tensors(
    checkpoint: Checkpoint, settings: Mapping[str, Any], h: Hparams, base: GGUFFile
) -> Iterator[tuple[str, TensorInfo]]:
    family = next((family for family in FAMILIES.values() if family.arch == h.arch), None)
    if family is None:
        raise ModelFileError(checkpoint.folder, f"adapters of peft are not read for {h.arch}")
    heads = {"num_attention_heads": h.n_head, "num_key_value_heads": h.n_head_kv, "num_hidden_layers": h.n_layer}
    config = Config(checkpoint.folder / CONFIG, heads)
    names = Names(config, family.names or h.arch)
    for name, stored in checkpoint.tensors.items():
        if settings.get("use_dora") and (magnitude := _MAGNITUDE.fullmatch(name)):
            target, move = _target(checkpoint, family, names, name, magnitude[1])
            if stored.dtype not in FLOATS or len(stored.shape) != 1:
                raise checkpoint.error(name, f"is {stored.dtype} of shape {stored.shape}, expected a vector of floats")
            weight = Converted((plain(stored),), config, move)
            yield f"{target}.lora_delta", tensor_info(f"{target}.lora_delta", stored.shape, "f32", weight)
            continue
        half = _HALF.fullmatch(name)
        if half is None:
            yield from _rows(checkpoint, family, names, name, settings, base, h)
            continue
        if stored.dtype not in FLOATS or len(stored.shape) != 2:
            raise checkpoint.error(name, f"is {stored.dtype} of shape {stored.shape}, expected a matrix of floats")
        module, of_embedding, which = half[1], bool(half[2]), half[3]
        of, move = _target(checkpoint, family, names, name, module)
        if which == "A":
            own = TRANSPOSED if of_embedding else None
        else:
            if 0 in stored.shape:
                raise checkpoint.error(name, f"has shape {stored.shape}, and so no numbers")
            factor = _factor(config, settings, module, rank=stored.shape[1])
            own = _times(factor) if move is None else then(_times(factor), move)
        shape = stored.shape if own is None else own.shape(stored.shape, config)
        target = f"{of}.lora_{which.lower()}"
        yield target, tensor_info(target, shape, "f32", Converted((plain(stored),), config, own))


def _rows(
    checkpoint: Checkpoint,
    family: Family,
    names: Names,
    name: str,
    settings: Mapping[str, Any],
    base: GGUFFile,
    h: Hparams,
) -> Iterator[tuple[str, TensorInfo]]:
    """The pair whose product is what a module that is trained as a whole has more than the model's: the embedding or
    the LM head (`modules_to_save`, `trainable_token_indices`), of which few rows differ."""
    match = _WHOLE.fullmatch(name)
    module = match[1] if match else name
    if match is None or not {of for of, _ in targets_of(family, names, f"{module}.weight")} & {EMBEDDING, OUTPUT}:
        problem = f"is of module {shown(module)}, trained as a whole: read are embed_tokens and lm_head alone"
        raise checkpoint.error(name, f"{problem}; merge it into its model")
    target, _ = _target(checkpoint, family, names, name, module)
    stored, info = checkpoint.tensors[name], base.tensors.get(target)
    whole = match[2] is None
    ids = list(range(len(stored.shape) and stored.shape[0])) if whole else _token_ids(checkpoint, settings, module)
    fits = info is not None and len(stored.shape) == 2 and stored.dtype in FLOATS and stored.shape[0] == len(ids)
    if info is None or not fits or stored.shape[1] != info.shape[1] or (whole and stored.shape != info.shape):
        of_model = "no such matrix" if info is None else f"one of shape {info.shape}"
        raise checkpoint.error(name, f"is {stored.dtype} of shape {stored.shape}; the model has {of_model}")
    if any(not 0 <= id < info.shape[0] for id in ids):
        raise checkpoint.error(name, f"has a row of a token beyond the model's {info.shape[0]}")
    tied = OUTPUT not in base.tensors and (settings.get("ensure_weight_tying") or not whole)
    if tied and target == EMBEDDING:
        raise checkpoint.error(name, "is of an embedding that is the LM head, too: merge it into its model")
    weight = plain(stored)
    own = numbers_of(base, check_weights(base, h), target)[ids]
    more = as_f32(weight.read(checkpoint.parts), weight.dtype) - own
    changed = np.flatnonzero((more != 0).any(1))  # NaN, too
    if len(changed) > _MOST_ROWS:
        problem = f"differs from the model's in {len(changed)} rows, of which at most {_MOST_ROWS} are read"
        raise checkpoint.error(name, f"{problem}; merge it into its model")
    if len(changed):
        which = np.zeros((info.shape[0], len(changed)), np.float32)
        which[np.array(ids)[changed], np.arange(len(changed))] = 1
        pair = (which, more[changed].T) if target == EMBEDDING else (more[changed], which)
        for half, values in zip("ab", pair, strict=True):
            of = f"{target}.lora_{half}"
            yield of, tensor_info(of, values.shape, "f32", Constant(np.ascontiguousarray(values)))


def _token_ids(checkpoint: Checkpoint, settings: Mapping[str, Any], module: str) -> list[int]:
    """Tokens whose rows are trained; peft names the module where others have some, too."""
    ids = settings.get("trainable_token_indices")
    if isinstance(ids, dict):
        ids = next((own for name, own in ids.items() if module.endswith(name)), None)
    if not isinstance(ids, list) or not all(type(id) is int for id in ids) or len(set(ids)) < len(ids):
        problem = f"'trainable_token_indices' is no list of different tokens for {shown(module)}"
        raise ModelFileError(checkpoint.folder / CONFIG, problem)
    return ids


def _is_of_rows(info: TensorInfo) -> bool:
    """True for a half of a pair of `_rows`, which DoRA has no vector for."""
    return isinstance(info.source, Constant)


def _target(checkpoint: Checkpoint, family: Family, names: Names, name: str, module: str) -> tuple[str, Move | None]:
    """The matrix of a module in GGUF, and the move of its rows."""
    targets = list(targets_of(family, names, f"{module}.weight"))
    if len(targets) != 1 or ((move := targets[0][1]) is not None and (move.counts or move.floats)):
        problem = f"is of a matrix that {family.arch} has in another form, which is not supported"
        raise checkpoint.error(name, problem)
    return targets[0]


def _dora(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], target: str, base: GGUFFile, h: Hparams
) -> dict[str, TensorInfo]:
    """B and the delta of a pair whose `lora_delta` is peft's magnitude m still: d = m / ‖W + B A‖ of each row,
    where W has the model's own numbers (Liu et al., 2024)."""
    infos = {part: tensors.get(f"{target}.lora_{part}") for part in ("a", "b", "delta")}
    weight = base.tensors.get(target)
    fits = weight is not None and len(weight.shape) == 2 and all(infos.values())
    arrays = {
        part: info.source.read(info, checkpoint.parts).view(np.float32).reshape(info.shape)
        for part, info in infos.items()
        if info is not None and info.source is not None
    }
    sizes = [size for part in ("b", "a") if part in arrays for size in arrays[part].shape]
    if weight is None or not fits or (sizes[0], sizes[3]) != weight.shape or sizes[1] != sizes[2]:
        problem = f"DoRA of {shown(target)} has not a pair and a vector that fit a matrix of the model"
        raise ModelFileError(checkpoint.folder, problem)
    a, b, m = arrays["a"], arrays["b"], arrays["delta"]
    with np.errstate(over="ignore", invalid="ignore"):  # whoever reads the adapter refuses what is not finite
        whole = numbers_of(base, check_weights(base, h), target) + b @ a
        norm = np.sqrt(np.square(whole, dtype=np.float64).sum(1))
        if m.shape != norm.shape or not norm.all():
            raise ModelFileError(checkpoint.folder, f"DoRA of {shown(target)} has {m.size} norms for {norm.size} rows")
        d = np.where(np.isfinite(norm), m / norm, np.nan)
        new = {"b": d[:, None] * b, "delta": d - 1}
        constants = {f"{target}.lora_{part}": Constant(values.astype(np.float32)) for part, values in new.items()}
    return {name: tensor_info(name, source.values.shape, "f32", source) for name, source in constants.items()}


def _times(factor: float) -> Move:
    def of(array: Array, _: Config) -> Array:
        with np.errstate(over="ignore"):  # whoever reads the adapter refuses what is not finite
            return array * np.float32(factor)

    return Move(of, counts=True)


def _factor(config: Config, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r of a module, with rsLoRA alpha / √r; `alpha_pattern` has other alphas by the ends of names."""
    alpha: object = settings.get("lora_alpha", rank)
    patterns = settings.get("alpha_pattern") or {}
    for pattern, other in patterns.items() if isinstance(patterns, dict) else ():
        try:
            alpha = other if re.fullmatch(rf"(.*\.)?({pattern})", module) else alpha
        except re.error:
            raise config.error("alpha_pattern", f"has {shown(pattern)}, no regular expression") from None
    number = Config(config.path, {"lora_alpha": alpha}).number("lora_alpha")
    return number / (math.sqrt(rank) if settings.get("use_rslora") else rank)
