"""Audio encoder of Granite Speech: a conformer (Gulati et al., 2020), and a Q-Former (Li et al., 2023).

A row is two frames. Rows attend to those of their block, by content and distance (Shaw et al., 2018).
In the middle, probabilities of letters come back as vectors. In each window of the result, learned
queries attend to its rows, and become those of the text model. Chunks of one size are a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from logitless.graph.ops.attention.encoder_attention import full_attention
from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scale, silu
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.pointwise import sigmoid
from logitless.graph.ops.shape import pad_rows, reshape, slice_rows
from logitless.graph.ops.slicing import concat, take_block, take_columns
from logitless.graph.ops.training.loss import softmax
from logitless.graph.tensor import Tensor, feed
from logitless.models.audio.encoder import AudioEncoder
from logitless.models.audio.params import N_FRAMES, SpeechParams
from logitless.models.media.layers import distance_scores, scored_attention
from logitless.models.media.projector_encoder import Array
from logitless.models.media.projector_weights import ProjectorWeights

EPS = 1e-12  # of norms of the Q-Former


@dataclass(frozen=True)
class SpeechEncoder(AudioEncoder):
    """Granite Speech's encoder and the projector of one file."""

    @property
    def sizes(self) -> SpeechParams:
        assert self.p.speech is not None  # it makes this encoder
        return self.p.speech

    @property
    def usual_size(self) -> tuple[int, int]:
        """(rows, numbers) of half a minute."""
        return N_FRAMES // 2, self.p.n_mel

    def n_inputs(self, length: int, n_mel: int) -> int:
        """Rows of a chunk."""
        return length

    def feeds(self, chunks: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for spectrograms (length, n_mel) f32 of one size."""
        s, n, length = self.sizes, len(chunks), len(chunks[0])
        at, begin = np.arange(length), np.arange(n)[:, None] * length
        n_blocks = -(-length // s.block)
        filled = np.arange(n_blocks * s.block)
        near = np.arange(-(s.kernel // 2), length + s.kernel // 2)
        windows = np.arange(-(-length // s.window) * s.window)
        count = np.full(n_blocks, s.block)
        count[-1] = length - (n_blocks - 1) * s.block
        zeros = n * length  # index of a row of zeros
        ids: dict[str, Array] = {
            "to": np.minimum(filled, length - 1) + begin,
            "back": at + np.arange(n)[:, None] * len(filled),
            "count": np.tile(count, n),
            "distance": s.far + np.arange(s.block - 1, -s.block, -1),
            "near": np.where((near < 0) | (near >= length), zeros, near + begin),
            "taps": np.arange(s.kernel),
            "windows": np.where(windows < length, windows + begin, zeros),
        }
        feeds: dict[str, Array] = {f"audio.{name}": values.reshape(-1).astype(np.int32) for name, values in ids.items()}
        feeds["audio.frames"] = np.concatenate(chunks)
        feeds["audio.places"] = np.eye(s.block, dtype=np.float32)
        return feeds | self._query_feeds(n * len(windows) // s.window)

    def _query_feeds(self, n: int) -> dict[str, Array]:
        """Inputs of the Q-Former for n windows. Attention has as many queries as keys: the last one
        fills up the places."""
        s = self.sizes
        own = np.arange(n)[:, None] * s.n_queries
        ids: dict[str, Array] = {
            "own": np.tile(np.arange(s.n_queries), n),
            "spread": np.minimum(np.arange(s.window), s.n_queries - 1) + own,
            "row": np.arange(s.n_queries) + np.arange(n)[:, None] * s.window,
            "self": np.full(n, s.n_queries),
            "cross": np.full(n, s.window),
        }
        return {f"query.{name}": values.reshape(-1).astype(np.int32) for name, values in ids.items()}

    def rows(self, n: int, length: int, n_mel: int) -> list[Tensor]:
        """Rows (n · rows of a chunk, n_embd_text) f32; `feeds` has the inputs."""
        p, w, s = self.p, self.w, self.sizes
        n_blocks, total = n * -(-length // s.block), n * length
        x = w.linear("a.input_projection", feed("audio.frames", (total, n_mel)), p.n_embd)
        to, back = feed("audio.to", (n_blocks * s.block,), "i32"), feed("audio.back", (total,), "i32")
        count, distance = feed("audio.count", (n_blocks,), "i32"), feed("audio.distance", (2 * s.block - 1,), "i32")
        places = reshape(feed("audio.places", (s.block, s.block)), shape=(1, s.block, 1, s.block))
        places = broadcast_to(places, shape=(n_blocks, s.block, p.n_head, s.block))
        places = reshape(places, shape=(n_blocks * s.block * p.n_head, s.block))
        near = feed("audio.near", (n * (length + s.kernel - 1),), "i32")
        taps = feed("audio.taps", (s.kernel,), "i32")
        features = [x] if 0 in s.features else []
        for i in range(p.n_layer):
            b = replace(w, prefix=f"a.blk.{i}.")
            x = add(x, self._mlp(b, "", x))
            y = get_rows(b.layer_norm("ln1", x, p.eps), to)
            qkv = [reshape(b.linear(f"attn_{name}", y, p.n_embd), shape=(-1, p.head_dim)) for name in "qkv"]
            q = reshape(qkv[0], shape=(n_blocks, s.block, p.n_head, p.head_dim))
            name = "attn_rel_pos_emb"
            table = b.read(f"{name}.weight", 2 * s.far + 1, p.head_dim, source=name)
            scores = scale(distance_scores(q, get_rows(table, distance)), factor=p.head_dim**-0.5)
            y = scored_attention(qkv, scores, places, count, heads=p.n_head, factor=p.head_dim**-0.5)
            x = add(x, b.linear("attn_out", get_rows(y, back), p.n_embd))
            x = add(x, self._convolution(b, x, n, near, taps))
            x = b.layer_norm("ln2", add(x, self._mlp(b, "_1", x)), p.eps)
            features += [x] if i + 1 in s.features else []
            if i + 1 == p.n_layer // 2:
                x = add(x, w.linear("a.enc_ctc_out_mid", softmax(w.linear("a.enc_ctc_out", x)), p.n_embd))
        return [self._query_rows(concat(*features, x) if features else x, n * -(-length // s.window))]

    def _mlp(self, b: ProjectorWeights, suffix: str, x: Tensor) -> Tensor:
        x = silu(b.linear(f"ffn_up{suffix}", b.layer_norm(f"ffn_norm{suffix}", x, self.p.eps), self.p.n_ff))
        return scale(b.linear(f"ffn_down{suffix}", x, self.p.n_embd), factor=0.5)

    def _convolution(self, b: ProjectorWeights, x: Tensor, n: int, near: Tensor, taps: Tensor) -> Tensor:
        """Gated linear unit, depthwise convolution, scale and shift, SiLU, matrix."""
        width, length = max(1, b.shape("conv_pw1.weight")[0] // 2), x.shape[0] // n
        x = b.linear("conv_pw1", b.layer_norm("norm_conv", x, self.p.eps), 2 * width)
        x = mul(take_columns(x, 0, width), sigmoid(take_columns(x, width, width)))
        x = reshape(get_rows(pad_rows(x, before=0, after=1), near), shape=(n, -1, width))
        kernel = get_rows(b.transposed("conv_dw.weight", self.sizes.kernel, width), taps)
        factor, shift = (b.read(f"conv_norm.{end}", width) for end in ("weight", "bias"))
        y = None
        for tap in range(self.sizes.kernel):
            rows = reshape(take_block(x, start=(0, tap, 0), shape=(n, length, width)), shape=(n * length, width))
            part = mul(rows, slice_rows(kernel, start=tap, stop=tap + 1))
            y = part if y is None else add(y, part)
        assert y is not None  # a kernel has taps
        return b.linear("conv_pw2", silu(add(mul(y, factor), shift)), self.p.n_embd)

    def _query_rows(self, x: Tensor, n: int) -> Tensor:
        """Rows of the text model: the Q-Former's of each of n windows of x, the last one filled up with zeros."""
        w, s = self.w, self.sizes
        x = get_rows(pad_rows(x, before=0, after=1), feed("audio.windows", (n * s.window,), "i32"))
        width, n_queries = self.p.n_embd, s.n_queries
        queries = w.read("a.proj_query.weight", n_queries, width, source="a.proj_query", in_file=(1, n_queries, width))
        y = w.layer_norm("a.proj_norm", get_rows(queries, feed("query.own", (n * n_queries,), "i32")), EPS)
        spread, rows = feed("query.spread", (n * s.window,), "i32"), feed("query.row", (n * s.n_queries,), "i32")
        counts = {name: feed(f"query.{name}", (n,), "i32") for name in ("self", "cross")}

        def attention(b: ProjectorWeights, name: str, y: Tensor, source: Tensor | None) -> Tensor:
            q, k, v = (
                b.linear(f"{name}_attn_{part}", t, width)
                for part, t in zip("qkv", (y, *[y if source is None else source] * 2), strict=True)
            )
            q = get_rows(q, spread)
            if source is None:
                k, v = get_rows(k, spread), get_rows(v, spread)
            q, k, v = (reshape(t, shape=(n * s.window, s.n_head, -1)) for t in (q, k, v))
            count = counts["self" if source is None else "cross"]
            z = full_attention(q, k, v, count, length=s.window, scale=q.shape[2] ** -0.5)
            z = b.linear(f"{name}_attn_out", get_rows(reshape(z, shape=(n * s.window, -1)), rows), width)
            return b.layer_norm(f"{name}_attn_norm", add(z, y), EPS)

        for i in range(s.n_layer):
            b = replace(w, prefix=f"a.proj_blk.{i}.")
            y = attention(b, "cross", attention(b, "self", y, None), x)
            y = b.layer_norm("ffn_norm", add(b.linear("ffn_down", gelu(b.linear("ffn_up", y)), width), y), EPS)
        return w.linear("a.proj_linear", y, w.n_text)
