"""Weights by GGUF name, checked against the architecture, as constants of a session."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from logitless.graph.dtype import BLOCK_TYPES, DTYPES
from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import add, mul, sub
from logitless.graph.ops.gather import get_ids, get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.ops.moe import expert_linear
from logitless.graph.ops.norm import centred, layer_norm, rms_norm
from logitless.graph.ops.shape import reshape, slice_rows
from logitless.graph.ops.slicing import take_columns
from logitless.graph.tensor import Tensor, const
from logitless.models.adapters.low_rank import LowRank
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.finite import is_finite
from logitless.models.weights.tensor_map import VISUAL, TensorSlice, is_unused, mtp_tensors, tensor_map

FLOATS = ("f32", "f16", "bf16")
MATRIX_TYPES = (*FLOATS, *BLOCK_TYPES)
log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
# outputs that kernels make together, which must not be of two experts: their rows are padded
LANES = 16
_OF_HEADS = ("_q_norm.weight", "_k_norm.weight")  # norms without a bias
_TABLES = r"(position_embd|token_types|per_layer_token_embd|blk\.\d+\.(nextn\.embed_tokens|attn_rel_b))\.weight"

UNWEIGHTED = ("attn_norm", "ffn_norm", "output_norm", "token_embd_norm")  # norms that may have no weights


@dataclass(frozen=True)
class Weights:
    """Weights by GGUF name, and products with them: bias, where the file has one, and LoRA
    included."""

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    low_rank: LowRank | None = None
    noise: Tensor | None = None  # (T, n_embd), added to the token embeddings
    directions: Mapping[int, Tensor] = field(default_factory=dict)  # (n_embd,) by layer, of control vectors
    tokens: Tensor | None = None  # (T,) i32, where experts follow from them
    is_text: Tensor | None = None  # (T, 1): 0 for rows of images, whose products are with the visual expert's matrices

    def block(self, i: int) -> Weights:
        return replace(self, prefix=f"{self.prefix}blk.{i}.")

    def apart(self, i: int) -> tuple[Weights, Weights]:
        """The weights of all blocks but i, and those of block i."""
        b = f"{self.prefix}blk.{i}."
        own = {name: t for name, t in self.tensors.items() if name.startswith(b)}
        rest = {name: t for name, t in self.tensors.items() if name not in own}
        return replace(self, tensors=rest), Weights(own, b)

    def steered(self, layer: int, x: Tensor) -> Tensor:
        """The residual stream (…, n_embd) after a layer, with the control vectors' direction."""
        direction = self.directions.get(layer)
        return x if direction is None else add(x, direction)

    def of_rows(self, ids: Tensor) -> Weights:
        """Weights for these rows of a batch: their LoRA scales, and which are of images."""
        low_rank = None if self.low_rank is None else self.low_rank.of_rows(ids)
        is_text = None if self.is_text is None else get_rows(self.is_text, ids)
        if (tokens := self.tokens) is not None:
            n_vocab = self.tensors["token_embd.weight"].shape[0]
            tokens = reshape(get_ids(reshape(tokens, shape=(-1, 1, 1)), ids, limit=n_vocab), shape=(-1,))
        return replace(self, low_rank=low_rank, is_text=is_text, tokens=tokens)

    def with_tokens(self, tokens: Tensor) -> Weights:
        """Weights for a batch of these tokens (T,)."""
        return replace(self, tokens=tokens)

    def with_images(self, is_text: Tensor) -> Weights:
        """Weights for a batch with rows of images, where is_text (T,) is 0."""
        return replace(self, is_text=reshape(is_text, shape=(-1, 1)))

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}.weight")

    def bias(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}.bias")

    def scale(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{self.prefix}{name}.scale")

    def factor(self, name: str) -> Tensor | None:
        """The number that a matrix is multiplied by, (1,), or that of each of its experts, (n, 1)."""
        return self.tensors.get(f"{self.prefix}{name}.factor")

    def linear(self, name: str, x: Tensor) -> Tensor:
        y, expert = self._product(name, x), f"{VISUAL}{name}"
        if self.is_text is None or expert not in self:
            return y
        return add(mul(y, self.is_text), mul(self._product(expert, x), sub(const(1.0), self.is_text)))

    def _product(self, name: str, x: Tensor) -> Tensor:
        y = linear(x, self[name])
        weight = f"{self.prefix}{name}.weight"
        y = y if self.low_rank is None else self.low_rank.rescaled(weight, y)
        y = y if (factor := self.factor(name)) is None else mul(y, factor)
        bias = self.bias(name)
        y = y if bias is None else add(y, bias)
        return y if self.low_rank is None else self.low_rank.added(weight, x, y)

    def experts(self, name: str, x: Tensor, order: Tensor, n: int, width: int) -> Tensor:
        """Each row of x (R, K) times its own expert's weight, plus that expert's bias: (R, width).
        `order`: graph/ops/moe.py."""
        y = expert_linear(x, self[name], order, n=n)
        y = y if y.shape[1] == width else take_columns(y, 0, width)  # padded
        factor, bias = self.factor(name), self.bias(name)  # (1,) or (n, 1); (n, N)
        if factor is not None and len(factor.shape) == 1:
            y, factor = mul(y, factor), None
        if factor is not None or bias is not None:
            experts = reshape(slice_rows(order, start=2, stop=3), shape=order.shape[1:])
            y = y if factor is None else mul(y, get_rows(factor, experts))
            y = y if bias is None else add(y, get_rows(bias, experts))
        if self.low_rank is None:
            return y
        return self.low_rank.added_of_experts(f"{self.prefix}{name}.weight", x, y, order, n)

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """Layer norm of x (T, n) that has a weight and a bias."""
        return layer_norm(x, self[name], self.tensors[f"{self.prefix}{name}.bias"], eps=eps)

    def norm(self, name: str, x: Tensor, h: Hparams) -> Tensor:
        """Norm of x (T, n) by the architecture's kind, which may have no weights; x where the file has no such norm."""
        if name not in self:
            if h.architecture.norm.weighted or name not in UNWEIGHTED:
                return x
            return rms_norm(centred(x) if h.architecture.norm.layer_norm else x, const(1.0), eps=h.eps)
        if h.norm_groups > 1:
            groups = reshape(x, shape=(x.shape[0] * h.norm_groups, x.shape[1] // h.norm_groups))
            x = reshape(rms_norm(groups, const(1.0), eps=h.eps), shape=x.shape)
            y = mul(x, self[name])
            return y if self.low_rank is None else self.low_rank.scaled_by(f"{self.prefix}{name}.weight", x, y)
        if h.architecture.norm.layer_norm:
            y = self.layer_norm(name, x, h.eps)
        else:
            y = rms_norm(x, self[name], eps=h.eps)
        if self.low_rank is None:
            return y
        return self.low_rank.normed(
            f"{self.prefix}{name}.weight", x, y, h.eps, layer_norm=h.architecture.norm.layer_norm
        )

    def embedding(self, tokens: Tensor) -> Tensor:
        """Token embeddings (T, n_embd), which an encoder and its decoder share."""
        shared = replace(self, prefix="")
        x = get_rows(shared["token_embd"], tokens)
        x = x if (factor := shared.factor("token_embd")) is None else mul(x, factor)
        x = x if self.low_rank is None else self.low_rank.embedded(tokens, x)
        return x if self.noise is None else add(x, self.noise)


def check_weights(gguf: GGUFFile, h: Hparams, *, mtp: bool = False) -> dict[str, TensorSlice]:
    """The file's tensor slices by graph name; `mtp`: with the MTP block. ModelFileError names
    a tensor that is missing, of a wrong shape or type, or that no weight of the graph claims
    (`is_unused` has the exceptions)."""
    declared = dict(tensor_map(h, gguf.tensors))
    if mtp:
        declared |= mtp_tensors(h, gguf.tensors)
    parts = check_tensors(gguf, h, declared, lambda name: is_unused(h, name, mtp=mtp))
    for block in (f"blk.{h.n_layer + i}." for i in range(h.n_mtp)):
        of_block = [name for name in gguf.tensors if name.startswith(block)]
        if of_block and not any(name.startswith(f"{block}nextn.") for name in of_block):
            raise ModelFileError(
                gguf.path, f"tensor {shown(of_block[0])} is of a plain block, where {h.arch} has an MTP block"
            )
    return parts


def check_tensors(
    gguf: GGUFFile, h: Hparams, declared: Mapping[str, TensorSlice], is_unused: Callable[[str], bool]
) -> dict[str, TensorSlice]:
    """The slices among `declared`, and of the scales of their matrices, whose tensors the file has. ModelFileError:
    as of `check_weights`."""
    declared = {**declared, **_factors(declared, gguf.tensors)}
    rows_used: dict[str, int] = {}
    for part in declared.values():
        rows_used[part.source] = max(rows_used.get(part.source, 0), part.start + part.n_rows)
    for part in declared.values():
        info = gguf.tensors.get(part.source)
        if info is None:
            if part.required:
                raise ModelFileError(gguf.path, f"tensor '{part.source}' is missing")
            continue
        expected = (rows_used[part.source], *part.shape[1:])
        if part.n_experts:
            expected = (part.n_experts, *expected)
        if part.stacked:
            expected = (expected[0] // part.shape[1], part.shape[1], part.shape[1])
        expected = part.in_file or expected
        # a row may have been written as a vector
        if info.shape != expected and (1, *info.shape) != expected:
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has shape {info.shape}, expected {expected}")
        if info.dtype not in (("i32",) if part.limit else MATRIX_TYPES):
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has type {info.dtype}, which is not supported")
        if (part.as_f32 or len(part.shape) == 1) and info.dtype not in ("f32", "f16", "bf16"):
            kind = "small matrix" if part.as_f32 else "vector"
            raise ModelFileError(gguf.path, f"tensor '{info.name}' is a {kind} of type {info.dtype}")
    parts = {name: part for name, part in declared.items() if part.source in gguf.tensors}
    absent = declared.keys() - parts.keys()
    parts = {name: part for name, part in parts.items() if _weight_of(name) not in absent}
    claimed = {part.source for part in parts.values()}
    for name, part in parts.items():
        if name.endswith(".factor"):
            values = vector(gguf.bytes_of(part.source), gguf.tensors[part.source].dtype)
            if not np.isfinite(values).all() or not values.all():
                raise ModelFileError(gguf.path, f"tensor '{part.source}' has a scale that is 0, NaN or infinite")
    for name in gguf.tensors:
        weight, _, end = name.rpartition(".")
        if end == "input_scale" and f"{weight}.weight" in claimed:  # of activations that are 4-bit floats, too
            continue
        if name not in claimed and not is_unused(name):
            if end in ("scale", "input_scale") and f"{weight}.weight" not in gguf.tensors:
                raise ModelFileError(gguf.path, f"tensor {shown(name)} is a scale without its '{weight}.weight'")
            raise ModelFileError(gguf.path, f"tensor {shown(name)} is unknown in {h.arch} with {h.n_layer} blocks")
    return parts


def _factors(declared: Mapping[str, TensorSlice], present: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
    """Scales of whole matrices (NVFP4's, BitNet's) by graph name: one number, or one for each expert."""
    sources, factors = {part.source for part in declared.values()}, {}
    for name, part in declared.items():
        source = f"{part.source.removesuffix('.weight')}.scale"
        is_product = len(part.shape) == 2 and not part.as_f32 and name.endswith(".weight")
        is_there = part.source in present and source in present and source not in sources
        if not is_there or not is_product or re.fullmatch(_TABLES, name):
            continue
        own = TensorSlice(source, (1,))
        if part.n_experts and not part.in_file and "exps" in name:
            own = TensorSlice(source, (part.n_experts,), in_graph=(part.n_experts, 1))
        factors[name.removesuffix("weight") + "factor"] = own
    return factors


def scale_of(gguf: GGUFFile, declared: Mapping[str, TensorSlice], source: str) -> npt.NDArray[np.float32] | None:
    """The scale of a matrix of the file, or of each of its experts, in a shape that multiplies it."""
    scale, n = f"{source.removesuffix('.weight')}.scale", len(gguf.tensors[source].shape)
    if not any(part.source == scale and name.endswith(".factor") for name, part in declared.items()):
        return None
    return vector(gguf.bytes_of(scale), gguf.tensors[scale].dtype).reshape(-1, *[1] * (n - 1))


def numbers_of(gguf: GGUFFile, declared: Mapping[str, TensorSlice], source: str) -> npt.NDArray[np.float32]:
    """All numbers of a tensor of the file, times its scale where it has one."""
    from logitless.models.quantization.quantize import dequantized

    values, scale = dequantized(gguf.tensors[source], gguf.bytes_of(source)), scale_of(gguf, declared, source)
    return values if scale is None else values * scale


def _weight_of(name: str) -> str:
    """The weight whose bias this is; other names as they are."""
    return name.removesuffix("bias") + "weight" if name.endswith(".bias") else name


def load_weights(session: Session, gguf: GGUFFile, h: Hparams, *, mtp: bool = False) -> Weights:
    """Define every weight as a constant. `mtp`, ModelFileError: as in `check_weights`."""
    parts = check_weights(gguf, h, mtp=mtp)
    weights = {name: define_weight(session, gguf, name, part) for name, part in parts.items()}
    if h.architecture.norm.layer_norm:  # some have no biases
        zeros = np.zeros(h.n_embd, np.float32)
        norms = [name for name in weights if name.endswith("norm.weight") and not name.endswith(_OF_HEADS)]
        biases = [name.replace(".weight", ".bias") for name in norms]
        for name in biases:
            if name not in weights:
                weights[name] = session.constant(name, zeros)
    return Weights(weights)


def define_weight(session: Session, gguf: GGUFFile, name: str, part: TensorSlice, state: str = "") -> Tensor:
    """Define a slice as a constant, by its name or `state`. The file's pages leave the process
    once loaded. Numbers that are not finite are a ModelFileError when they are read."""
    info, plain = gguf.tensors[part.source], part.as_f32 or len(part.shape) == 1
    row_nbytes = info.nbytes // math.prod(info.shape if len(part.shape) == 1 else info.shape[:-1])
    dtype = "f32" if plain else info.dtype
    if part.transposed and DTYPES[dtype].quantised:  # along other rows
        dtype = "q8_0" if part.shape[1] % 32 == 0 else "f16"
    (rows, *columns), n = part.graph_shape, part.n_experts
    missing = -(rows // n) % LANES if n else 0  # of each expert or head

    def source() -> Bytes:
        numbers = loaded()
        if part.limit and ((values := numbers.view(np.int32)).min() < 0 or values.max() >= part.limit):
            raise ModelFileError(gguf.path, f"tensor '{info.name}' has a number that is not below {part.limit}")
        if not is_finite(numbers, dtype):
            raise ModelFileError(gguf.path, not_finite(info.name))
        if not missing:
            return numbers
        return np.pad(numbers.reshape(n, rows // n, -1), ((0, 0), (0, missing), (0, 0))).reshape(-1)

    def loaded() -> Bytes:
        if part.transposed:
            return _transposed(info, gguf.bytes_of(info.name), part, dtype)
        raw: Bytes = part.of(gguf.bytes_of(info.name).reshape(-1, row_nbytes)).reshape(-1)
        return vector(raw, info.dtype).view(np.uint8) if plain else raw

    shape = (rows + n * missing, *columns)
    return session.define(state or name, shape, dtype, source, constant=True, on_loaded=gguf.release)


def not_finite(name: str) -> str:
    """The text about a tensor of a file with NaN or infinity."""
    return f"tensor {shown(name)} has a number that is NaN or infinite"


def _transposed(info: TensorInfo, raw: Bytes, part: TensorSlice, dtype: str) -> Bytes:
    from logitless.models.quantization.quantize import dequantized, quantize

    values = part.gather(dequantized(info, raw))
    return (values if dtype == "f32" else quantize(values, dtype)).reshape(-1).view(np.uint8)


def vector(raw: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """A norm or bias as f32, from any type in the file."""
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    kind = DTYPES[dtype].numpy
    return np.ascontiguousarray(np.frombuffer(raw.tobytes(), kind).astype(np.float32))
