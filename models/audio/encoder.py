"""Audio encoders: their base, and Whisper's with projector: spectrograms → rows of the text model.

Whisper is of Radford et al., 2022. Chunks are a batch; they do not attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from logitless.graph.ops.attention.encoder_attention import full_attention, mean_rows
from logitless.graph.ops.elementwise import add, gelu, mul, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import take_block, take_columns
from logitless.graph.tensor import Tensor, feed
from logitless.models.audio.params import N_FRAMES, N_POSITIONS, AudioHead, AudioParams
from logitless.models.media.layers import near_rows
from logitless.models.media.projector_encoder import Array, ProjectorEncoder
from logitless.models.media.projector_weights import ProjectorWeights

TAPS = 3  # of a convolution
HEAD_EPS = 1e-6  # of norms of the projector


@dataclass(frozen=True)
class AudioEncoder(ProjectorEncoder[AudioParams]):
    """Base of the audio encoders."""

    audio = True

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
        x = gelu(w.linear("a.conv1d.1", x, p.n_embd, (TAPS,), needs_bias=True))
        x = near_rows(x, feed("audio.taps", (TAPS * total,), "i32"), TAPS)
        x = gelu(w.linear("a.conv1d.2", x, p.n_embd, (TAPS,), needs_bias=True))
        x = self.layers(self.placed(x, N_POSITIONS), feed("audio.count", (n_chunks,), "i32"))
        if p.projector.pooled:
            first, pooled = (feed(f"audio.{name}", (total // 2,), "i32") for name in ("first", "pooled"))
            x = mean_rows(x, first, pooled)
        return [self.projected(self._stacked(self.normed(w, "a.post_ln", x), n_chunks))]

    def placed(self, x: Tensor, n_places: int) -> Tensor:
        """x (T, n_embd) with the vectors of its rows' places, of which a chunk has `n_places`."""
        name = "a.position_embd.weight"
        table = self.w.read(name, max(n_places, self.w.shape(name)[0]), self.p.n_embd)
        return add(x, get_rows(table, feed("audio.places", x.shape[:1], "i32")))

    def layers(self, x: Tensor, count: Tensor) -> Tensor:
        """The transformer's layers of x (T, n_embd), whose chunks of as many rows have `count` rows in use."""
        for layer in range(self.p.n_layer):
            b = replace(self.w, prefix=f"a.blk.{layer}.")
            x = add(x, self._attention(b, self.normed(b, "ln1", x), count))
            hidden = gelu(b.linear("ffn_up", self.normed(b, "ln2", x), self.p.n_ff))
            x = add(x, b.linear("ffn_down", hidden, self.p.n_embd))
        return x

    def normed(self, b: ProjectorWeights, name: str, x: Tensor) -> Tensor:
        return b.layer_norm(name, x, self.p.eps, needs_bias=False)

    def _attention(self, b: ProjectorWeights, x: Tensor, count: Tensor) -> Tensor:
        p = self.p
        shape = (x.shape[0], p.n_head, p.head_dim)
        q, k, v = (reshape(b.linear(f"attn_{name}", x, p.n_embd), shape=shape) for name in "qkv")
        length = x.shape[0] // count.shape[0]
        y = full_attention(q, k, v, count, length=length, scale=p.head_dim**-0.5)
        return b.linear("attn_out", reshape(y, shape=x.shape), p.n_embd)

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
            return w.linear("mm.a.fc", x, w.n_text)
        if self.p.projector.head is AudioHead.MLP:
            return w.linear("mm.a.mlp.2", gelu(w.linear("mm.a.mlp.1", x)), w.n_text)
        x = w.linear("mm.a.mlp.1", w.rms_norm("mm.a.norm_pre", x, HEAD_EPS))
        n = x.shape[1] // 2
        x = mul(take_columns(x, 0, n), silu(take_columns(x, n, n)))
        return w.linear("mm.a.mlp.2", w.rms_norm("mm.a.norm_mid", x, HEAD_EPS), w.n_text)
