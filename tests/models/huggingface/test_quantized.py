"""Quantized checkpoints: the numbers of their formats, by the definitions, in the blocks that a folder is read as."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.quants import TQ2_0

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.safetensors import write_safetensors
from logitless.models.model import hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.models.weights.weights import check_weights, numbers_of
from tests.helpers.huggingface_folders import recorded, write_folder
from tests.helpers.huggingface_weights import weight

Array = np.ndarray[Any, Any]
Parts = dict[str, tuple[str, Array]]  # by the end of the name: (type, numbers)
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight 4-bit codes a number, along an axis."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    eight = codes.reshape(*codes.shape[:-1], -1, 8)
    numbers = sum(eight[..., place] << np.uint32(4 * i) for i, place in enumerate(order))
    return np.ascontiguousarray(np.moveaxis(np.asarray(numbers, np.uint32), -1, axis))


def random_codes(shape: tuple[int, int], *, centred: bool) -> tuple[Array, Array, Array, Array]:
    """Codes (n, k), scales and zero points (n, groups), and the numbers that they are."""
    random, (n, k) = np.random.default_rng(7), shape
    codes = random.integers(0, 16, shape)
    scales = random.uniform(0.01, 0.02, (n, k // GROUP)).astype(np.float16)
    zeros = np.full_like(codes[:, : k // GROUP], 8) if centred else random.integers(1, 15, (n, k // GROUP))
    values = (codes - np.repeat(zeros, GROUP, 1)) * np.repeat(scales.astype(np.float64), GROUP, 1)
    return codes, scales, zeros, values


def gptq(shape: tuple[int, int], *, centred: bool = True) -> tuple[Parts, Array]:
    codes, scales, zeros, values = random_codes(shape, centred=centred)
    parts = {"qweight": packed(codes.T, 0), "qzeros": packed(zeros.T - 1, 1)}
    groups = np.arange(shape[1], dtype=np.int32) // GROUP
    return {**{k: ("I32", v) for k, v in parts.items()}, "scales": ("F16", scales.T), "g_idx": ("I32", groups)}, values


def gptq_in_order(shape: tuple[int, int]) -> tuple[Parts, Array]:
    parts, _ = gptq(shape)
    codes, scales, _, _ = random_codes(shape, centred=True)
    groups = np.random.default_rng(3).permutation(shape[1]) % (shape[1] // GROUP)
    return parts | {"g_idx": ("I32", groups.astype(np.int32))}, (codes - 8) * scales.astype(np.float64)[:, groups]


def awq(shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, scales, zeros, values = random_codes(shape, centred=False)
    parts = {"qweight": packed(codes.T, 1, AWQ_ORDER), "qzeros": packed(zeros.T, 1, AWQ_ORDER)}
    return {**{k: ("I32", v) for k, v in parts.items()}, "scales": ("F16", scales.T)}, values


def compressed(shape: tuple[int, int], *, centred: bool = True) -> tuple[Parts, Array]:
    codes, scales, zeros, values = random_codes(shape, centred=centred)
    parts: Parts = {
        "weight_packed": ("I32", packed(codes, 1)),
        "weight_scale": ("F16", scales),
        "weight_shape": ("I64", np.array(shape)),
    }
    return parts | ({} if centred else {"weight_zero_point": ("I32", packed(zeros, 0))}), values


def int8(shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes = np.random.default_rng(7).integers(-127, 128, shape).astype(np.int8)
    scales = np.random.default_rng(8).uniform(0.001, 0.002, (shape[0], 1)).astype(np.float16)
    return {"weight": ("I8", codes), "weight_scale": ("F16", scales)}, codes * scales.astype(np.float64)


def fp8(shape: tuple[int, int], *, size: int = 32) -> tuple[Parts, Array]:
    bits = np.random.default_rng(7).integers(0, 127, shape) | np.random.default_rng(8).integers(0, 2, shape) << 7
    exponent, fraction = bits >> 3 & 15, bits & 7
    values = np.where(exponent, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction / 8 * 2.0**-6)
    values *= np.where(bits < 128, 1, -1)
    n, k = shape
    grid = (n, 1) if size == 0 else (-(-n // size), -(-k // size))
    scales = np.random.default_rng(9).uniform(0.001, 0.002, grid).astype(np.float32)
    spread = scales if size == 0 else np.repeat(np.repeat(scales, size, 0)[:n], size, 1)[:, :k]
    name = "weight_scale" if size == 0 else "weight_scale_inv"
    return {"weight": ("F8_E4M3", bits.astype(np.uint8)), name: ("F32", scales)}, values * spread


def fp8_by_powers(shape: tuple[int, int]) -> tuple[Parts, Array]:
    """DeepSeek V4's: scales of squares are powers of two."""
    parts, values = fp8(shape, size=0)
    values = values / parts.pop("weight_scale")[1]
    exponents = np.random.default_rng(9).integers(115, 119, (-(-shape[0] // 32), -(-shape[1] // 32)), np.uint8)
    powers = np.repeat(np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 0)[: shape[0]], 32, 1)[:, : shape[1]]
    return parts | {"scale": ("F8_E8M0", exponents)}, values * powers


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_by_powers(shape: tuple[int, int]) -> tuple[Parts, Array]:
    """DeepSeek V4's experts: pairs of codes, a power of two for each 32."""
    codes = np.random.default_rng(7).integers(0, 16, shape, np.uint8)
    exponents = np.random.default_rng(8).integers(115, 120, (shape[0], shape[1] // 32), np.uint8)
    values = E2M1[codes] * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    return {"weight": ("I8", pairs), "scale": ("F8_E8M0", exponents)}, values


def nvfp4(shape: tuple[int, int], *, divided: bool) -> tuple[Parts, Array]:
    n, k = shape
    numbers = E2M1
    codes = np.random.default_rng(7).integers(0, 16, shape, np.uint8)
    bits = np.random.default_rng(8).integers(8, 120, (n, k // 16), np.uint8)  # normal numbers
    scales = (1 + (bits & 7) / 8) * 2.0 ** ((bits >> 3).astype(int) - 7)
    factor = np.float32(0.001)
    values = numbers[codes] * np.repeat(scales, 16, 1) * float(factor)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    names = ("weight_packed", "weight_global_scale") if divided else ("weight", "weight_scale_2")
    total = np.array([1 / factor if divided else factor], np.float32)
    parts: Parts = {names[0]: ("U8", pairs), "weight_scale": ("F8_E4M3", bits), names[1]: ("F32", total)}
    return parts | {"input_scale": ("F32", np.ones(1, np.float32))}, values


def nf4(shape: tuple[int, int], *, nested: bool = True) -> tuple[Parts, Array]:
    """As bitsandbytes 0.50 writes it (tried with its own files)."""
    random, n = np.random.default_rng(7), int(np.prod(shape))
    codes, table = random.integers(0, 16, n, np.uint8), np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    if nested:
        most, outer = random.integers(0, 256, n // 64, np.uint8), random.uniform(0.1, 0.2, -(-n // 64 // 256))
        inner = random.uniform(0, 1, 256).astype(np.float32)
        scales = inner[most] * np.repeat(outer.astype(np.float32), 256)[: n // 64] + 0.25
        more: Parts = {
            "weight.absmax": ("U8", most),
            "weight.nested_absmax": ("F32", outer.astype(np.float32)),
            "weight.nested_quant_map": ("F32", inner),
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
    else:
        scales = random.uniform(0.1, 0.2, n // 64).astype(np.float32)
        more = {"weight.absmax": ("F32", scales)}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    more |= {"weight.quant_map": ("F32", table), "weight.quant_state.bitsandbytes__nf4": ("U8", text)}
    pairs = (codes[::2] << 4 | codes[1::2])[:, None]
    return more | {"weight": ("U8", pairs)}, (table[codes] * np.repeat(scales, 64)).reshape(shape).astype(np.float64)


def llm_int8(shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes = np.random.default_rng(7).integers(-127, 128, shape).astype(np.int8)
    most = np.random.default_rng(8).uniform(0.1, 0.2, shape[0]).astype(np.float32)
    return {"weight": ("I8", codes), "SCB": ("F32", most)}, codes * (most.astype(np.float64) / 127)[:, None]


def bitnet(shape: tuple[int, int], *, divides: bool) -> tuple[Parts, Array]:
    """As transformers' pack_weights has it: a byte has the rows i, i + n / 4, …"""
    codes = np.random.default_rng(7).integers(0, 3, shape, np.uint8)
    packed = sum(part << 2 * i for i, part in enumerate(np.split(codes, 4)))
    factor = np.float32(0.03125)
    scale = 1 / factor if divides else factor
    scales = np.array([scale], np.float32)
    return {"weight": ("U8", np.asarray(packed, np.uint8)), "weight_scale": ("F32", scales)}, (codes - 1.0) * factor


def bitnet_online(shape: tuple[int, int]) -> tuple[Parts, Array]:
    values = weight("online", shape)
    mean = np.abs(values).mean()
    return {"weight": ("F32", values)}, np.clip(np.round(values / mean), -1, 1) * float(mean)


Make = Callable[[tuple[int, int]], tuple[Parts, Array]]
BITNET = {"quant_method": "bitnet"}
FORMATS: dict[str, tuple[dict[str, Any], Make, str, float]] = {  # settings, numbers, GGUF's type, largest error
    "gptq": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq, "q4_0", 0),
    "gptq with zero points": (
        {"quant_method": "gptq", "bits": 4, "sym": False},
        lambda shape: gptq(shape, centred=False),
        "q4_1",
        1e-3,
    ),
    "gptq in another order": ({"quant_method": "gptq", "bits": 4, "sym": True}, gptq_in_order, "f16", 1e-3),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, "q4_1", 1e-3),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, compressed, "q4_0", 0),
    "compressed-tensors with zero points": (
        {"quant_method": "compressed-tensors"},
        lambda shape: compressed(shape, centred=False),
        "q4_1",
        1e-3,
    ),
    "compressed-tensors int8": ({"quant_method": "compressed-tensors"}, int8, "q8_0", 0),
    "compressed-tensors fp8": ({"quant_method": "compressed-tensors"}, lambda shape: fp8(shape, size=0), "bf16", 4e-3),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8, "bf16", 4e-3),
    "fp8 by powers": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8_by_powers, "bf16", 4e-3),
    "fp4 by powers": ({"quant_method": "fp8"}, fp4_by_powers, "mxfp4", 1e-6),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda s: nvfp4(s, divided=False), "nvfp4", 4e-3),
    "nvfp4 of compressed-tensors": (
        {"quant_method": "compressed-tensors"},
        lambda shape: nvfp4(shape, divided=True),
        "nvfp4",
        4e-3,
    ),
    "nf4": ({"quant_method": "bitsandbytes"}, nf4, "bf16", 4e-3),
    "nf4 of one level": ({"quant_method": "bitsandbytes"}, lambda shape: nf4(shape, nested=False), "bf16", 4e-3),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes"}, llm_int8, "q8_0", 1e-3),
    "bitnet": (BITNET, lambda shape: bitnet(shape, divides=True), "bf16", 0),
    "bitnet of its own": (
        BITNET | {"linear_class": "autobitlinear"},
        lambda shape: bitnet(shape, divides=False),
        "bf16",
        0,
    ),
    "bitnet online": (BITNET | {"quantization_mode": "online"}, bitnet_online, "bf16", 4e-3),
}
WIDE = {64: 256, 96: 512, 32: 128}  # rows of whole blocks of 256


def quantized_folder(
    folder: Path, settings: dict[str, Any], make: Make, sizes: dict[int, int] | None = None
) -> dict[str, Array]:
    """A Qwen 2 whose layers' matrices are quantized; returns their numbers. `sizes`: others in the place of its own."""
    write_folder(folder, "qwen2")
    tensors: dict[str, tuple[str, tuple[int, ...], list[Array]]] = {}
    values = {}
    for name, own in recorded("qwen2")["tensors"].items():
        shape = [(sizes or {}).get(n, n) for n in own]
        if name.endswith("_proj.weight"):
            parts, values[name] = make(tuple(shape))
            for end, (dtype, array) in parts.items():
                tensors[name.removesuffix("weight") + end] = (dtype, array.shape, [array])
        else:
            tensors[name] = ("F32", tuple(shape), [weight(name, shape)])
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return values


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_are_the_numbers_of_their_format(name: str, tmp_path: Path) -> None:
    settings, make, dtype, error = FORMATS[name]
    values = quantized_folder(tmp_path, settings, make)
    with GGUFFile.open(tmp_path) as gguf:
        declared = check_weights(gguf, hparams_of(gguf))
        for ours, theirs in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
            info, expected = gguf.tensors[f"blk.1.{ours}.weight"], values[f"model.layers.1.{theirs}.weight"]
            whole_blocks = dtype != "nvfp4" or info.shape[1] % 64 == 0
            assert info.dtype == (dtype if whole_blocks else "bf16")
            result = numbers_of(gguf, declared, info.name).astype(np.float64)
            most = 1e-6 if info.dtype == "nvfp4" else error
            assert np.abs(result - expected).max() <= most * np.abs(expected).max() + 1e-7


@pytest.mark.parametrize("name", ["bitnet", "bitnet of its own", "bitnet online"])
def test_ternary_rows_of_whole_blocks_are_tq2_0(name: str, tmp_path: Path) -> None:
    settings, make, _, _ = FORMATS[name]
    values = quantized_folder(tmp_path, settings, make, WIDE)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 256, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with GGUFFile.open(tmp_path) as gguf:
        check_weights(gguf, hparams_of(gguf))
        info, expected = gguf.tensors["blk.1.ffn_down.weight"], values["model.layers.1.mlp.down_proj.weight"]
        assert info.dtype == "tq2_0"
        result = TQ2_0.dequantize_blocks(gguf.bytes_of(info.name).reshape(-1, 66)).reshape(expected.shape)
    assert np.abs(result - expected).max() <= 1e-3 * np.abs(expected).max() * ("online" in name)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings | {"use_rms_norm": True}})
    )
    with pytest.raises(ModelFileError, match="'quantization_config' has use_rms_norm, which is not supported"):
        GGUFFile.open(tmp_path)


def test_mxfp4_blocks_keep_their_numbers(tmp_path: Path) -> None:
    folder, random = write_folder(tmp_path, "gpt-oss"), np.random.default_rng(5)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = {}
    tensors: dict[str, tuple[str, tuple[int, ...], list[Array]]] = {}
    for name, shape in recorded("gpt-oss")["tensors"].items():
        if name.endswith(("gate_up_proj", "down_proj")):
            n, k, rows = shape
            codes = random.integers(0, 16, (n, rows, k // 32, 32), np.uint8)
            scales = random.integers(118, 124, (n, rows, k // 32), np.uint8)
            values[name] = (numbers[codes] * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(n, rows, k)
            pairs = codes[..., ::2] | codes[..., 1::2] << 4
            tensors |= {f"{name}_{end}": ("U8", a.shape, [a]) for end, a in (("blocks", pairs), ("scales", scales))}
        else:
            tensors[name] = ("F32", tuple(shape), [weight(name, shape)])
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    with GGUFFile.open(folder) as gguf:
        hparams_of(gguf)
        expected = values["model.layers.1.mlp.experts.gate_up_proj"]
        for name, own in (("gate", expected[:, ::2]), ("up", expected[:, 1::2])):
            info = gguf.tensors[f"blk.1.ffn_{name}_exps.weight"]
            assert info.dtype == "mxfp4"
            assert (dequantized(info, gguf.bytes_of(info.name)) == own).all()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"quant_method": "hqq"}, "has the method 'hqq', which is not supported; supported are fp8"),
        ({"quant_method": "gptq", "bits": 3}, "has weights of 3 bits; supported are 4"),
        (BITNET | {"linear_class": "linear"}, "has a linear_class that is neither bitlinear nor autobitlinear"),
        (BITNET | {"quantization_mode": 7}, "has a quantization_mode that is neither offline nor online"),
        ({"quant_method": "awq", "bits": 4}, r"q_proj.scales' is missing|qzeros' is I32|groups of scales|expected"),
    ],
)
def test_unsupported_quantization_is_refused(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    quantized_folder(tmp_path, settings, gptq)
    with pytest.raises(ModelFileError, match=problem) as error, GGUFFile.open(tmp_path) as gguf:
        hparams_of(gguf)
    assert "\n" not in str(error.value)


def test_missing_scales_are_named(tmp_path: Path) -> None:
    def without(shape: tuple[int, int]) -> tuple[Parts, Array]:
        parts, values = fp8(shape)
        return {"weight": parts["weight"]}, values

    quantized_folder(tmp_path, {"quant_method": "fp8"}, without)
    with pytest.raises(ModelFileError, match=r"q_proj.weight_scale' is missing|_proj.weight_scale' is missing"):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize(
    ("make", "method", "changes", "problem"),
    [
        (nf4, "bitsandbytes", {"weight.quant_map": None}, "weight.quant_map' is missing"),
        (nf4, "bitsandbytes", {"weight.quant_state.bitsandbytes__nf4": b"{}"}, "bitsandbytes__nf4' is damaged"),
        (
            nf4,
            "bitsandbytes",
            {"weight.quant_state.bitsandbytes__nf4": b'{"shape": [3], "blocksize": 0}'},
            "codes, for",
        ),
        (nf4, "bitsandbytes", {"weight.absmax": b"12"}, r"absmax' is U8 of shape \(2,\), expected"),
        (lambda s: nvfp4(s, divided=False), "modelopt", {"weight_scale_2": None}, "weight_scale_2' is missing"),
        (lambda s: nvfp4(s, divided=False), "modelopt", {"weight_scale": b"12"}, "weight_scale' is U8 of shape"),
        (lambda s: nvfp4(s, divided=False), "modelopt", {"weight": b"12"}, "expected rows of whole groups of 16"),
    ],
)
def test_damaged_4_bit_weights_are_refused_in_one_line(
    make: Make, method: str, changes: dict[str, bytes | None], problem: str, tmp_path: Path
) -> None:
    def damaged(shape: tuple[int, int]) -> tuple[Parts, Array]:
        parts, values = make(shape)
        other: Parts = {end: ("U8", np.frombuffer(raw, np.uint8)) for end, raw in changes.items() if raw is not None}
        return {end: part for end, part in parts.items() if end not in changes} | other, values

    quantized_folder(tmp_path, {"quant_method": method}, damaged)
    with pytest.raises(ModelFileError, match=problem) as error:
        GGUFFile.open(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "parts", "problem"),
    [
        (BITNET, {"weight": ("U8", np.uint8(3 << 4))}, "_proj.weight' has a code of 3, but ternary ones are 0, 1"),
        (BITNET, {"weight_scale": ("F32", np.float32(1e-6))}, r"_proj.weight' has the factor 1e\+06, which 16-bit"),
        (BITNET, {"weight_scale": ("F32", np.float32(np.nan))}, "_proj.weight' has the factor nan, which 16-bit"),
        (
            BITNET | {"quantization_mode": "online"},
            {"weight": ("F32", np.float32(np.inf))},
            "has the factor inf, which",
        ),
    ],
)
def test_ternary_weights_that_are_none_are_named_when_they_are_read(
    settings: dict[str, Any], parts: dict[str, tuple[str, Any]], problem: str, tmp_path: Path
) -> None:
    def damaged(shape: tuple[int, int]) -> tuple[Parts, Array]:
        whole, values = bitnet(shape, divides=True)
        whole = {k: v for k, v in whole.items() if k == "weight" or "quantization_mode" not in settings}
        for end, (dtype, value) in parts.items():
            size = whole[end][1].shape if dtype == whole[end][0] else shape
            whole[end] = dtype, np.full(size, value)
        return whole, values

    quantized_folder(tmp_path, settings, damaged)
    with GGUFFile.open(tmp_path) as gguf, pytest.raises(ModelFileError, match=problem):
        gguf.bytes_of("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    ("settings", "end", "part", "problem"),
    [
        (FORMATS["gptq"][0], "qweight", ("I32", np.int32(1)), "qweight' has parts of shapes that do not belong toge"),
        (FORMATS["gptq"][0], "scales", ("F16", np.float16(1)), "qweight' has parts of shapes that do not belong toge"),
        (FORMATS["gptq"][0], "g_idx", ("I32", np.zeros(3, np.int32)), "qweight' has parts of shapes that do not belo"),
        (BITNET | {"quantization_mode": "online"}, "weight", ("I64", np.ones((64, 64), np.int64)), "is I64 of shape"),
    ],
)
def test_parts_of_shapes_or_types_that_do_not_fit_are_refused_in_one_line(
    settings: dict[str, Any], end: str, part: tuple[str, Any], problem: str, tmp_path: Path
) -> None:
    def damaged(shape: tuple[int, int]) -> tuple[Parts, Array]:
        parts, values = (bitnet_online if end == "weight" else FORMATS["gptq"][1])(shape)
        return {**parts, end: part}, values

    quantized_folder(tmp_path, settings, damaged)
    with pytest.raises(ModelFileError, match=problem) as error:
        GGUFFile.open(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shards", [1, 4])
def test_sharded_queries_keys_and_values_are_one_matrix_in_order(shards: int, tmp_path: Path) -> None:
    """MiMo V2.5's: shards of whole heads, whose last squares of scales are cut."""
    folder = write_folder(tmp_path, "mimo2")
    settings = {"architectures": ["MiMoV2ForCausalLM"], "num_key_value_heads": 4, "swa_num_key_value_heads": 4}
    settings |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 16]}}
    (folder / "config.json").write_text(json.dumps(recorded("mimo2")["config"] | settings))
    rows, n_scales = 256 // shards, -(-256 // shards // 24)
    bits = np.random.default_rng(7).integers(0, 120, (256, 64), np.uint8)
    scales = np.random.default_rng(8).uniform(0.5, 2, (shards * n_scales, 4)).astype(np.float32)
    values = np.stack(  # (shards, rows, 64)
        [
            np.where(part >> 3, (1 + (part & 7) / 8) * 2.0 ** ((part >> 3).astype(int) - 7), (part & 7) / 8 * 2.0**-6)
            * np.repeat(np.repeat(scales[i * n_scales :][:n_scales], 24, 0)[:rows], 16, 1)
            for i, part in enumerate(bits.reshape(shards, rows, 64))
        ]
    )
    ends = [4 * 24 // shards, 8 * 24 // shards]
    expected = np.concatenate([part.reshape(-1, 64) for part in np.split(values, ends, 1)])
    tensors: dict[str, Any] = {
        name: ("F32", shape, [weight(name, shape)])
        for name, shape in recorded("mimo2")["tensors"].items()
        if not name.startswith("model.layers.1.self_attn.") or "_proj" not in name or "o_proj" in name
    }
    own = "model.layers.1.self_attn.qkv_proj.weight"
    tensors |= {own: ("F8_E4M3", bits.shape, [bits]), f"{own}_scale_inv": ("F32", scales.shape, [scales])}
    write_safetensors(folder / "model.safetensors", tensors)
    with GGUFFile.open(folder) as gguf:
        info = gguf.tensors["blk.1.attn_qkv.weight"]
        stored = dequantized(info, gguf.bytes_of("blk.1.attn_qkv.weight")).reshape(256, 64)
        assert np.abs(stored / np.maximum(expected, 1e-9) - 1)[expected > 0].max() < 4e-3
    tensors[f"{own}_scale_inv"] = ("F32", (9, 4), [np.ones((9, 4), np.float32)])
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match="rows of scales, of which 1 to 8 shards of 256 rows have another number"):
        GGUFFile.open(folder)
