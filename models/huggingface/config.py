"""config.json and its neighbours: settings by name, checked where they are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.types import ValueType
from logitless.models.gguf.write import Key
from logitless.models.param import FLOAT_MAX

INDEX = "model.safetensors.index.json"
_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
    "model_dim": "hidden_size",
    "num_transformer_layers": "num_hidden_layers",
    "rope_freq_constant": "rope_theta",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "d_kv": "head_dim",
    "n_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_local_base_freq",
    "rotary_emb_base": "rope_theta",
}
_OF_WHISPER = ("d_model", "encoder_ffn_dim", "encoder_layers", "encoder_attention_heads")
_ROWS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OF_ENCODERS = (
    ("depth", "num_hidden_layers"),
    ("num_heads", "num_attention_heads"),
    *zip(_OF_WHISPER, _ROWS, strict=True),
)
_SIGLIP = {**dict(zip(_ROWS, (768, 3072, 12, 12), strict=True)), "patch_size": 16, "image_size": 224}
_CLIP = {**_SIGLIP, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"}
# Settings of a part of a model that transformers leaves out where they are its own, by `model_type`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**dict(zip(_ROWS, (4096, 11008, 32, 32), strict=True)), "vocab_size": 32000, "rms_norm_eps": 1e-6},
    "mistral": {
        **dict(zip(_ROWS, (4096, 14336, 32, 32), strict=True)),
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
    },
    "qwen2": {**dict(zip(_ROWS, (4096, 22016, 32, 32), strict=True)), "vocab_size": 151936, "rms_norm_eps": 1e-6},
    "gemma3_text": {
        **dict(zip(_ROWS, (2304, 9216, 26, 8), strict=True)),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "clip_vision_model": _CLIP,
    "qwen2_audio_encoder": dict(zip(_OF_WHISPER, (1280, 5120, 32, 20), strict=True)),
    "voxtral_encoder": dict(zip(_ROWS, (1280, 5120, 32, 20), strict=True)),
    "siglip_vision_model": _SIGLIP,
    "siglip2_vision_model": _SIGLIP,
    "idefics3": {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
    "gemma3n_vision": {**dict(zip(_ROWS, (2048, 8192, 128, 8), strict=True)), "image_size": 768, "patch_size": 3},
    "pixtral": {
        **dict(zip(_ROWS, (1024, 4096, 24, 16), strict=True)),
        "patch_size": 16,
        "image_size": 1024,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
    },
}
_ROOM = {ValueType.UINT32: (0, 1 << 32), ValueType.INT32: (-1 << 31, 1 << 31)}
_MOST_OF_HEAD = 1 << 16
_MOST_BYTES = 1 << 28  # of one JSON file


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file. ModelFileError: it is none."""
    try:
        status = path.stat()
        if stat.S_ISFIFO(status.st_mode):  # opening it would wait for a writer
            raise ModelFileError(path, "is not a regular file")
        if status.st_size > _MOST_BYTES:
            raise ModelFileError(path, f"is larger than {_MOST_BYTES} bytes")
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(path, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, "is no JSON object")
    return value


def repository_name(folder: Path) -> str:
    """The folder's name; of a snapshot in the hub's cache that of the repository."""
    folder = folder.absolute()
    return folder.parent.parent.name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def is_folder(path: Path) -> bool:
    """True for a folder with a model's configuration and all of its weights."""
    try:
        files = read_json(path / INDEX).get("weight_map") if (path / "config.json").is_file() else None
    except ModelFileError:
        return False
    if isinstance(files, dict):
        return all(isinstance(file, str) and os.path.exists(path / file) for file in files.values())
    return (path / "config.json").is_file() and next(path.glob("*.safetensors"), None) is not None


@dataclass(frozen=True)
class Config:
    """Settings of a model's text part. Other names of one setting may follow the first."""

    path: Path  # of config.json
    values: Mapping[str, Any]
    rope: Mapping[str, Any] = field(default_factory=dict)  # of full attention: rope_type, rope_theta, factor …
    rope_local: Mapping[str, Any] = field(default_factory=dict)  # of sliding-window layers, where it differs

    @classmethod
    def read(cls, folder: Path) -> Config:
        path = folder / "config.json"
        whole = read_json(path)
        inner = whole.get("text_config", whole.get("llm_config"))  # the latter is InternVL's
        values = {**whole, **_with_defaults(inner)} if isinstance(inner, dict) else whole
        values["architectures"] = whole.get("architectures")
        for name, proper in _OTHER_NAMES.items():
            if values.get(proper) is None and values.get(name) is not None:
                values[proper] = values[name]
        layers = values.get("layers_block_type")  # of Nemotron H, which has no count beside them
        if isinstance(layers, list):
            values.setdefault("num_hidden_layers", len(layers))
        return cls(path, values, *_rope(path, values))

    def part(self, name: str) -> Config:
        """Settings in an object of that name; none where there is none."""
        inner = self.get(name, default={})
        if not isinstance(inner, dict):
            raise self.error(name, "is no object")
        return Config(self.path, inner)

    @classmethod
    def of_vision(cls, whole: Config, part: str = "vision_config") -> Config:
        """Settings of a model's encoder of images or sounds."""
        values = _with_defaults(whole.part(part).values)
        for name, proper in _OF_ENCODERS:
            if values.get(proper) is None:
                values[proper] = values.get(name)
        return cls(whole.path, values)

    def error(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(self.path, f"{name!r} {problem}")

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these settings that is not null."""
        return next((value for name in names if (value := self.values.get(name)) is not None), default)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self.get(*names, default=default)
        if value is None:
            raise self.error(names[0], "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.error(names[0], f"is {shown(str(value))}, not a count")
        return value

    def number(self, *names: str, default: float | None = None, of: Mapping[str, Any] | None = None) -> float:
        value = self.get(*names, default=default) if of is None else of.get(names[0], default)
        if not _is_float(value):
            why = "beyond 32-bit floats" if type(value) in (int, float) else "not a number"
            raise self.error(names[0], "is missing" if value is None else f"is {shown(str(value))}, {why}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.error(name, "is neither true nor false")
        return value

    def require(self, **supported: Any) -> None:
        """ModelFileError: a setting is there, and not the supported one."""
        for name, value in supported.items():
            if self.get(name, default=value) != value:
                text = str(value).lower() if isinstance(value, bool) else value
                raise self.error(name, f"is not {text}, the supported one")

    def items(self, name: str) -> list[Any]:
        """A list; [] where there is none."""
        value = self.get(name, default=[])
        if not isinstance(value, list):
            raise self.error(name, "is no list")
        return value

    def numbers(self, name: str, of: Mapping[str, Any] | None = None) -> list[float]:
        """A list of numbers; [] where there is none."""
        values = self.items(name) if of is None else of.get(name)
        if not isinstance(values, list) or not all(map(_is_float, values)):
            raise self.error(name, "is no list of numbers")
        return values

    def checked(self, keys: dict[str, Key]) -> dict[str, Key]:
        """The keys. ModelFileError: the settings make a count for which GGUF has no room."""
        for name, key in keys.items():
            kind, values = (key.type, [key.value]) if key.item is None else (key.item, key.value)
            if kind in _ROOM and (odd := [n for n in values if not _ROOM[kind][0] <= n < _ROOM[kind][1]]):
                raise ModelFileError(self.path, f"makes the key '{name}' {odd[0]:.6g}, which is no possible size")
        return keys

    @property
    def head_dim(self) -> int:
        n_head = self.count("num_attention_heads", default=0)
        size = self.count("head_dim", default=self.count("hidden_size") // max(1, n_head)) if n_head else 0
        if size > _MOST_OF_HEAD:
            raise self.error("head_dim" if "head_dim" in self else "hidden_size", f"makes heads of {size} numbers")
        return size


def _with_defaults(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**_DEFAULTS.get(str(part.get("model_type")), {}), **part}


def _is_float(value: object) -> bool:
    """True for a number that f32 has, too."""
    return type(value) in (int, float) and -FLOAT_MAX <= value <= FLOAT_MAX  # type: ignore[operator]


def _rope(path: Path, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE settings in the form of transformers 5, of full and of local attention. Version 4 has `rope_theta` and
    `rope_scaling` beside each other."""
    rope = values.get("rope_parameters")
    if rope is None:
        scaling = values.get("rope_scaling") or {}
        rope = {"rope_theta": values.get("rope_theta", 10000.0)}
        rope |= scaling if isinstance(scaling, dict) else {}
        local = {"rope_theta": values["rope_local_base_freq"]} if values.get("rope_local_base_freq") else {}
    elif isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        local = rope.get("sliding_attention") or {}
        rope = rope["full_attention"]
    elif isinstance(rope, dict) and isinstance(rope.get("compress"), dict):  # DeepSeek V4's, of layers with blocks
        kind = rope["compress"].get("rope_type", "default")
        main = rope.get("main") or {}
        rope, local = ({**rope["compress"], **main, "rope_type": kind} if isinstance(main, dict) else main), {}
    else:
        local = {}
    if not isinstance(rope, dict) or not isinstance(local, dict):
        raise ModelFileError(path, "'rope_parameters' is no object")
    rope = {"rope_theta": 10000.0, **{key: value for key, value in rope.items() if value is not None}}
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope, local
