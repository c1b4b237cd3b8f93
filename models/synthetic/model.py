"""Synthetic models: GGUF files of any size and type with random weights, for benchmarks and tests.

The files are complete Llama models with a working vocabulary, so they load in llama.cpp as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from logitless.models.gguf.write import Key, Progress, f32, text, u32
from logitless.models.quantization.presets import ALIASES, file_type
from logitless.models.quantization.quantize import DTYPES, storable_dtype
from logitless.models.synthetic.random_tensors import RandomTensor, write_random
from logitless.models.synthetic.vocabulary import vocabulary, vocabulary_keys

# spread of the logits: about a trained model's, neither uniform nor a single choice
_LOGIT_STD = 4.0


@dataclass(frozen=True)
class ModelShape:
    """The hyper-parameters of a Llama model, under their GGUF names. The output matrix is the embedding's."""

    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int = 2048
    rope_base: float = 10000.0
    n_expert: int = 0  # of a layer, each with n_ff; 0: no mixture of experts
    n_expert_used: int = 0

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def keys(self, n_vocab: int) -> dict[str, Key]:
        """The hyper-parameters of a file with so many tokens."""
        experts = {"expert_count": u32(self.n_expert), "expert_used_count": u32(self.n_expert_used)}
        keys = {
            "vocab_size": u32(n_vocab),
            "context_length": u32(self.n_ctx),
            "embedding_length": u32(self.n_embd),
            "block_count": u32(self.n_layer),
            "feed_forward_length": u32(self.n_ff),
            **(experts if self.n_expert else {}),
            "attention.head_count": u32(self.n_head),
            "attention.head_count_kv": u32(self.n_head_kv),
            "attention.layer_norm_rms_epsilon": f32(1e-5),
            "rope.dimension_count": u32(self.head_dim),
            "rope.freq_base": f32(self.rope_base),
        }
        return {f"llama.{name}": key for name, key in keys.items()}


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(64, 2, 4, 2, 96, 512),
    # the smallest whose rows are whole blocks of the K types
    "mini": ModelShape(256, 2, 4, 2, 512, 512),
    "15M": ModelShape(288, 6, 6, 6, 768, 32000),
    "135M": ModelShape(576, 30, 9, 3, 1536, 49152),
    "1B": ModelShape(2048, 16, 32, 8, 8192, 128256, 8192, 500000.0),
    "3B": ModelShape(3072, 28, 24, 8, 8192, 128256, 8192, 500000.0),
    "8B": ModelShape(4096, 32, 32, 8, 14336, 128256, 8192, 500000.0),
    "tiny-moe": ModelShape(64, 2, 4, 2, 96, 512, n_expert=8, n_expert_used=3),
    "7B-A1B": ModelShape(2048, 16, 16, 16, 1024, 50304, 4096, n_expert=64, n_expert_used=8),
}


def parse_dtype(name: str) -> tuple[str, str]:
    """The types of the matrices and of the token embedding that a file type's name means, in lower
    case.

    `Q4_K_M`, `Q4_K_S`, `Q5_K_M` and `Q5_K_S` mean Q4_K or Q5_K with the embedding (the output too,
    here) in Q6_K; any other name means itself for both. Raises ValueError for a type that we cannot
    write."""
    dtype = name.lower()
    if dtype in ("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s"):
        return dtype[:4], "q6_k"
    if dtype not in DTYPES:
        raise ValueError(f"unknown type {name!r}; the types are {', '.join(DTYPES).upper()}, Q4_K_M and Q5_K_M")
    return dtype, dtype


def synthesize(
    path: str | Path,
    shape: str | ModelShape = "15M",
    dtype: str = "Q8_0",
    seed: int = 0,
    *,
    arch: str = "llama",
    progress: Progress | None = None,
) -> None:
    """Write a model with random weights. The same arguments give the same bytes.

    `shape` is a name of SHAPES or a Shape, `dtype` a type's name in any case (see parse_dtype);
    matrices whose rows are not whole blocks of it get the type that llama.cpp would fall back to,
    and norms are always F32. The file appears under its name only when it is complete. Raises
    ValueError for a shape, type or architecture that is not known."""
    if arch != "llama":
        raise ValueError(f"unknown architecture {arch!r}; only 'llama' can be synthesized")
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; the shapes are {', '.join(SHAPES)}")
        label, shape = shape, SHAPES[shape]
    else:
        label = "custom"
    matrix, embedding = parse_dtype(dtype)
    name = {**ALIASES, "MXFP4": "MXFP4_MOE"}.get(dtype.upper(), dtype.upper())
    keys = {
        "general.name": text(f"random {label} {dtype.upper()}, seed {seed}"),
        "general.file_type": u32(file_type(name)),
        "general.quantization_version": u32(2),
        **shape.keys(shape.n_vocab),
        **vocabulary_keys(*vocabulary(shape.n_vocab)),
    }
    write_random(path, arch, keys, _tensors(shape, matrix, embedding), seed, progress)


def _tensors(shape: ModelShape, matrix: str, embedding: str) -> Iterator[RandomTensor]:
    def linear(name: str, n_out: int, n_in: int, dtype: str = matrix) -> RandomTensor:
        # a standard deviation of 1/sqrt(n_in) keeps activations of unit size
        return RandomTensor(f"{name}.weight", (n_out, n_in), storable_dtype(dtype, n_in), n_in**-0.5)

    def experts(name: str, n_out: int, n_in: int) -> RandomTensor:
        shape_ = (shape.n_expert, n_out, n_in)
        return RandomTensor(f"{name}_exps.weight", shape_, storable_dtype(matrix, n_in), n_in**-0.5)

    def norm(name: str, mean: float = 1.0) -> RandomTensor:
        return RandomTensor(f"{name}.weight", (shape.n_embd,), "f32", 0.1 * mean, mean)

    n_kv = shape.n_head_kv * shape.head_dim
    yield linear("token_embd", shape.n_vocab, shape.n_embd, embedding)
    yield norm("output_norm", _LOGIT_STD)
    for i in range(shape.n_layer):
        yield norm(f"blk.{i}.attn_norm")
        yield linear(f"blk.{i}.attn_q", shape.n_embd, shape.n_embd)
        yield linear(f"blk.{i}.attn_k", n_kv, shape.n_embd)
        yield linear(f"blk.{i}.attn_v", n_kv, shape.n_embd)
        yield linear(f"blk.{i}.attn_output", shape.n_embd, shape.n_embd)
        yield norm(f"blk.{i}.ffn_norm")
        block: Callable[[str, int, int], RandomTensor] = linear
        if shape.n_expert:
            yield linear(f"blk.{i}.ffn_gate_inp", shape.n_expert, shape.n_embd, "f32")
            block = experts
        yield block(f"blk.{i}.ffn_gate", shape.n_ff, shape.n_embd)
        yield block(f"blk.{i}.ffn_up", shape.n_ff, shape.n_embd)
        yield block(f"blk.{i}.ffn_down", shape.n_embd, shape.n_ff)
