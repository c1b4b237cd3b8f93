"""Audio encoder of Qwen 3 (ASR, Omni): spectrograms → rows of the text model.

Three convolutions make 13 rows of each span of 100 frames, by itself; then a transformer like
Whisper's sees up to eight spans. Chunks of one size are a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.graph.ops.elementwise import gelu
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, feed
from logitless.models.audio.encoder import WhisperEncoder
from logitless.models.audio.params import SPAN, SPANS, halved
from logitless.models.media.layers import convolved
from logitless.models.media.projector_encoder import Array

SIDE = 3  # of the convolutions, each of which halves both sides
ROWS = halved(SPAN, 3)  # of a span


@dataclass(frozen=True)
class SpanEncoder(WhisperEncoder):
    """Qwen 3's encoder and the projector of one file."""

    @property
    def usual_size(self) -> tuple[int, int]:
        """(frames, mel bins) of a whole chunk."""
        return SPANS * SPAN, self.p.n_mel

    def n_inputs(self, n_frames: int, n_mel: int) -> int:
        """Points of a chunk's smallest map, which bound the memory of a batch."""
        return self.p.n_rows(n_frames) * halved(n_mel, 3)

    def feeds(self, chunks: Sequence[Array]) -> dict[str, Array]:
        """Inputs of `rows` for spectrograms (frames, n_mel) f32 of one size, of whole spans."""
        n, n_rows = len(chunks), self.p.n_rows(len(chunks[0]))
        return {
            "audio.frames": np.concatenate(chunks),
            "audio.places": np.tile(np.arange(ROWS, dtype=np.int32), n * n_rows // ROWS),
            "audio.count": np.full(n, n_rows, np.int32),
        }

    def rows(self, n_chunks: int, n_frames: int, n_mel: int) -> list[Tensor]:
        """Rows (n_chunks · rows of a chunk, n_embd_text) f32; `feeds` has the inputs."""
        w, total = self.w, n_chunks * self.p.n_rows(n_frames)
        x = transpose(
            reshape(feed("audio.frames", (n_chunks * n_frames, n_mel)), shape=(-1, SPAN, n_mel)), axes=(0, 2, 1)
        )
        x = reshape(x, shape=(*x.shape, 1))
        for i in (1, 2, 3):
            x = gelu(convolved(w, f"a.conv2d.{i}", x, side=SIDE, stride=2, needs_bias=True))
        x = reshape(transpose(x, axes=(0, 2, 3, 1)), shape=(total, x.shape[3] * x.shape[1]))
        x = self.placed(w.linear("a.conv_out", x, self.p.n_embd), ROWS)
        x = self.layers(x, feed("audio.count", (n_chunks,), "i32"))
        return [self.projected(self.normed(w, "a.post_ln", x))]
