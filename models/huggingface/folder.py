"""A Hugging Face folder as the parts of a GGUF file: metadata by GGUF's keys, tensors by GGUF's names.

Numbers are read, and moved where the formats differ, when a tensor's bytes are asked for."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.architectures.registry import ARCHITECTURES
from logitless.models.errors import ModelFileError, shown, unsupported
from logitless.models.gguf.metadata import Metadata
from logitless.models.gguf.parse import Part, TensorInfo
from logitless.models.gguf.types import FILE_TYPES, TENSOR_TYPES, ValueType
from logitless.models.gguf.write import Key, f32, text, u32
from logitless.models.hparams.keys import MAX_LAYERS
from logitless.models.huggingface.checkpoint import FLOATS, Checkpoint, Weight, as_f32, of_f32, open_checkpoint, plain
from logitless.models.huggingface.companions import check_companions
from logitless.models.huggingface.config import Config, read_json, repository_name
from logitless.models.huggingface.families.family import Family, made_of
from logitless.models.huggingface.families.keys import common_keys, gemma4_far, has_experts
from logitless.models.huggingface.families.rows import FAMILIES
from logitless.models.huggingface.moves import Move
from logitless.models.huggingface.quantized import weights_of
from logitless.models.huggingface.safetensors import read_safetensors
from logitless.models.huggingface.tokens.vocabulary import vocabulary_keys
from logitless.models.huggingface.visions import OF_IMAGES, OF_SOUNDS, WHOLE, vision_of

log = logging.getLogger(__name__)
_EXPERT = re.compile(r"(.+\.(?:experts|lerp)|.*altup_(?:unembed_)?projections)\.(\d+)\.(.+)")
_LAYER = re.compile(r"\.(?:layers?|h|blocks?)\.(\d+)\.")
_ENCODERS = re.compile(r"^(bert|roberta|nomic_bert|model)\.")
_POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}  # of sentence-transformers; numbers are GGUF's
_DENSE = {"2_Dense": "dense_2", "3_Dense": "dense_3"}  # modules of sentence-transformers that GGUF names
_PREFIXES = ("model.language_model.", "model.text_model.", "language_model.model.", "language_model.")
_OTHERS = ("embed_audio", "mm_projector", "speech_embeddings", "audio_encoder", "mtp")
_OTHER_PARTS = re.compile(rf"(?:^|\.)({'|'.join(dict.fromkeys((*OF_IMAGES, *OF_SOUNDS, *_OTHERS)))})(?:\.|$)")
# Names of blocks that predict one token more: Qwen's, and those of them all in GGUF.
_MTP_LAYER = re.compile(r"(?:model\.)?mtp\.layers\.(\d+)\.(.+)")
_MTP_PARTS = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|embed_tokens|shared_head\.(?:head|norm))\.weight")
_WITH_HEAD = re.compile(r"(?:ForCausalLM|ForConditionalGeneration|LMHeadModel)$")
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
_RENAMED = (
    (".parametrizations.weight.original", ".weight"),
    (".dt_bias", ".dt_proj.bias"),
    (".e_score_correction_bias", ".e_score_correction.bias"),
)
_SMALL = re.compile(
    r"_norm\.|ffn_gate_inp\.|conv1d\.|shortconv\.conv\.|ssm_[ad]$|token_types\.|position_embd\.|rope_"
    r"|time_mix_(?!key|value|receptance|gate\.|output)|channel_mix_lerp|hc_|_ape\."
)
_SAMPLING = (("temperature", "temp"), ("top_p", "top_p"), ("min_p", "min_p"), ("repetition_penalty", "penalty_repeat"))
_FILE_TYPES = {name.lower(): number for number, name in FILE_TYPES.items()}
_BLOCKS = {kind.name.lower(): kind for kind in TENSOR_TYPES.values()}


def read_folder(folder: Path) -> list[Part]:
    """The folder's files; the first has all metadata and tensors. ModelFileError: one is missing, damaged or of a
    model that is not supported."""
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise ModelFileError(folder, "is an adapter of peft, not a model: give its base model, and this as --lora")
    if not (folder / "config.json").exists():
        names = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; name its file {names[0]}" if names else ""
        raise ModelFileError(folder, f"is a directory without config.json, so no Hugging Face model{hint}")
    config = Config.read(folder)
    family = family_of(config)
    checkpoint = open_checkpoint(folder)
    try:
        unsorted = checkpoint.by_name(_tensors(config, family, checkpoint))
        tensors = {name: unsorted[name] for name in sorted(unsorted, key=_place)}
        keys = _keys(config, family, tensors) | _numbers(config, family, checkpoint)
        _check_complete(config, family, tensors)
        tensors |= dict(_dense_layers(config, family, checkpoint, keys))
    except BaseException:
        checkpoint.close()
        raise
    values = {n: float(np.float32(k.value)) if k.type is ValueType.FLOAT32 else k.value for n, k in keys.items()}
    types = {name: (key.type, key.item) for name, key in keys.items()}
    first = checkpoint.parts[0]
    metadata = Metadata(config.path, first.buffer, values, types)
    return [replace(first, metadata=metadata, tensors=tensors), *checkpoint.parts[1:]]


def _check_complete(config: Config, family: Family, tensors: dict[str, TensorInfo]) -> None:
    """ModelFileError: a tensor is missing that GGUF's architecture may lack, and this model may not."""
    folder = config.path.parent
    for name in family.required:
        if name not in tensors:
            raise ModelFileError(folder, f"no safetensors file has the classifier's tensor {name}")
    check_companions(config, family, tensors)
    is_whole = not any(True for _ in _pooling(config)) and any(
        map(_WITH_HEAD.search, map(str, config.items("architectures")))
    )
    tied = [of.get("tie_word_embeddings") for of in (config, read_json(config.path))]  # a whole model may have its own
    if False in tied and True not in tied and is_whole and "output.weight" not in tensors:
        problem = "tensor 'lm_head.weight' is missing, and config.json says \"tie_word_embeddings\": false"
        raise ModelFileError(folder, f"{problem}: download all files, or set it to true to use the embedding's matrix")


def family_of(config: Config) -> Family:
    """The row of a model's architecture. ModelFileError: it is not supported."""
    names = [name for name in config.items("architectures") if isinstance(name, str)]
    for name in names:
        if name in WHOLE and name not in FAMILIES:
            kind = str(config.get("model_type")).replace("_", "")
            by_kind = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
            if kind not in by_kind:
                raise ModelFileError(config.path, unsupported(f"text model of {name}", kind, FAMILIES))
            name = by_kind[kind]
        if name in FAMILIES:
            kind = "adapters" if "lora_adaptations" in config else "experts" if has_experts(config) else ""
            return FAMILIES.get(f"{name} of {kind}", FAMILIES[name])
    if not names:
        raise config.error("architectures", "is missing, so the model's architecture is unknown")
    raise ModelFileError(config.path, unsupported("Hugging Face architecture", names[0], FAMILIES))


def _place(name: str) -> tuple[int, str]:
    layer = re.match(r"blk\.(\d+)\.", name)
    return (int(layer[1]) + 1 if layer else 0), name


def _keys(config: Config, family: Family, tensors: dict[str, TensorInfo]) -> dict[str, Key]:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(config.path.parent, "no safetensors file has the token embedding")
    matrices = [info for info in tensors.values() if len(info.shape) > 1]
    most = max({info.dtype for info in matrices}, key=lambda t: sum(i.nbytes for i in matrices if i.dtype == t))
    keys = {
        "general.architecture": text(family.arch),
        "general.type": text("model"),
        "general.name": text(repository_name(config.path.parent)),
        "general.file_type": u32(_FILE_TYPES.get(most, 1)),
    }
    n_mtp = sum(name.endswith(".nextn.eh_proj.weight") for name in tensors)
    config = replace(config, values={**config.values, "num_nextn_predict_layers": n_mtp})  # some do not name them
    own = dict(common_keys(config, ARCHITECTURES[family.arch].norm.layer_norm)) | dict(family.keys(config))
    own |= dict(_pooling(config))
    if n_mtp:
        own["block_count"] = u32(config.count("num_hidden_layers") + n_mtp)
        own["nextn_predict_layers"] = u32(n_mtp)
    keys |= {name if name.startswith("tokenizer.") else f"{family.arch}.{name}": key for name, key in own.items()}
    return config.checked(keys) | sampling_keys(config) | vocabulary_keys(config, embedding.shape[0])


def _numbers(config: Config, family: Family, checkpoint: Checkpoint) -> dict[str, Key]:
    """Keys of numbers that the folder has as a tensor of each layer."""
    keys, n = {}, config.count("num_hidden_layers") if family.numbers else 0
    for end, key in family.numbers:
        values = np.zeros(n)
        for i in range(n):
            name = f"model.layers.{i}.mlp.{end}"
            stored = checkpoint.tensors.get(name)
            if stored is None or stored.dtype not in FLOATS or math.prod(stored.shape) != 1:
                raise checkpoint.error(name, "is missing, or not one number")
            weight = plain(stored)
            values[i] = as_f32(weight.read(checkpoint.parts), weight.dtype).item()
        keys[key] = Key(values.astype(np.float32), ValueType.ARRAY, ValueType.FLOAT32)
    return keys


def _pooling(config: Config) -> Iterator[tuple[str, Key]]:
    """The kind of pooling: of a classifier, or by the files of sentence-transformers."""
    if any(str(name).endswith("ForSequenceClassification") for name in config.items("architectures")):
        yield "pooling_type", u32(4)
        return
    path = config.path.with_name("1_Pooling") / "config.json"
    settings = read_json(path)
    named = settings.get("pooling_mode")
    kinds = [str(named)] if named else [n.removeprefix("pooling_mode_") for n, yes in settings.items() if yes is True]
    kinds = [kind.removesuffix("_token").removesuffix("_tokens") for kind in kinds if kind != "include_prompt"]
    if len(kinds) == 1 and kinds[0] in _POOLINGS:
        yield "pooling_type", u32(_POOLINGS[kinds[0]])
    elif kinds:
        raise ModelFileError(path, f"has the pooling {shown(', '.join(kinds))}; supported are {', '.join(_POOLINGS)}")


def _dense_layers(
    config: Config, family: Family, checkpoint: Checkpoint, keys: dict[str, Key]
) -> Iterator[tuple[str, TensorInfo]]:
    """The matrices of sentence-transformers behind the pooling, whose sizes become keys. ModelFileError: a module that
    is not supported."""
    if "ForSequenceClassification" in str(config.get("architectures")):
        return
    folder = config.path.parent
    modules = sorted(path.parent.name for path in folder.glob("[1-9]_*/config.json"))
    for module in [name for name in modules if name[2:] not in ("Pooling", "Normalize")]:
        settings = Config(folder / module / "config.json", read_json(folder / module / "config.json"))
        known = module in _DENSE and ARCHITECTURES[family.arch].dense_embeddings
        plainly = str(settings.get("activation_function")).endswith(".Identity") and not settings.flag("bias")
        if not known or not plainly:
            problem = f"has the module {shown(module)} of sentence-transformers, which is not supported"
            raise ModelFileError(folder, problem)
        part, stored = read_safetensors(folder / module / "model.safetensors", len(checkpoint.parts))
        checkpoint.parts.append(part)
        if set(stored) != {"linear.weight"} or stored["linear.weight"].dtype not in FLOATS:
            raise ModelFileError(part.path, "is not one matrix of floats, linear.weight")
        weight, name = plain(stored["linear.weight"]), _DENSE[module]
        sizes = settings.count("out_features"), settings.count("in_features")
        if weight.shape != sizes:
            raise ModelFileError(part.path, f"has linear.weight of shape {weight.shape}, config.json says {sizes}")
        for which, size in zip(("out", "in"), sizes, strict=True):
            keys[f"{family.arch}.{name}_feat_{which}"] = u32(size)
        yield f"{name}.weight", tensor_info(f"{name}.weight", sizes, weight.dtype, Converted((weight,), config))


def sampling_keys(config: Config) -> dict[str, Key]:
    """The default sampling of generation_config.json, by llama.cpp's keys. Its penalty is of all tokens."""
    path = config.path.with_name("generation_config.json")
    own, keys = Config(path, read_json(path)), dict[str, Key]()
    for name, key in _SAMPLING:
        if name in own:
            keys[f"general.sampling.{key}"] = f32(own.number(name))
    if "top_k" in own:
        if (k := own.number("top_k")) != int(k) or abs(k) >= 1 << 31:
            raise own.error("top_k", f"is {k:g}, not a count")
        keys["general.sampling.top_k"] = Key(int(k), ValueType.INT32)
    if "repetition_penalty" in own:
        keys["general.sampling.penalty_last_n"] = Key(-1, ValueType.INT32)
    return keys


@dataclass(frozen=True)
class Converted:
    """A GGUF tensor that is made of weights: several are stacked (experts), then moved."""

    weights: tuple[Weight, ...]
    config: Config
    move: Move | None = None

    def read(self, info: TensorInfo, parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
        """The tensor's bytes."""
        before, move = self.weights[0].dtype, self.move
        arrays = [weight.read(parts) for weight in self.weights]
        array = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        counts = info.dtype != before or (move is not None and move.counts)
        if counts and before != "f32":
            array = as_f32(array, before)
        if move is not None:
            try:
                array = move.of(array, self.config)
            except (ValueError, IndexError, ZeroDivisionError):
                array = array[:0]
        if counts and info.dtype != "f32":
            array = of_f32(array, info.dtype)
        if array.nbytes != info.nbytes:
            problem = f"has sizes that do not fit tensor {shown(info.name)} of shape {info.shape}"
            raise ModelFileError(self.config.path, problem)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def stored(self, info: TensorInfo, parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
        """The bytes of the first weight's numbers in their file."""
        return self.weights[0].sources[0].raw(parts)


@dataclass(frozen=True)
class Constant:
    """A tensor that follows from the configuration."""

    values: npt.NDArray[np.float32]

    def read(self, info: TensorInfo, parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
        """The tensor's bytes."""
        return self.values.view(np.uint8)

    def stored(self, info: TensorInfo, parts: Sequence[Part]) -> npt.NDArray[np.uint8]:
        """All bytes."""
        return self.values.view(np.uint8)


def _tensors(config: Config, family: Family, checkpoint: Checkpoint) -> Iterator[tuple[str, TensorInfo]]:
    names, weights = Names(config, family.names or family.arch), weights_of(checkpoint, config)
    stacks = _stacks(checkpoint, {family.name_of(name): weight for name, weight in weights.items()})
    if family.mtp:
        stacks = names.with_mtp(stacks)
    tied = config.get("tie_word_embeddings")
    others, images = set[str](), vision_of(config)
    own_names = {target for _, targets in family.splits for target, _ in made_of(targets)}
    for name, group in stacks.items():
        if family.unused and re.search(family.unused, name):
            continue
        if _BUFFERS.search(name) or (name.endswith("lm_head.weight") and (tied is True or not names.has_output)):
            continue
        if (other := _OTHER_PARTS.search(name)) or names.is_mtp(name):
            part = other[1] if other else "mtp"
            if images is None or part not in images.parts:
                others.add(part)
            continue
        targets = list(targets_of(family, names, name))
        if not targets:
            raise checkpoint.error(name, f"is unknown in {family.arch}, of {config.count('num_hidden_layers')} layers")
        if len({(weight.dtype, weight.shape) for weight in group}) > 1:
            raise checkpoint.error(name, "has experts of different types or shapes")
        before = group[0].shape if len(group) == 1 else (len(group), *group[0].shape)
        if not before:
            raise checkpoint.error(name, "is one number without a dimension")
        for target, move in targets:
            try:
                shape = before if move is None else move.shape(before, config)
            except IndexError:
                raise checkpoint.error(name, f"has {len(before)} dimensions, which no {target} has") from None
            except ValueError as error:
                raise checkpoint.error(name, str(error)) from None
            small = len(before) < 2 or _SMALL.search(target) is not None
            own = tuple(group)
            scale = target.removesuffix(".weight") + ".scale"
            other_scale = scale.partition(".")[2].partition(".")[2] in own_names  # Gemma 4's experts
            if small or other_scale or (move is not None and (move.floats or move.counts)):
                own = tuple(weight.floats or weight for weight in group)
            dtype = "f32" if small else own[0].dtype
            yield target, tensor_info(target, shape, dtype, Converted(own, config, move))
            if scales := tuple(weight.scale for weight in own if weight.scale is not None):
                yield scale, tensor_info(scale, (len(scales),), "f32", Converted(scales, config))
    if others:
        log.warning("%s: the text model alone is read, not %s", checkpoint.folder, ", ".join(sorted(others)))
    yield from rope_factors(config)


def targets_of(family: Family, names: Names, name: str) -> Iterator[tuple[str, Move | None]]:
    """GGUF names of the tensors that are made of one, with their moves."""
    name = family.name_of(name)
    for pattern, own in family.splits:
        if match := re.search(pattern, name):
            layer = _LAYER.search(f".{name}")
            prefix = f"blk.{layer[1]}." if layer else ""
            yield from ((prefix + match.expand(target), move) for target, move in made_of(own))
            return
    if (target := names.of(name)) is not None:
        yield target, next((move for end, move in family.moves if re.search(f"(^|[._]){end}$", target)), None)


def _stacks(checkpoint: Checkpoint, weights: dict[str, Weight]) -> dict[str, list[Weight]]:
    """Weights by name; those of experts together, in order."""
    stacks: dict[str, list[Weight]] = {}
    experts: dict[str, dict[int, Weight]] = {}
    for name, weight in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            stacks[name] = [weight]
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weight
    for name, by_number in experts.items():
        missing = next((i for i in range(len(by_number)) if i not in by_number), None)
        if missing is not None:
            kind = "expert" if ".experts." in name else "part"
            raise ModelFileError(checkpoint.folder, f"tensor {shown(name)} has no {kind} {missing}")
        stacks[name] = [by_number[i] for i in range(len(by_number))]
    return stacks


def tensor_info(name: str, shape: tuple[int, ...], dtype: str, source: Converted | Constant) -> TensorInfo:
    """A tensor that is read by its source."""
    kind = _BLOCKS[dtype]
    return TensorInfo(name, shape, dtype, 0, math.prod(shape) // kind.block * kind.nbytes, source=source)


class Names:
    """Names of tensors in GGUF, by the gguf package's map."""

    def __init__(self, config: Config, arch: str) -> None:
        from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
        if arch not in kinds:
            raise ModelFileError(config.path, f"the installed package gguf does not know {arch}: update it")
        assert isinstance(kinds[arch], MODEL_ARCH)
        self._map = get_tensor_name_map(kinds[arch], 1)  # of one layer, which stands for all
        self._n_layers = config.count("num_hidden_layers")
        if self._n_layers > MAX_LAYERS:
            raise config.error("num_hidden_layers", f"is {self._n_layers}; at most {MAX_LAYERS} are supported")
        self._n_mtp = config.count("num_nextn_predict_layers", default=0)  # left out of the network, unless with_mtp
        self.has_output = self._map.get_name("lm_head") is not None

    def is_mtp(self, name: str) -> bool:
        """True for a tensor of a block that predicts one token more, and is left out."""
        layer = _LAYER.search(f".{name}")
        return layer is not None and self._n_layers <= int(layer[1]) < self._n_layers + self._n_mtp

    def with_mtp(self, stacks: dict[str, list[Weight]]) -> dict[str, list[Weight]]:
        """Stacks with the MTP blocks under the names of layers behind the last one, as tensors of the network."""
        first = f"model.layers.{self._n_layers}."

        def as_layer(name: str) -> str:
            if block := _MTP_LAYER.fullmatch(name):
                return f"model.layers.{self._n_layers + int(block[1])}.{block[2]}"
            part = _MTP_PARTS.get(name.removeprefix("model.").removesuffix(".weight"))
            return name if part is None else f"{first}{part}.weight"

        stacks = {as_layer(name): group for name, group in stacks.items()}
        n = sum(name.endswith(".eh_proj.weight") for name in stacks)
        self._n_layers, self._n_mtp = self._n_layers + n, self._n_mtp - n
        return stacks

    def of(self, name: str) -> str | None:
        """The GGUF name; None: it has none."""
        for end, new in _RENAMED:
            if name.endswith(end):
                name = name.removesuffix(end) + new
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix).removeprefix("model.")
                break
        name = name.removeprefix("model.") if name.startswith("model.lm_head") else name
        if nextn := _NEXTN.fullmatch(name):
            return f"blk.{nextn[1]}.nextn.{nextn[2].replace('.', '_')}.weight"
        bare = _ENCODERS.sub("", name)
        forms = (name, bare, f"model.{name}", f"transformer.{name}", name.removeprefix("transformer."))
        return next((target for form in forms if (target := self._mapped(form)) is not None), None)

    def _mapped(self, name: str) -> str | None:
        layer = _LAYER.search(f".{name}")
        if layer is None:
            return self._map.get_name(name, (".weight", ".bias"))
        if int(layer[1]) >= self._n_layers:
            return None
        start, stop = layer.span(1)
        target = self._map.get_name(f"{name[: start - 1]}0{name[stop - 1 :]}", (".weight", ".bias"))
        return None if target is None else target.replace("blk.0.", f"blk.{layer[1]}.", 1)


def rope_factors(config: Config) -> Iterator[tuple[str, TensorInfo]]:
    """Llama 3's and LongRoPE's factors of each frequency."""
    rope, kind, size = config.rope, config.rope["rope_type"], config.head_dim
    if kind == "llama3":
        factor, low, high, before = (
            config.number(name, of=rope)
            for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        base = config.number("rope_theta", of=rope)
        if min(base, factor, before, high - low) <= 0:
            raise config.error("rope_parameters", "has a number of llama3 that is not positive, or no range of factors")
        waves = 2 * np.pi * base ** (np.arange(0, size, 2) / size)
        smooth = np.clip((before / waves - low) / (high - low), 0, 1)
        yield _factors("rope_freqs.weight", 1 / ((1 - smooth) / factor + smooth))
    elif kind in ("longrope", "su"):
        for which in ("long", "short"):
            values = config.numbers(f"{which}_factor", of=rope)
            yield _factors(f"rope_factors_{which}.weight", np.array(values))
    elif kind == "proportional":  # the first frequencies of full attention turn, the others stand
        size, _ = gemma4_far(config)
        n = int(config.number("partial_rotary_factor", default=1.0, of=rope) * size // 2)
        yield _factors("rope_freqs.weight", np.where(np.arange(size // 2) < n, 1.0, 1e30))


def _factors(name: str, values: npt.NDArray[Any]) -> tuple[str, TensorInfo]:
    return name, tensor_info(name, values.shape, "f32", Constant(values.astype(np.float32)))
