"""Quantization presets: the type of each tensor of a file of llama.cpp's types, such as Q4_K_M.

Embedding and output, and in the mixtures values and down-projections of some layers, get more bits than the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import FILE_TYPES
from logitless.models.quantization.quantize import DTYPES, block_of

# name of a preset → type of most of its matrices
PRESETS = {name: name.lower() for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")}
PRESETS |= {name: name[:4].lower() for name in ("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M")}
PRESETS |= {"Q5_K_S": "q5_k", "Q5_K_M": "q5_k", "IQ4_NL": "iq4_nl", "IQ4_XS": "iq4_xs", "MXFP4_MOE": "mxfp4"}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_NUMBERS = {name: number for number, name in FILE_TYPES.items()}
_NEVER = re.compile(  # small, or read one by one
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d"
    r"|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|time_mix_(first|w[012]|v[012]|a[012]|g[12])\.weight"
    r"|time_mix_(decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight|\.position_embd|sam\.(pos_embd|neck\.|net_)"
    r"|(\.|output_)hc_\w+\.weight|indexer_compressor_\w+\.weight|attn_compressor_ape\.weight"
    r"|\.rel_pos|\.patch_(embd|merger)|a\.rvq\.codebook|mm\.a\.code_embd|^(position_embd|token_types)\.weight$"
)
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_OUTPUT = "output.weight"
_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")


class PresetError(ValueError):
    """A type that is unknown or not written here, or a pattern that is none."""


@dataclass(frozen=True)
class TypeOptions:
    """Types that are asked for by tensor; the names are llama-quantize's flags."""

    pure: bool = False  # one type for all, no mixture
    leave_output_tensor: bool = False
    output_tensor_type: str = ""
    token_embedding_type: str = ""
    tensor_type: Mapping[str, str] = field(default_factory=dict)  # regular expression → type


@dataclass(frozen=True)
class _Traits:
    """Sizes of a model that its mixture depends on."""

    falcon: bool
    n_layer: int
    n_expert: int
    n_gqa: int  # query heads of a key head, in the first layer
    wide: bool  # 80 layers of grouped heads: values are an eighth of queries


def preset(name: str) -> str:
    """The preset of a name in any case. PresetError: there is none."""
    upper = name.upper()
    upper = ALIASES.get(upper, upper)
    if upper not in PRESETS:
        reason = "is not written here" if upper in _NUMBERS else "is no type of a file"
        raise PresetError(f"{name!r} {reason}; the types are {', '.join([*PRESETS, *ALIASES])}")
    return upper


def file_type(name: str) -> int:
    """`general.file_type` of a preset."""
    return _NUMBERS[name]


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """True for matrices of weights, but for small ones."""
    rows = [n for n in shape[:-1] if n > 1]
    return bool(rows) and name.endswith("weight") and not _NEVER.search(name)


def tensor_types(gguf: GGUFFile, name: str, options: TypeOptions, *, weighted: bool) -> dict[str, str]:
    """The type of each tensor of a file in a preset. `weighted`: there is an importance matrix."""
    chooser = _Chooser(gguf, name, options, weighted=weighted)
    return {name: chooser.type_of(name) for name in sorted(gguf.tensors, key=_place)}


def _place(name: str) -> tuple[int, str]:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1, name


def _traits(gguf: GGUFFile) -> _Traits:
    metadata, arch = gguf.metadata, str(gguf.metadata.get("general.architecture", ""))

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        try:
            return int(value if isinstance(value, int) else value[0])
        except (TypeError, ValueError, IndexError):
            raise ModelFileError(gguf.path, f"key '{arch}.{key}' is no number") from None

    n_head, n_layer = number("attention.head_count"), number("block_count")
    n_head_kv = number("attention.head_count_kv", n_head)
    return _Traits(
        falcon=arch == "falcon",
        n_layer=n_layer,
        n_expert=number("expert_count"),
        n_gqa=n_head // n_head_kv if n_head_kv else 0,
        wide=n_layer == 80 and n_head != n_head_kv,
    )


class _Chooser:
    """Types of tensors, which are asked for in order of layers: values and down-projections are counted."""

    def __init__(self, gguf: GGUFFile, name: str, options: TypeOptions, *, weighted: bool) -> None:
        self._gguf, self._preset, self._default, self._options = gguf, name, PRESETS[name], options
        self._weighted, self._traits = weighted, _traits(gguf)
        self._tied = _OUTPUT not in gguf.tensors
        self._n_values = sum(bool(_VALUES.search(other)) for other in gguf.tensors)
        self._values = self._downs = 0  # so many were before
        self._patterns = [(_compiled(pattern), dtype) for pattern, dtype in options.tensor_type.items()]

    def type_of(self, name: str) -> str:
        """The type that is asked for; rows may not be whole blocks of it."""
        info, options = self._gguf.tensors[name], self._options
        if not is_quantizable(name, info.shape) or (options.leave_output_tensor and name == _OUTPUT):
            return info.dtype
        if name in _EMBEDDINGS and options.token_embedding_type:
            return options.token_embedding_type
        if name == _OUTPUT and options.output_tensor_type:
            return options.output_tensor_type
        if block_of(self._default)[0] == 1:
            return self._default
        for pattern, dtype in self._patterns:
            if pattern.search(name):
                return dtype
        return self._default if options.pure else self._mixed(name, info.shape)

    def _mixed(self, name: str, shape: tuple[int, ...]) -> str:
        if name == _OUTPUT or (self._tied and name in _EMBEDDINGS):
            return self._of_output(shape)
        if self._preset == "MXFP4_MOE":
            return "mxfp4" if len(shape) > 2 else "q8_0"
        if name in _EMBEDDINGS:
            return self._default
        if _VALUES.search(name):
            self._values += 1
            return self._of_values(self._values - 1)
        if "attn_k.weight" in name:
            return "q8_0" if self._traits.n_expert == 8 else self._default
        if "attn_output.weight" in name:
            return self._of_attention_output()
        if "ffn_down" in name:
            self._downs += 1
            return self._of_down(_place(name)[0] if self._traits.n_expert > 1 else self._downs - 1)
        return self._default

    def _of_output(self, shape: tuple[int, ...]) -> str:
        if self._options.output_tensor_type:
            return self._options.output_tensor_type
        whole = shape[-1] % block_of(self._default)[0] == 0
        if self._preset == "MXFP4_MOE" or self._traits.falcon or not whole or self._default == "q8_0":
            return "q8_0"
        return "q6_k"

    def _of_values(self, i: int) -> str:
        name, grouped = self._preset, self._traits.n_gqa >= 4
        dtype = self._default
        if name == "Q2_K":
            dtype = "q4_k" if grouped else "q3_k"
        elif name == "Q2_K_S" and grouped:
            dtype = "q4_k"
        elif name == "Q3_K_M":
            dtype = "q5_k" if i < 2 else "q4_k"
        elif name == "Q3_K_L" or (name in ("IQ4_NL", "IQ4_XS") and grouped) or (name == "Q4_K_S" and i < 4):
            dtype = "q5_k"
        elif name in ("Q4_K_M", "Q5_K_M") and _has_more_bits(i, self._n_values):
            dtype = "q6_k"
        if self._traits.wide and dtype in ("q3_k", "q4_k"):
            dtype = "q5_k"
        return "q8_0" if self._traits.n_expert == 8 else dtype

    def _of_attention_output(self) -> str:
        name, falcon = self._preset, self._traits.falcon
        if falcon:
            return "q4_k" if name == "Q3_K_L" else self._default
        if self._traits.n_expert == 8:
            small = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS")
            return "q5_k" if name in small else self._default
        return {"Q2_K": "q3_k", "Q3_K_M": "q4_k", "Q3_K_L": "q5_k"}.get(name, self._default)

    def _of_down(self, i: int) -> str:
        name, falcon, n = self._preset, self._traits.falcon, self._traits.n_layer
        first, more = i < n // 8, _has_more_bits(i, n)
        if name == "Q2_K":
            return "q3_k"
        if name == "Q3_K_M":
            return "q5_k" if i < n // 16 else "q4_k" if not falcon or more else "q3_k"
        if name == "Q3_K_L":
            return "q4_k" if falcon else "q5_k"
        if name == "Q4_K_M" and falcon:
            return "q6_k" if i < n // 16 else "q5_k" if more else "q4_k"
        if name in ("Q4_K_M", "Q5_K_M"):
            return "q6_k" if more else self._default
        if not first:
            return self._default
        if (name == "Q4_K_S" and not falcon) or (name in ("IQ4_NL", "IQ4_XS") and not self._weighted):
            return "q5_k"
        in_first = {"Q2_K_S": "q4_k"} | ({"Q4_0": "q4_1", "Q5_0": "q5_1"} if self._weighted else {})
        return in_first.get(name, self._default)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PresetError(f"{pattern!r} is no regular expression: {error}") from None


def _has_more_bits(i: int, n: int) -> bool:
    """The first and the last eighth of n layers, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def check_type(name: str) -> str:
    """A tensor's type in lower case. PresetError: it is not written here."""
    if name.lower() not in DTYPES:
        raise PresetError(f"{name!r} is no type that is written here; those are {', '.join(DTYPES).upper()}")
    return name.lower()
