"""Quantized checkpoints: weights of few bits with their scales, as blocks of GGUF's types where they have the form.

4-bit codes with a scale for each group of columns become Q4_0 (codes around 8: the numbers stay the same, but for
scales that f16 rounds) or Q4_1 (with zero points, whose product with the scale is rounded to f16); 8-bit codes become
Q8_0, BitNet's ternary ones TQ2_0, MXFP4 and NVFP4 stay what they are. 8-bit floats and bitsandbytes' 4 bits become
BF16, and GPTQ's weights in another order of columns F16."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from logitless.models.errors import ModelFileError
from logitless.models.gguf.parse import Part
from logitless.models.huggingface.checkpoint import (
    FLOATS,
    Array,
    Checkpoint,
    Weight,
    as_f32,
    of_f32,
    plain,
    whole_numbers,
)
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.safetensors import Stored

log = logging.getLogger("logitless.huggingface")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the eight codes in a number of 32 bits
_UNUSED = (".input_scale", ".weight_shape", ".k_scale", ".v_scale", ".q_scale", ".input_global_scale", ".bias_scale")
_METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "compressed-tensors", "mxfp4", "bitsandbytes", "modelopt", "bitnet")
_MOST_F16 = 65504
_OF_BITNET = {"linear_class": ("bitlinear", "autobitlinear"), "quantization_mode": ("offline", "online")}
_PARTS = (
    *("qzeros", "scales", "g_idx", "weight_zero_point", "weight_g_idx", "weight_scale_2", "weight_global_scale"),
    *("weight_scale", "weight_scale_inv", "SCB", "weight_format"),
)
_FLOATS = ("F32", "F16", "BF16")
U8 = npt.NDArray[np.uint8]


def weights_of(checkpoint: Checkpoint, config: Config) -> dict[str, Weight]:
    """Weights by name. ModelFileError: a type or method that is not supported."""
    settings = config.get("quantization_config", "compression_config", default={})
    if not settings and "BitnetForCausalLM" in config.items("architectures"):  # of 1bitLLM, rounded when it is used
        settings = {"quant_method": "bitnet", "quantization_mode": "online"}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if settings and method not in _METHODS:
        supported = f"supported are {', '.join(_METHODS)}"
        raise config.error("quantization_config", f"has the method {method!r}, which is not supported; {supported}")
    reader = _Reader(checkpoint, config, method, settings if isinstance(settings, dict) else {})
    weights: dict[str, Weight] = {}
    for name in checkpoint.tensors:
        try:
            weights |= reader.weights(name)
        except ModelFileError:
            raise
        except (IndexError, ValueError):
            raise checkpoint.error(name, "has parts of shapes that do not belong together") from None
    return weights


class _State(Struct):
    """Form of a weight of bitsandbytes."""

    shape: tuple[int, ...]
    blocksize: int
    nested_blocksize: Annotated[int, Meta(ge=1)] = 256
    nested_offset: float = 0.0


class _Reader:
    """Weights of a checkpoint; their scales and zero points belong to them and are no weights."""

    def __init__(self, checkpoint: Checkpoint, config: Config, method: str | None, settings: dict[str, Any]) -> None:
        self._checkpoint, self._config, self._method, self._settings = checkpoint, config, method, settings
        self._tensors = checkpoint.tensors
        self._warned = False

    def weights(self, name: str) -> list[tuple[str, Weight]]:
        """The weight that this tensor is, or is the main part of; [] for parts of others."""
        stored = self._tensors[name]
        module, _, end = name.rpartition(".")
        if end == "position_ids":  # whole numbers, of older encoders
            return []
        if end == "tid2eid" and stored.dtype in ("I32", "I64"):
            return [(name, whole_numbers(stored))]
        if self._method is None:
            return [(name, self._plain(name))]
        if name.endswith(_UNUSED) or end in _PARTS or (name.endswith("_scales") and self._method == "mxfp4"):
            return []
        if self._method == "bitsandbytes" and ".weight." in name:
            return []
        if name.endswith("_blocks") and self._method == "mxfp4":
            scales = name.removesuffix("_blocks") + "_scales"
            return [(name.removesuffix("_blocks") + "_mxfp4", self._mxfp4(name, self._tensors[name].shape, scales))]
        if end == "scale" and f"{module}.weight" in self._tensors:  # DeepSeek V4's
            return []
        if end == "weight" and stored.dtype == "I8" and f"{module}.scale" in self._tensors:
            n, k = stored.shape if len(stored.shape) == 2 else (0, 0)
            return [(name, self._mxfp4(name, (n, k // 16, k and 16), f"{module}.scale"))]
        if end == "qweight":
            make = self._awq if self._method == "awq" else self._gptq
            return [(f"{module}.weight", make(module))]
        if end == "weight_packed":
            packed = self._packed(module) if stored.dtype == "I32" else self._nvfp4(name, "weight_global_scale")
            return [(f"{module}.weight", packed)]
        if self._method == "bitnet":
            self._check_bitnet()
            is_online = self._settings.get("quantization_mode") == "online"
            if end == "weight" and (stored.dtype == "U8" or (is_online and name.endswith("_proj.weight"))):
                return [(name, self._ternary(module))]
            return [(name, self._plain(name))]
        if end == "weight" and stored.dtype == "U8":
            return [(name, self._nf4(name) if self._method == "bitsandbytes" else self._nvfp4(name, "weight_scale_2"))]
        if end == "weight" and stored.dtype in ("F8_E4M3", "I8"):
            return [(name, self._scaled(module))]
        return [(name, self._plain(name))]

    def _plain(self, name: str) -> Weight:
        stored = self._tensors[name]
        if stored.dtype not in FLOATS:
            raise self._checkpoint.error(name, f"has the type {stored.dtype}, which is not supported")
        return plain(stored)

    def _part(self, name: str, *shape: int, dtypes: tuple[str, ...] = ()) -> Stored:
        """A tensor of this shape. ModelFileError: it is missing, or of another."""
        stored = self._tensors.get(name)
        if stored is None:
            raise self._checkpoint.error(name, f"is missing, which {self._method} has")
        if (shape and stored.shape != shape) or (dtypes and stored.dtype not in dtypes):
            problem = f"is {stored.dtype} of shape {stored.shape}, expected {'/'.join(dtypes)} {shape}"
            raise self._checkpoint.error(name, problem)
        return stored

    def _check_bits(self, bits: object, *known: int) -> None:
        if bits not in known:
            problem = f"has weights of {bits} bits; supported are {', '.join(map(str, known))}"
            raise self._config.error("quantization_config", problem)

    def _mxfp4(self, name: str, pairs_of: tuple[int, ...], scales_name: str) -> Weight:
        """Pairs of codes (…, blocks, 16), whose first is in the low bits."""
        blocks = self._part(name, dtypes=("U8", "I8"))
        if len(pairs_of) < 3 or pairs_of[-1] != 16 or math.prod(pairs_of) != math.prod(blocks.shape):
            raise self._checkpoint.error(name, f"has shape {blocks.shape}, expected (…, blocks, 16)")
        scales = self._part(scales_name, *pairs_of[:-1], dtypes=("U8", "F8_E8M0"))
        shape = (*pairs_of[:-2], pairs_of[-2] * 32)

        def read(parts: Sequence[Part]) -> Array:
            pairs = blocks.raw(parts).view(np.uint8).reshape(pairs_of)
            codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs_of[:-1], 32)
            packed = codes[..., :16] | codes[..., 16:] << 4
            exponents = scales.raw(parts).reshape(*pairs_of[:-1], 1)
            return np.concatenate([exponents, packed], -1).reshape(*shape[:-1], -1)

        return Weight("mxfp4", shape, read, (blocks, scales))

    def _scaled(self, module: str) -> Weight:
        """8-bit floats or integers with a scale of all, of each row, or of squares."""
        weight = self._part(f"{module}.weight")
        is_bnb = self._method == "bitsandbytes"
        usual = f"{module}.{'SCB' if is_bnb else 'weight_scale'}"
        names = (f"{module}.weight_scale_inv", f"{module}.scale")
        named = next((name for name in names if name in self._tensors), usual)
        scale = self._part(named, dtypes=(*_FLOATS, "F8_E8M0"))
        n, k = weight.shape if len(weight.shape) == 2 else (1, weight.shape[-1])
        size = self._settings.get("weight_block_size")
        size = size if isinstance(size, list) and len(size) == 2 else [128, 128]
        per_row = scale.shape in ((n,), (n, 1))
        squares = (-(-n // int(size[0])), -(-k // int(size[1])))
        scale_rows, order = np.arange(n) // int(size[0]), None
        if module.endswith(".qkv_proj") and "MiMoV2ForCausalLM" in self._config.items("architectures"):
            scale_rows, order = self._shards(module, n, scale.shape[0] if scale.shape else 0, int(size[0]))
            squares = (scale.shape[0], squares[1])
        if not per_row and scale.shape not in ((), (1,), (1, 1), squares):
            raise self._checkpoint.error(f"{module}.weight", f"has scales of shape {scale.shape}, expected {squares}")

        def scales(parts: Sequence[Part]) -> npt.NDArray[np.float32]:
            values = _floats(scale, parts) / np.float32(127 if is_bnb else 1)  # its scales are the rows' largest
            if per_row or values.size == 1:
                return values.reshape(-1, 1)
            return np.repeat(values[scale_rows], int(size[1]), 1)[:, :k]

        def floats(parts: Sequence[Part]) -> Array:
            raw = weight.raw(parts)
            values = _E4M3[raw] if weight.dtype == "F8_E4M3" else raw.view(np.int8).astype(np.float32)
            product = values.reshape(n, k) * scales(parts)
            return of_f32((product if order is None else product[order]).reshape(weight.shape), "bf16")

        def blocks(parts: Sequence[Part]) -> Array:
            codes = weight.raw(parts).reshape(n, k // 32, 32)
            d = np.broadcast_to(scales(parts), (n, k // 32)).astype(np.float16)
            return np.concatenate([d[..., None].view(np.uint8), codes], -1).reshape(n, -1)

        bf16 = Weight("bf16", weight.shape, floats, (weight, scale))
        if weight.dtype == "F8_E4M3" or k % 32 or not (per_row or scale.shape in ((), (1,), (1, 1))):
            return bf16
        return Weight("q8_0", weight.shape, blocks, (weight, scale), floats=bf16)

    def _shards(self, module: str, n: int, n_scales: int, size: int) -> tuple[Array, Array]:
        """MiMo V2.5's queries, keys and values, which are parts of shards that have squares of scales of their own: the
        row of scales of each row, and the rows in the order of an unsharded matrix."""
        c = self._config
        n_heads, width = c.count("num_attention_heads"), c.head_dim
        n_kv, rest = divmod(n - n_heads * width, max(1, width + c.count("v_head_dim")))
        for shards in (8, 4, 2, 1) if n_kv > 0 and not rest else ():
            rows = n // shards
            if n_heads % shards == n_kv % shards == 0 and n_scales == shards * -(-rows // size):
                place, of_shard = np.arange(n).reshape(shards, rows), np.arange(n) % rows
                ends = [n_heads * width // shards, (n_heads + n_kv) * width // shards]
                parts = np.split(place, ends, 1)
                scale_rows = np.arange(n) // rows * -(-rows // size) + of_shard // size
                return scale_rows, np.concatenate([part.reshape(-1) for part in parts])
        problem = f"has {n_scales} rows of scales, of which 1 to 8 shards of {n} rows have another number"
        raise self._checkpoint.error(f"{module}.weight", problem)

    def _nvfp4(self, name: str, whole: str) -> Weight:
        """4-bit floats with an 8-bit one for each 16 columns, and one for all: compressed-tensors divides by it."""
        module, codes = name.rpartition(".")[0], self._part(name, dtypes=("U8",))
        n, k = (codes.shape[0], codes.shape[1] * 2) if len(codes.shape) == 2 else (0, 1)
        if k % 16:
            raise self._checkpoint.error(name, f"has shape {codes.shape}, expected rows of whole groups of 16")
        scale = self._part(f"{module}.weight_scale", n, k // 16, dtypes=("F8_E4M3",))
        total = self._part(f"{module}.{whole}", dtypes=("F32",))
        if total.nbytes != 4:
            raise self._checkpoint.error(f"{module}.{whole}", f"has shape {total.shape}, expected one number")

        def factor(parts: Sequence[Part]) -> npt.NDArray[np.float32]:
            number = _floats(total, parts).reshape(1)
            return np.float32(1) / number if whole == "weight_global_scale" and number.all() else number

        def floats(parts: Sequence[Part]) -> Array:
            pairs = codes.raw(parts).reshape(n, k // 2)
            values = _E2M1[np.stack([pairs & 15, pairs >> 4], -1)].reshape(n, k // 16, 16)
            return of_f32((values * (_E4M3[scale.raw(parts)] * factor(parts)).reshape(n, -1, 1)).reshape(n, k), "bf16")

        def blocks(parts: Sequence[Part]) -> Array:
            bits = scale.raw(parts).reshape(n, k // 64, 4)
            pairs = codes.raw(parts).reshape(n, k // 64, 4, 8)
            own = np.stack([pairs & 15, pairs >> 4], -1).reshape(n, k // 64, 4, 16) ^ (bits >> 7 << 3)[..., None]
            packed = own[..., :8] | own[..., 8:] << 4
            return np.concatenate([bits & 127, packed.reshape(n, k // 64, 32)], -1).reshape(n, -1)

        bf16 = Weight("bf16", (n, k), floats, (codes, scale, total))
        if k % 64:
            self._warn_of_bf16("NVFP4 of rows that are no multiple of 64")
            return bf16
        factors = Weight("f32", (1,), factor, (total,))
        return Weight("nvfp4", (n, k), blocks, (codes, scale, total), floats=bf16, scale=factors)

    def _check_bitnet(self) -> None:
        if self._settings.get("use_rms_norm"):
            raise self._config.error("quantization_config", "has use_rms_norm, which is not supported")
        for key, kinds in _OF_BITNET.items():
            if self._settings.get(key) not in (None, *kinds):
                raise self._config.error("quantization_config", f"has a {key} that is neither {' nor '.join(kinds)}")

    def _ternary(self, module: str) -> Weight:
        """BitNet: codes -1, 0 and 1 with one factor of all: four rows of a quarter each in a byte, or floats that are
        rounded to them when they are used."""
        name = f"{module}.weight"
        weight = self._part(name, dtypes=("U8", *_FLOATS))
        if len(weight.shape) != 2:
            raise self._checkpoint.error(name, f"has shape {weight.shape}, expected rows and columns")
        packed = weight.dtype == "U8"
        n, k = weight.shape[0] * (4 if packed else 1), weight.shape[1]
        scale = self._part(f"{module}.weight_scale", 1, dtypes=_FLOATS) if packed else weight
        divides = self._settings.get("linear_class", "bitlinear") == "bitlinear"

        def checked(factor: float) -> np.float32:
            if not abs(factor) <= _MOST_F16:
                raise self._checkpoint.error(name, f"has the factor {factor:.4g}, which 16-bit floats have not")
            return np.float32(factor)

        def codes(parts: Sequence[Part]) -> tuple[U8, np.float32]:
            """Codes from 0, (n, k), and the factor."""
            if packed:
                bits = weight.raw(parts).reshape(1, n // 4, k) >> np.array([0, 2, 4, 6], np.uint8)[:, None, None] & 3
                if bits.max() > 2:
                    raise self._checkpoint.error(name, "has a code of 3, but ternary ones are 0, 1 and 2")
                factor = float(_floats(scale, parts)[0])
                return bits.reshape(n, k).astype(np.uint8), checked(1 / factor if divides and factor else factor)
            values = _floats(weight, parts)
            mean = checked(max(np.abs(values).mean(dtype=np.float64), 1e-5))
            return (np.clip(np.round(values / mean), -1, 1) + 1).astype(np.uint8), mean

        def floats(parts: Sequence[Part]) -> Array:
            bits, factor = codes(parts)
            return of_f32((bits.astype(np.float32) - 1) * factor, "bf16")

        def blocks(parts: Sequence[Part]) -> Array:
            bits, factor = codes(parts)
            quarters = bits.reshape(n, k // 256, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
            d = np.full((n, k // 256, 1), factor, np.float16)
            return np.concatenate([quarters.sum(3, np.uint8).reshape(n, -1, 64), d.view(np.uint8)], -1).reshape(n, -1)

        bf16 = Weight("bf16", (n, k), floats, (weight, scale))
        if k % 256:
            self._warn_of_bf16("ternary rows that are no multiple of 256")
            return bf16
        return Weight("tq2_0", (n, k), blocks, (weight, scale), floats=bf16)

    def _nf4(self, name: str) -> Weight:
        """bitsandbytes: codes of a table of 16, the first in the high bits; the largest number of each block, which
        may itself be a code."""
        codes, table = self._part(name), self._part(f"{name}.quant_map", 16, dtypes=("F32",))
        states = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("fp4", "nf4")]
        state = next((n for n in states if n in self._tensors), states[-1])
        try:
            settings = msgspec.json.decode(self._part(state).raw(self._checkpoint.parts).tobytes(), type=_State)
        except msgspec.MsgspecError as error:
            raise self._checkpoint.error(state, f"is damaged: {error}") from None
        n, size = math.prod(settings.shape), settings.blocksize
        if not 0 < n == 2 * codes.nbytes or min(settings.shape) < 1 or size < 1 or n % size:
            problem = f"has {2 * codes.nbytes} codes, for shape {settings.shape} and blocks of {size}"
            raise self._checkpoint.error(name, problem)
        most = self._part(f"{name}.absmax", n // size, dtypes=("U8", *_FLOATS))
        nested = (
            ()
            if most.dtype != "U8"
            else tuple(
                self._part(f"{name}.nested_{part}", *shape, dtypes=("F32",))
                for part, shape in (("absmax", (-(-n // size // settings.nested_blocksize),)), ("quant_map", (256,)))
            )
        )

        def floats(parts: Sequence[Part]) -> Array:
            if nested:
                outer, inner = (_floats(part, parts) for part in nested)
                scales = inner[most.raw(parts)] * np.repeat(outer, settings.nested_blocksize)[: n // size]
                scales = scales + np.float32(settings.nested_offset)
            else:
                scales = _floats(most, parts)
            bits = codes.raw(parts)
            values = _floats(table, parts)[np.stack([bits >> 4, bits & 15], -1)]
            return of_f32((values.reshape(-1, size) * scales[:, None]).reshape(settings.shape), "bf16")

        self._warn_of_bf16("bitsandbytes")
        return Weight("bf16", settings.shape, floats, (codes, most))

    def _warn_of_bf16(self, kind: str) -> None:
        if not self._warned:
            log.warning("%s: weights of %s become BF16, in several times the memory", self._checkpoint.folder, kind)
        self._warned = True

    def _awq(self, module: str) -> Weight:
        self._check_bits(self._settings.get("bits", self._settings.get("w_bit")), 4)
        if self._settings.get("version", "gemm").lower() != "gemm":
            raise self._config.error("quantization_config", "has not the version gemm, the supported one")
        codes = self._part(f"{module}.qweight", dtypes=("I32",))
        k, n = codes.shape[0], codes.shape[1] * 8
        scales = self._part(f"{module}.scales", dtypes=("F16", "BF16", "F32"))
        n_groups = scales.shape[0]
        zeros = self._part(f"{module}.qzeros", n_groups, n // 8, dtypes=("I32",))

        def read(parts: Sequence[Part]) -> tuple[U8, Array, Array]:
            ours = _unpacked(codes, parts, 1, _AWQ_ORDER).T
            return ours, _floats(scales, parts).T, _unpacked(zeros, parts, 1, _AWQ_ORDER).T.astype(np.float32)

        return self._blocks(module, n, k, n_groups, read, (codes, scales, zeros), centred=False)

    def _gptq(self, module: str) -> Weight:
        self._check_bits(self._settings.get("bits"), 4)
        codes = self._part(f"{module}.qweight", dtypes=("I32",))
        k, n = codes.shape[0] * 8, codes.shape[1]
        scales = self._part(f"{module}.scales", dtypes=("F16", "BF16", "F32"))
        n_groups = scales.shape[0]
        zeros = self._part(f"{module}.qzeros", n_groups, n // 8, dtypes=("I32",))
        plus = 0 if self._settings.get("checkpoint_format") == "gptq_v2" else 1

        def read(parts: Sequence[Part]) -> tuple[U8, Array, Array]:
            ours = _unpacked(codes, parts, 0).T
            return ours, _floats(scales, parts).T, _unpacked(zeros, parts, 1).T.astype(np.float32) + plus

        groups = self._tensors.get(f"{module}.g_idx")
        order = None if groups is None else groups.raw(self._checkpoint.parts).view(np.int32)
        if order is not None and (order == np.arange(k) // max(1, k // n_groups)).all():
            order = None
        centred = self._settings.get("sym") is True
        return self._blocks(module, n, k, n_groups, read, (codes, scales, zeros), centred=centred, order=order)

    def _packed(self, module: str) -> Weight:
        """compressed-tensors: codes around 8, with zero points where they are not symmetric."""
        codes = self._part(f"{module}.weight_packed", dtypes=("I32",))
        n, k = codes.shape[0], codes.shape[1] * 8
        shape = self._tensors.get(f"{module}.weight_shape")
        if shape is not None and (size := shape.raw(self._checkpoint.parts).view(np.int64).tolist()) != [n, k]:
            raise self._checkpoint.error(f"{module}.weight_packed", f"has not eight codes a number for {size}")
        scales = self._part(f"{module}.weight_scale", dtypes=("F16", "BF16", "F32"))
        if scales.shape[0] != n or len(scales.shape) != 2:
            raise self._checkpoint.error(f"{module}.weight_scale", f"has shape {scales.shape}, expected ({n}, groups)")
        zeros = self._tensors.get(f"{module}.weight_zero_point")

        def read(parts: Sequence[Part]) -> tuple[U8, Array, Array]:
            middle = np.full(scales.shape, 8, np.float32)
            if zeros is not None:
                middle = _unpacked(zeros, parts, 0)[:n].astype(np.float32)
            return _unpacked(codes, parts, 1), _floats(scales, parts), middle

        return self._blocks(module, n, k, scales.shape[1], read, (codes, scales), centred=zeros is None)

    def _blocks(
        self,
        module: str,
        n: int,
        k: int,
        n_groups: int,
        read: Callable[[Sequence[Part]], tuple[U8, Array, Array]],
        sources: tuple[Stored, ...],
        *,
        centred: bool,
        order: npt.NDArray[np.int32] | None = None,
    ) -> Weight:
        """Codes (n, k), scales and zero points (n, groups) as Q4_0, Q4_1 or F16. `order`: the group of each column,
        where the columns of a group are not neighbours."""
        size = k // n_groups if n_groups else 0
        if not size or k % n_groups or sources[1].shape not in ((n_groups, n), (n, n_groups)):
            raise self._checkpoint.error(f"{module}.weight", f"has {n_groups} groups of scales for {k} columns")
        of_column = np.arange(k) // size if order is None else order
        if of_column.shape != (k,) or of_column.min() < 0 or of_column.max() >= n_groups:
            raise self._checkpoint.error(f"{module}.g_idx", f"does not name one of {n_groups} groups for each column")

        def floats(parts: Sequence[Part]) -> Array:
            codes, scales, zeros = read(parts)
            return of_f32((codes.astype(np.float32) - zeros[:, of_column]) * scales[:, of_column], "f16")

        def blocks(parts: Sequence[Part]) -> Array:
            codes, scales, zeros = read(parts)
            if centred and (zeros != 8).any():
                raise self._checkpoint.error(f"{module}.qzeros", "has zero points, and quantization_config says 'sym'")
            by_block = codes.reshape(n, k // 32, 32)
            heads = [scales] if centred else [scales, -scales * zeros]
            heads = [np.repeat(head, size // 32, 1).astype(np.float16)[..., None] for head in heads]
            packed = by_block[..., :16] | by_block[..., 16:] << 4
            return np.concatenate([*(head.view(np.uint8) for head in heads), packed], -1).reshape(n, -1)

        f16 = Weight("f16", (n, k), floats, sources)
        if order is not None or size % 32:
            if not self._warned:
                reason = "are not neighbours" if order is not None else f"are {size}, not a multiple of 32"
                log.warning("%s: columns of a group %s: weights become F16", self._checkpoint.folder, reason)
            self._warned = True
            return f16
        return replace(f16, dtype="q4_0" if centred else "q4_1", read=blocks, floats=f16)


def _floats(stored: Stored, parts: Sequence[Part]) -> npt.NDArray[np.float32]:
    if stored.dtype == "F8_E8M0":  # powers of two
        return np.ldexp(np.float32(1), stored.raw(parts).astype(np.int32).reshape(stored.shape) - 127)
    weight = plain(stored)
    return as_f32(weight.read(parts), weight.dtype)


def _unpacked(stored: Stored, parts: Sequence[Part], axis: int, order: Sequence[int] = range(8)) -> U8:
    """4-bit codes of numbers of 32 bits: along rows (0) or columns (1); `order`: places of the eight in a number."""
    numbers = stored.raw(parts).view(np.uint32).reshape(stored.shape)
    codes = np.empty((*numbers.shape, 8), np.uint8)
    for i, place in enumerate(order):
        codes[..., place] = numbers >> np.uint32(4 * i) & np.uint32(15)
    rows, columns = stored.shape
    return codes.reshape(rows, columns * 8) if axis else codes.swapaxes(1, 2).reshape(rows * 8, columns)


def _e4m3() -> npt.NDArray[np.float32]:
    """The numbers of all 8-bit floats with four bits of exponent and three of fraction."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    values = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    values[bits & 127 == 127] = np.nan
    return np.where(bits < 128, values, -values).astype(np.float32)


_E4M3 = _e4m3()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
