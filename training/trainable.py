"""Trainable parameters: all weights of a model, or LoRA adapters beside frozen weights."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import UPLOAD_NBYTES, Session
from logitless.graph.tensor import Tensor
from logitless.models.adapters.lora import Adapter, Pair, matrix_shape
from logitless.models.adapters.low_rank import EMBEDDING, LowRank
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model
from logitless.models.quantization.quantize import dequantized
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import Weights, check_weights
from logitless.training.errors import TrainingError

F32 = npt.NDArray[np.float32]
FULL, LORA = "train_model", "finetune_lora"
Owner = Callable[[Callable[[], Any]], Any]  # runs a call on the devices' thread


def at_once(call: Callable[[], Any]) -> Any:
    return call()


# flag → tensor names, as in llama.cpp's finetune
RANKS = {
    "tok_embd": "token_embd.weight",
    "out": "output.weight",
    "wq": "blk.*.attn_q.weight",
    "wk": "blk.*.attn_k.weight",
    "wv": "blk.*.attn_v.weight",
    "wo": "blk.*.attn_output.weight",
    "w1": "blk.*.ffn_gate.weight",
    "w2": "blk.*.ffn_down.weight",
    "w3": "blk.*.ffn_up.weight",
    "att_norm": "blk.*.attn_norm.weight",
    "ffn_norm": "blk.*.ffn_norm.weight",
    "out_norm": "output_norm.weight",
}
# recurrent layers, which llama.cpp's finetune does not name
_OF_STATES = tuple(f"blk.*.{name}.weight" for name in ("attn_qkv", "attn_gate", "ssm_[io]*", "shortconv.*_proj"))
# constants, router biases, and embedding or ranking heads: the language-model loss has no gradient
_WITHOUT_GRADIENT = re.compile(r"rope_|blk\.\d+\.exp_probs_b\.|cls\.|dense_")
# as large as the vocabulary, or unused by llama.cpp: trained only where a rank is given
_BY_NAME = ("tok_embd", "out", "att_norm", "ffn_norm", "out_norm")


@dataclass(frozen=True)
class LoraOptions:
    """LoRA ranks. `ranks` overrides `rank` by tensor kind (RANKS), 0 skips it; `alpha` 0: each
    pair's rank."""

    rank: int = 4
    alpha: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0

    def rank_of(self, name: str) -> int:
        kind = next((kind for kind, pattern in RANKS.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if kind is None:
            return self.rank if any(fnmatch.fnmatchcase(name, pattern) for pattern in _OF_STATES) else 0
        return self.ranks.get(kind, 0 if kind in _BY_NAME else self.rank)


@dataclass(frozen=True)
class Trainable:
    """A model with its trained parameters (variables of the session) in a fixed order, and their
    names in files. `owner`: runs a call on the thread that owns the devices."""

    kind: str  # FULL | LORA
    session: Session
    model: Model
    params: tuple[Tensor, ...]
    names: tuple[str, ...]  # in checkpoints
    lora: LoraOptions | None = None
    owner: Owner = at_once

    @property
    def n_params(self) -> int:
        return sum(p.nbytes // 4 for p in self.params)

    def read(self) -> dict[str, F32]:
        """Parameters by file name."""
        return {name: self.owner(partial(self.session.read, p.name)) for name, p in self._named}

    @property
    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.params, strict=True)

    def pieces(self, name: str) -> Iterator[F32]:
        """A parameter by file name, a block of rows at a time."""
        return self.numbers(self.params[self.names.index(name)])

    def numbers(self, t: Tensor) -> Iterator[F32]:
        """An f32 variable, a block of rows at a time, never copied as a whole."""
        row = t.nbytes // t.shape[0]
        step = max(1, UPLOAD_NBYTES // row) * row
        for start in range(0, t.nbytes, step):
            raw = self.owner(partial(self.session.read_bytes, t.name, start, min(step, t.nbytes - start)))
            yield raw.view(np.float32).reshape(-1, *t.shape[1:])

    def write(self, values: Mapping[str, F32]) -> None:
        for name, p in self._named:
            given = values.get(name)
            if given is None or given.shape != p.shape:
                shape = "missing" if given is None else f"of shape {given.shape}, expected {p.shape}"
                raise TrainingError(f"tensor '{name}' is {shape}")
            self.session.write(p.name, np.ascontiguousarray(given, np.float32))

    def adapter(self) -> Adapter:
        """The current adapter."""
        assert self.lora is not None
        values = self.read()
        weights = [name.removesuffix(".lora_a") for name in self.names if name.endswith(".lora_a")]
        return Adapter({w: Pair(values[f"{w}.lora_a"], values[f"{w}.lora_b"]) for w in weights}, self.lora.alpha)


def lora(session: Session, model: Model, options: LoraOptions, prefix: str = "train") -> Trainable:
    """LoRA parameters with product 0: A is normal with deviation 1/√n_in, B is 0."""
    rng = np.random.default_rng([options.seed, 4])
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    factors: dict[str, float] = {}
    names: list[str] = []
    for name, w in model.weights.tensors.items():
        rank = options.rank_of(name)
        if rank <= 0:
            continue
        n_out, n_in = matrix_shape(w.shape)
        a_shape, b_shape = ((n_out, rank), (n_in, rank)) if name == EMBEDDING else ((rank, n_in), (n_out, rank))
        start = (rng.standard_normal(a_shape, np.float32) / np.float32(np.sqrt(n_in))).astype(np.float32)
        a = session.define(f"{prefix}.{name}.lora_a", a_shape, source=_bytes_of(start))
        pairs[name] = a, session.define(f"{prefix}.{name}.lora_b", b_shape)
        factors[name] = options.alpha / rank if options.alpha else 1.0
        names += [f"{name}.lora_a", f"{name}.lora_b"]
    if not pairs:
        raise TrainingError("no tensor is left to train: all ranks are 0")
    params = tuple(t for pair in pairs.values() for t in pair)
    return Trainable(
        LORA, session, model.adapted(LowRank(pairs, factors=factors)), params, tuple(names), options
    )  # fmt: skip


def start_from(trainable: Trainable, adapter: Adapter) -> None:
    """Begin with an adapter's values instead. TrainingError: it has not these tensors and ranks.

    Of a fused matrix the file has one pair, with A stacked and B block-diagonal; a part's own
    columns are those where its B is not 0.
    """
    values: dict[str, F32] = {}
    for name in (n.removesuffix(".lora_a") for n in trainable.names if n.endswith(".lora_a")):
        pair = adapter.pairs.get(name)
        if pair is None:
            raise TrainingError(f"the adapter has no tensor '{name}.lora_a'")
        a, b = pair.a, pair.b
        assert trainable.lora is not None
        if (rank := trainable.lora.rank_of(name)) < pair.rank:
            first = int(b.any(axis=0).argmax()) // rank * rank
            a, b = a[first : first + rank], b[:, first : first + rank] * np.float32(rank / pair.rank)
        values |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    trainable.write(values)


def full(
    session: Session, model: Model, gguf: GGUFFile, h: Hparams, patterns: Sequence[str] = ("*",), prefix: str = "train"
) -> Trainable:
    """Full finetuning: weights whose name matches a pattern, in f32; the others stay as in the
    file."""
    tensors = dict(model.weights.tensors)
    params, names = [], []
    for name, part in check_weights(gguf, h).items():
        if _WITHOUT_GRADIENT.match(name) or not any(fnmatch.fnmatchcase(name, p) for p in patterns):
            continue

        def start(part: TensorSlice = part) -> F32:
            return part.gather(dequantized(gguf.tensors[part.source], gguf.bytes_of(part.source)))

        source = _bytes_from(start)
        tensors[name] = session.define(f"{prefix}.{name}", part.graph_shape, source=source, on_loaded=gguf.release)
        params.append(tensors[name])
        names.append(name)
    if not params:
        raise TrainingError(f"no tensor is named like {', '.join(patterns)}")
    trained = replace(model, weights=Weights(tensors))
    return Trainable(FULL, session, trained, tuple(params), tuple(names))


def _bytes_of(values: F32) -> Callable[[], npt.NDArray[np.uint8]]:
    return lambda: values.reshape(-1).view(np.uint8)


def _bytes_from(make: Callable[[], F32]) -> Callable[[], npt.NDArray[np.uint8]]:
    return lambda: np.ascontiguousarray(make(), np.float32).reshape(-1).view(np.uint8)
