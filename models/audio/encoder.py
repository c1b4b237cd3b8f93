"""Audio encoders: their base, and Whisper's with projector: spectrograms → rows of the text model.

Whisper is of Radford et al., 2022. Chunks are a batch; they do not attend to each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.graph.ops.attention.encoder_attention import full_attention, mean_rows
from logitless.graph.ops.elementwise import add, gelu, mul, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import take_block, take_columns, transpose
from logitless.graph.tensor import Tensor, feed
from logitless.models.audio.params import N_FRAMES, N_POSITIONS, AudioHead, AudioParams
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.projector_weights import (
    Declared,
    DeclaredTensors,
    matrix,
    n_rows,
    norm,
    plain,
)
from logitless.models.weights.tensor_map import TensorSlice
from logitless.models.weights.weights import Weights

Array = npt.NDArray[Any]
TAPS = 3  # of a convolution
HEAD_EPS = 1e-6  # of norms of the projector


@dataclass(frozen=True)
class AudioEncoder:
    """Base of the audio encoders: parameters, and weights on the session of the text model."""

    bounded: ClassVar[bool] = False
    biased: ClassVar[tuple[str, ...]] = ()
    p: AudioParams
    w: Weights

    @staticmethod
    @abstractmethod
    def declared(gguf: GGUFFile, p: AudioParams, n_text: int) -> Declared:
        """The tensors of the encoder and the projector of a text model of this width."""

    @classmethod
    def tensors(cls, gguf: GGUFFile, p: AudioParams, n_text: int) -> DeclaredTensors:
        """The declared tensors, with the checks of a load."""
        parts = dict(cls.declared(gguf, p, n_text))
        return DeclaredTensors(p.kind, parts, audio=True, bounded=cls.bounded, biased=cls.biased)

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: AudioParams, n_embd_text: int) -> Self:
        """Define the weights. ModelFileError names the tensor at fault."""
        return cls(p, cls.tensors(gguf, p, n_embd_text).load(session, gguf))

    @property
    def states(self) -> list[str]:
        """Names of the encoder's constants on the session."""
        return [t.name for t in self.w.tensors.values()]

    @property
    def usual_size(self) -> tuple[int, int]:
        """(frames, mel bins) of a whole chunk."""
        return N_FRAMES, self.p.n_mel

    def row_places(self, n_frames: int, n_mel: int) -> tuple[Array, Array, Array]:
        """Indices of a chunk's rows in the prompt; the extra rows that images may have are missing."""
        rows = np.arange(self.p.n_rows(n_frames))
        return rows, rows[:0], rows[:0]


@dataclass(frozen=True)
class WhisperEncoder(AudioEncoder):
    """Whisper's encoder and the projector of one file."""

    biased = ("ln1.weight", "ln2.weight", "post_ln.weight")

    def n_inputs(self, n_frames: int, n_mel: int) -> int:
        """Positions of a chunk; they attend to each other."""
        return n_frames // 2

    def feeds(self, chunks: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for spectrograms (N_FRAMES, n_mel) f32."""
        p, n = self.p, len(chunks)
        padded = np.pad(np.stack(chunks), ((0, 0), (1, 1), (0, 0)))
        patches = np.lib.stride_tricks.sliding_window_view(padded, TAPS, 1)  # (n, N_FRAMES, n_mel, TAPS)
        frames = 2 * np.arange(N_POSITIONS)[:, None] + np.arange(-1, 2)
        zeros = n * N_FRAMES  # index of a row of zeros
        taps = np.where(frames < 0, zeros, np.arange(n)[:, None, None] * N_FRAMES + frames)
        feeds = {
            "audio.patches": np.ascontiguousarray(patches.reshape(n * N_FRAMES, -1), np.float32),
            "audio.taps": taps.reshape(-1).astype(np.int32),
            "audio.places": np.tile(np.arange(N_POSITIONS, dtype=np.int32), n),
            "audio.count": np.full(n, N_POSITIONS, np.int32),
        }
        if p.projector.pooled:
            feeds["audio.first"] = np.arange(0, n * N_POSITIONS, 2, dtype=np.int32)
            feeds["audio.pooled"] = np.full(n * N_POSITIONS // 2, 2, np.int32)
        return feeds

    def rows(self, n_chunks: int, n_frames: int, n_mel: int) -> list[Tensor]:
        """Rows (n_chunks · rows of a chunk, n_embd_text) f32; `feeds` has the inputs."""
        p, w = self.p, self.w
        total = n_chunks * N_POSITIONS
        x = feed("audio.patches", (n_chunks * N_FRAMES, TAPS * p.n_mel))
        x = pad_rows(gelu(w.linear("a.conv1d.1", x)), before=0, after=1)
        x = reshape(get_rows(x, feed("audio.taps", (TAPS * total,), "i32")), shape=(total, TAPS, p.n_embd))
        x = reshape(transpose(x, axes=(0, 2, 1)), shape=(total, TAPS * p.n_embd))
        x = gelu(w.linear("a.conv1d.2", x))
        x = add(x, get_rows(w["a.position_embd"], feed("audio.places", (total,), "i32")))
        x = self.layers(x, feed("audio.count", (n_chunks,), "i32"))
        if p.projector.pooled:
            first, pooled = (feed(f"audio.{name}", (total // 2,), "i32") for name in ("first", "pooled"))
            x = mean_rows(x, first, pooled)
        return [self.projected(self._stacked(w.layer_norm("a.post_ln", x, self.p.eps), n_chunks))]

    def layers(self, x: Tensor, count: Tensor) -> Tensor:
        """The transformer's layers of x (T, n_embd), whose chunks of as many rows have `count` rows in use."""
        for layer in range(self.p.n_layer):
            b = replace(self.w, prefix=f"a.blk.{layer}.")
            x = add(x, self._attention(b, b.layer_norm("ln1", x, self.p.eps), count))
            x = add(x, b.linear("ffn_down", gelu(b.linear("ffn_up", b.layer_norm("ln2", x, self.p.eps)))))
        return x

    def _attention(self, b: Weights, x: Tensor, count: Tensor) -> Tensor:
        p = self.p
        shape = (x.shape[0], p.n_head, p.head_dim)
        q, k, v = (reshape(b.linear(name, x), shape=shape) for name in ("attn_q", "attn_k", "attn_v"))
        length = x.shape[0] // count.shape[0]
        y = full_attention(q, k, v, count, length=length, scale=p.head_dim**-0.5)
        return b.linear("attn_out", reshape(y, shape=x.shape))

    def _stacked(self, x: Tensor, n_chunks: int) -> Tensor:
        """Stacks of neighbouring rows (rows, stack · n_embd); a chunk's last rows that fill no stack are left out."""
        p = self.p
        of_chunk, used = x.shape[0] // n_chunks, p.n_rows() * p.stack
        if used < of_chunk:
            x = reshape(x, shape=(n_chunks, of_chunk, p.n_embd))
            x = take_block(x, start=(0, 0, 0), shape=(n_chunks, used, p.n_embd))
        return reshape(x, shape=(n_chunks * p.n_rows(), p.stack * p.n_embd))

    def projected(self, x: Tensor) -> Tensor:
        w = self.w
        if self.p.projector.head is AudioHead.LINEAR:
            return w.linear("mm.a.fc", x)
        if self.p.projector.head is AudioHead.MLP:
            return w.linear("mm.a.mlp.2", gelu(w.linear("mm.a.mlp.1", x)))
        x = w.linear("mm.a.mlp.1", rms_norm(x, w["mm.a.norm_pre"], eps=HEAD_EPS))
        n = x.shape[1] // 2
        x = mul(take_columns(x, 0, n), silu(take_columns(x, n, n)))
        return w.linear("mm.a.mlp.2", rms_norm(x, w["mm.a.norm_mid"], eps=HEAD_EPS))

    @staticmethod
    def declared(gguf: GGUFFile, p: AudioParams, n_text: int) -> Declared:
        n = p.n_embd
        for i, n_in in ((1, p.n_mel), (2, n)):
            name = f"a.conv1d.{i}"
            in_file, in_graph = (n, n_in, TAPS), (n, TAPS * n_in)
            yield f"{name}.weight", TensorSlice(f"{name}.weight", (n * n_in, TAPS), in_file=in_file, in_graph=in_graph)
            yield f"{name}.bias", TensorSlice(f"{name}.bias", (n,), in_file=(n, 1))
        yield from transformer_tensors(gguf, p, N_POSITIONS)
        yield from _head(gguf, p, n_text)


def transformer_tensors(gguf: GGUFFile, p: AudioParams, n_places: int) -> Declared:
    """The position table of at least so many places, the layers and the last norm."""
    n = p.n_embd
    places = max(n_places, n_rows(gguf, "a.position_embd.weight"))
    yield "a.position_embd.weight", TensorSlice("a.position_embd.weight", (places, n))
    for i in range(p.n_layer):
        b = f"a.blk.{i}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from matrix(b + name, n, n)
        yield from norm(f"{b}ln1", n, required=True)
        yield from norm(f"{b}ln2", n, required=True)
        yield from matrix(f"{b}ffn_up", p.n_ff, n)
        yield from matrix(f"{b}ffn_down", n, p.n_ff)
    yield from norm("a.post_ln", n, required=True)


def _head(gguf: GGUFFile, p: AudioParams, n_text: int) -> Declared:
    head, n_in = p.projector.head, p.n_embd * p.stack
    if head is AudioHead.LINEAR:
        yield from matrix("mm.a.fc", n_text, n_in)
        return
    n_hidden = n_rows(gguf, "mm.a.mlp.1.weight")
    yield from matrix("mm.a.mlp.1", n_hidden, n_in)
    if head is AudioHead.GATED:
        n_hidden //= 2
        yield from plain("mm.a.norm_pre.weight", n_in, required=True)
        yield from plain("mm.a.norm_mid.weight", n_hidden, required=True)
    yield from matrix("mm.a.mlp.2", n_text, n_hidden)
