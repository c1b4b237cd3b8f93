"""Model: hyper-parameters and weights of a GGUF file on a session; tokens → logits or vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.elementwise import scaled, softcap
from logitless.graph.ops.training.loss import softmax
from logitless.graph.tensor import Tensor
from logitless.models.adapters.low_rank import LowRank
from logitless.models.architectures import decoder, encoder, feed_forward, gemma3n
from logitless.models.architectures.attention import cross_keys_values
from logitless.models.architectures.registry import ARCHITECTURES, DRAFTERS
from logitless.models.architectures.rope import Rotary, define_rotary
from logitless.models.batch import Batch, Cached, Memory, PagedMemory, Rows, Sequences, Texts
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams, read_hparams
from logitless.models.weights.weights import Weights, check_weights, load_weights

FORWARD = {
    name: encoder.forward
    if architecture.norm.post_residual
    else gemma3n.forward
    if architecture.altup
    else decoder.forward
    for name, architecture in ARCHITECTURES.items()
}


_OTHER_KINDS = {  # by general.type
    "adapter": "is a LoRA adapter, not a model: load its base model, and this as its adapter (lora, --lora)",
    "checkpoint": "is a training checkpoint, not a model: go on with Trainer.resume or finetune --checkpoint-in",
    "imatrix": "is an importance matrix, not a model: give it to quantize --imatrix",
    "mmproj": "is the encoder of a multimodal model: load the file of its text model",
}


@dataclass(frozen=True)
class Model:
    hparams: Hparams
    weights: Weights
    rotary: Rotary
    # MTP block behind the layers (models/architectures/mtp.py), if it is loaded
    mtp: Weights | None = None
    encoder_rotary: Rotary | None = None  # of the encoder in front, where there is one

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights of all layers and of the MTP block, by name."""
        return {**self.weights.tensors, **(self.mtp.tensors if self.mtp is not None else {})}

    def adapted(self, low_rank: LowRank) -> Model:
        """The same model with LoRA adapters."""
        return replace(self, weights=replace(self.weights, low_rank=low_rank))

    def logits(self, batch: Batch, memory: PagedMemory) -> Tensor:
        """Logits (R, n_vocab) f32 of the batch's `out` rows, or of all."""
        return self.forward(batch, Cached(memory, batch))

    def cache_writes(self, batch: Batch, memory: PagedMemory) -> list[Tensor]:
        """KV and state writes of a prefill-only batch (no logits)."""
        cached = Cached(memory, batch)
        self.hidden(batch, cached)
        return cached.writes(self.hparams.n_layer_kv - 1)

    def encoded(self, text: Texts, cells: Batch, memory: PagedMemory) -> list[Tensor]:
        """Writes of the encoder's output of a prompt, as keys and values of cross-attention, to `cells`."""
        h, cached, x = self.hparams, Cached(memory, cells), self.hidden(text, text)
        for i in range(h.n_layer):
            cached.store(h.n_layer + i, cross_keys_values(self.weights.block(i), x, h, i))
        return [write for layer in cached.stored.values() for write in layer]

    def training_logits(self, sequences: Sequences) -> Tensor:
        """Logits (T, n_vocab) f32 of whole sequences without a cache; differentiable by
        `logitless.graph.autodiff.backward`."""
        return self.forward(sequences, sequences)

    def forward(self, rows: Rows, memory: Memory) -> Tensor:
        return self.head(self.hidden(rows, memory), rows.out.ids if rows.out else None)

    def head(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """LM head: logits (R, n_vocab) f32 of hidden states (R, n_embd); `out`: their rows in
        the batch, where not all."""
        w = self.weights if out is None else self.weights.of_rows(out)
        return self.scale_logits(w.linear("output" if "output" in w else "token_embd", x))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply logit scale and soft-cap to the LM head's output."""
        h = self.hparams
        logits = scaled(logits, h.logit_scale)
        return softcap(logits, cap=h.final_softcap) if h.final_softcap else logits

    def hidden(self, rows: Rows, memory: Memory, layer_inputs: list[Tensor] | None = None) -> Tensor:
        """Last hidden states (R, n_embd) f32 of these rows, after the final norm.

        `layer_inputs`: see decoder.forward; only of models that `exposes_layers` allows."""
        if self.encoder_rotary is not None and isinstance(rows, Texts):
            w = replace(self.weights, prefix="enc.", directions={})
            return decoder.forward(w, self.hparams.encoder, self.encoder_rotary, rows, memory)
        parts = self.weights, self.hparams, self.rotary, rows, memory
        return FORWARD[self.hparams.arch](*parts) if layer_inputs is None else decoder.forward(*parts, layer_inputs)

    def projected(self, x: Tensor) -> Tensor:
        """Text embeddings (R, n) of pooled hidden states (R, n_embd): the dense layers of
        sentence-transformers, where the file has them."""
        for name in ("dense_2", "dense_3"):
            x = self.weights.linear(name, x) if name in self.weights else x
        return x

    @property
    def ranks(self) -> bool:
        """True for a reranker: the file has a classification head."""
        return "cls" in self.weights or "cls.output" in self.weights

    def scores(self, x: Tensor, out: Tensor) -> Tensor:
        """Reranking scores (R, n) f32 of pooled hidden states (R, n_embd) of these rows; column 0 is the relevance."""
        w = self.weights.of_rows(out)
        architecture = self.hparams.architecture
        if "cls" in w:
            x = w.linear("cls", x)
            # tanh
            x = feed_forward.activated(self.hparams, x) if architecture.ranking.of_mean else softcap(x, cap=1.0)
        x = w.norm("cls.norm", x, self.hparams)
        x = w.linear("cls.output", x) if "cls.output" in w else x
        return softmax(x) if architecture.ranking.softmax else x


def exposes_layers(h: Hparams) -> bool:
    """True if the hidden states between layers can be read: one residual stream goes through all of them."""
    return FORWARD[h.arch] is decoder.forward and not h.n_encoder


def hparams_of(gguf: GGUFFile) -> Hparams:
    """Hyper-parameters, checked against tensors and vocabulary; n_vocab is the embedding's
    number of rows. ModelFileError names the key or tensor at fault."""
    check_is_model(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else 0
    hparams = read_hparams(gguf.metadata, rows, str(gguf.path))
    if embedding is None:
        raise ModelFileError(gguf.path, "tensor 'token_embd.weight' is missing")
    if not rows:
        raise ModelFileError(
            gguf.path,
            f"tensor 'token_embd.weight' has shape {embedding.shape}, expected (n_vocab, {hparams.n_embd})",
        )
    n_tokens = gguf.metadata.length("tokenizer.ggml.tokens")
    if n_tokens is not None and n_tokens != rows:
        raise ModelFileError(
            gguf.path, f"key 'tokenizer.ggml.tokens' has {n_tokens} tokens, tensor 'token_embd.weight' has {rows} rows"
        )
    if hparams.experts and hparams.architecture.moe.in_any_layer:
        blocks = range(hparams.n_layer + hparams.n_mtp)
        with_router = tuple(f"blk.{i}.ffn_gate_inp.weight" in gguf.tensors for i in blocks)
        hparams = replace(hparams, experts=replace(hparams.experts, in_layers=with_router))
    check_weights(gguf, hparams)
    return hparams


def check_is_model(gguf: GGUFFile) -> None:
    """ModelFileError: the file is an adapter, a checkpoint, an importance matrix, a projector or a drafter."""
    if problem := _OTHER_KINDS.get(_kind(gguf)):
        raise ModelFileError(gguf.path, problem)
    if (arch := gguf.metadata.get("general.architecture")) in DRAFTERS:
        raise ModelFileError(
            gguf.path, f"is a drafter ({arch}), not a model: load its model, and this as --model-draft"
        )
    if "general.architecture" not in gguf.metadata:
        raise ModelFileError(gguf.path, "key 'general.architecture' is missing")


def _kind(gguf: GGUFFile) -> str:
    """general.type, which the first adapters and encoders do not have."""
    if "adapter.type" in gguf.metadata:
        return "adapter"
    return "mmproj" if gguf.metadata.get("general.architecture") == "clip" else str(gguf.metadata.get("general.type"))


def define_model(session: Session, gguf: GGUFFile, hparams: Hparams, n_ctx: int, *, mtp: bool = False) -> Model:
    """Define the weights on a session; bytes are read at first use. `mtp`: with the MTP block
    (models/architectures/mtp.py). ModelFileError names the tensor at fault."""
    if hparams.learned_positions and n_ctx > hparams.n_ctx_train:
        raise ModelFileError(gguf.path, f"has positions for {hparams.n_ctx_train} tokens, not for a context of {n_ctx}")
    weights, block = load_weights(session, gguf, hparams, mtp=mtp).apart(hparams.n_layer)
    rotary, of_encoder = define_rotary(session, gguf, hparams, n_ctx), None
    if hparams.n_encoder:
        of_encoder = define_rotary(session, gguf, hparams.encoder, n_ctx, "enc.")
    return Model(hparams, weights, rotary, block if mtp else None, of_encoder)


@dataclass(frozen=True)
class AdaptedModel:
    """`model(n)` is the model for n rows, `feeds(n)` the inputs that it needs besides tokens;
    `name` tells its graphs from those of other adapters."""

    session: Session
    model: Callable[[int], Model]
    name: str = ""
    feeds: Callable[[int], dict[str, npt.NDArray[Any]]] = lambda _: {}
