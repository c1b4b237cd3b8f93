"""Audio encoder of Gemma 4 (a conformer; Gulati et al., 2020): spectrograms → rows of the text model.

Two convolutions make a row of four frames. In each block a row attends to itself and the PAST rows
before it, by content and distance. Chunks of one size are a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from logitless.graph.ops.elementwise import add, mul, scale, silu, softcap, sum_to
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import div, exp, relu, sigmoid
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import take_columns
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.audio.encoder import AudioEncoder
from logitless.models.audio.params import halved
from logitless.models.media.layers import depthwise, near_rows
from logitless.models.media.projector_encoder import Array
from logitless.models.media.projector_weights import ProjectorWeights

SIDE = 3  # of the two convolutions
PAST = 11  # rows before it that a row attends to
TAPS = 5  # of the convolution of a block
CAP = 50.0  # of attention scores
EPS = 1e-6
_QUERY, _KEY = 1 / math.log(2), math.log(1 + math.e) / math.log(2)  # scales of queries and keys


@dataclass(frozen=True)
class ConformerEncoder(AudioEncoder):
    """Gemma 4's encoder and the projector of one file."""

    def n_inputs(self, n_frames: int, n_mel: int) -> int:
        """Rows of a chunk."""
        return self.p.n_rows(n_frames)

    def feeds(self, chunks: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for spectrograms (frames, n_mel) f32 of one size."""
        n, (n_frames, n_mel) = len(chunks), chunks[0].shape
        padded = np.pad(np.stack(chunks), ((0, 0), (1, 1), (1, 1)))
        patches = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), (1, 2))[:, ::2, ::2]
        height, width = halved(n_frames), halved(n_mel)
        places = np.pad(np.arange(height * width).reshape(height, width), 1, constant_values=-1)
        taps = np.lib.stride_tricks.sliding_window_view(places, (SIDE, SIDE))[::2, ::2]
        total = self.p.n_rows(n_frames)
        before = np.arange(total) - np.arange(1 + PAST)[:, None]  # (distances, rows)
        half = self.p.n_embd // 2
        angles = np.arange(1 + PAST)[:, None] * 1e4 ** (-np.arange(half) / max(1, half - 1))
        return {
            "audio.patches": np.ascontiguousarray(patches.reshape(-1, SIDE**2), np.float32),
            "audio.taps": _of_chunks(taps, n, height * width, 1),
            "audio.past": _of_chunks(before, n, total, 1 + PAST),
            "audio.seen": np.tile(before >= 0, (1, n)).reshape(1 + PAST, n * total, 1, 1).astype(np.float32),
            "audio.distances": np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32),
            "audio.before": _of_chunks(before[:TAPS][::-1], n, total, TAPS),
            "audio.kernel": np.repeat(np.arange(TAPS, dtype=np.int32), n * total),
        }

    def rows(self, n_chunks: int, n_frames: int, n_mel: int) -> list[Tensor]:
        """Rows (n_chunks · rows of a chunk, n_embd_text) f32; `feeds` has the inputs."""
        p, w = self.p, self.w
        height, width = halved(n_frames), halved(n_mel)
        total, columns = n_chunks * p.n_rows(n_frames), halved(width)
        x = feed("audio.patches", (n_chunks * height * width, SIDE**2))
        x = self._convolved("a.conv1d.0", x)
        x = near_rows(x, feed("audio.taps", (total * columns * SIDE**2,), "i32"), SIDE**2)
        x = self._convolved("a.conv1d.1", x)
        x = w.linear("a.input_projection", reshape(x, shape=(total, columns * x.shape[1])), p.n_embd)
        past = feed("audio.past", ((1 + PAST) * total,), "i32")
        mask = feed("audio.seen", (1 + PAST, total, 1, 1))
        distances = feed("audio.distances", (1 + PAST, p.n_embd // 2 * 2))
        before, kernel = (feed(f"audio.{name}", (TAPS * total,), "i32") for name in ("before", "kernel"))
        for layer in range(p.n_layer):
            b = replace(w, prefix=f"a.blk.{layer}.")
            x = add(x, self._mlp(b, "", x))
            x = add(x, _normed(b, "attn_post_norm", self._attention(b, x, past, mask, distances)))
            x = add(x, self._convolution(b, x, before, kernel))
            x = _normed(b, "ln2", add(x, self._mlp(b, "_1", x)))
        x = w.linear("a.pre_encode.out", x) if "a.pre_encode.out" in w else x
        factor = w.optional("mm.a.soft_emb_norm.weight", x.shape[1])
        x = rms_norm(x, const(1.0) if factor is None else factor, eps=EPS)
        return [w.linear("mm.a.input_projection", x, w.n_text)]

    def _convolved(self, name: str, patches: Tensor) -> Tensor:
        x = self.w.linear(name, patches, 0, (SIDE, SIDE))
        name = f"{name}.norm"
        return relu(self.w.layer_norm(name, x, EPS, needs_bias=False) if name in self.w else x)

    def _mlp(self, b: ProjectorWeights, suffix: str, x: Tensor) -> Tensor:
        x = silu(b.linear(f"ffn_up{suffix}", b.rms_norm(f"ffn_norm{suffix}", x, EPS), self.p.n_ff))
        return scale(_normed(b, f"ffn_post_norm{suffix}", b.linear(f"ffn_down{suffix}", x, self.p.n_embd)), factor=0.5)

    def _attention(self, b: ProjectorWeights, x: Tensor, past: Tensor, mask: Tensor, distances: Tensor) -> Tensor:
        p, (n, width) = self.p, x.shape
        first, second = (b.optional(f"{name}.weight", width) for name in ("attn_pre_norm", "ln1"))
        if (factor := second if first is None else first) is not None:
            x = rms_norm(x, factor, eps=EPS)
        heads = (1, n, p.n_head, p.head_dim)
        q = scale(reshape(b.linear("attn_q", x, width), shape=heads), factor=_QUERY * p.head_dim**-0.5)
        k = scale(reshape(b.linear("attn_k", x, width), shape=heads), factor=_KEY)
        factors = (b.optional(f"{name}.weight", p.head_dim) for name in ("per_dim_scale", "per_dim_k_scale"))
        q, k = (t if factor is None else mul(t, factor) for t, factor in zip((q, k), factors, strict=True))
        k, v = (self._past(t, past) for t in (reshape(k, shape=x.shape), b.linear("attn_v", x, width)))
        if "attn_k_rel" in b:
            by_distance = b.linear("attn_k_rel", distances, width)
            k = add(k, reshape(by_distance, shape=(1 + PAST, 1, p.n_head, p.head_dim)))
        scores = sum_to(mul(k, q), shape=(1 + PAST, n, p.n_head, 1))
        weights = mul(exp(softcap(scores, cap=CAP)), mask)  # at most e^50
        y = div(sum_to(mul(v, weights), shape=heads), sum_to(weights, shape=(1, n, p.n_head, 1)))
        return b.linear("attn_out", reshape(y, shape=x.shape), width)

    def _past(self, x: Tensor, past: Tensor) -> Tensor:
        """Rows (T, n_embd) as each row sees them: (1 + PAST, T, H, D), zero where there are none."""
        rows = get_rows(pad_rows(x, before=0, after=1), past)
        return reshape(rows, shape=(1 + PAST, x.shape[0], self.p.n_head, self.p.head_dim))

    def _convolution(self, b: ProjectorWeights, x: Tensor, before: Tensor, kernel: Tensor) -> Tensor:
        """Gated linear unit, causal depthwise convolution, norm, SiLU, matrix."""
        shape = x.shape
        x = b.linear("conv_pw1", _normed(b, "conv_norm", x), 2 * shape[1])
        x = mul(take_columns(x, 0, shape[1]), sigmoid(take_columns(x, shape[1], shape[1])))
        x = depthwise(x, b.transposed("conv_dw.weight", TAPS, shape[1]), before, kernel, TAPS)
        if (bias := b.optional("conv_dw.bias", shape[1])) is not None:
            x = add(x, bias)
        return b.linear("conv_pw2", silu(_normed(b, "norm_conv", x)), shape[1])


def _of_chunks(ids: Array, n: int, size: int, parts: int) -> Array:
    """Row indices of n chunks of `size` rows (i32), from those of one chunk in `parts` lists. A negative
    index becomes n · size, the row of zeros behind all chunks."""
    ids = ids.reshape(parts, 1, -1)
    return np.where(ids < 0, n * size, ids + size * np.arange(n)[:, None]).reshape(-1).astype(np.int32)


def _normed(b: ProjectorWeights, name: str, x: Tensor) -> Tensor:
    """RMS norm of x (T, n); x itself where the file has no such norm."""
    return b.rms_norm(name, x, EPS) if name in b else x
