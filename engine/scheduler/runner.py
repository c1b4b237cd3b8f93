"""Runner: the device's side of a step, as the scheduler needs it (engine/runner/model_runner.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from logitless.engine.batch import StepResult, UBatch
from logitless.engine.kv_cache.context_shift import Moves
from logitless.engine.kv_cache.host_cache import HostStore
from logitless.engine.kv_cache.sliding_window import WindowStore
from logitless.engine.kv_cache.slot_files import CacheKind
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.engine.runner.hidden_rows import HiddenRows
from logitless.graph.execution.expert_cache import CacheMemory
from logitless.models.media.prompt_media import Tile


class Runner(Protocol):
    """Runs batches on one or several devices."""

    @property
    def full_kv(self) -> HostStore:
        """KV blocks of layers with full attention."""

    @property
    def window_kv(self) -> WindowStore | None:
        """KV blocks of layers with a sliding window, if these have blocks of their own."""

    @property
    def states(self) -> HostStore | None:
        """Rows of recurrent state, if the model has any."""

    @property
    def hidden(self) -> HiddenRows | None:
        """Rows of last hidden states, if the model drafts by MTP."""

    @property
    def media(self) -> MediaEncoder | None:
        """The encoders of images and sounds, if a projector is loaded."""

    def encode_media(self, tiles: Sequence[Tile], /) -> Iterator[float]:
        """Encode tiles of one size that have room, in parts that steps may come between.

        Yields before each part the seconds that it will take; 0: unknown. Errors: as of `step`."""

    @property
    def cache_kind(self) -> CacheKind: ...

    @property
    def rerouted(self) -> Mapping[str, str]:
        """Ops routed to another device after they failed the start-up self-test, with the reason."""

    @property
    def expert_memory(self) -> CacheMemory:
        """Memory of the expert cache, and its use."""

    @property
    def exceeds_memory(self) -> bool:
        """True if weights are in a file, for host memory has no room."""

    def step(self, batch: UBatch, /) -> StepResult:
        """Run one batch. Raises StepFailed, or DeviceFailed if a device is lost."""

    @property
    def part_sizes(self) -> Mapping[int, float]:
        """Sizes of preemptible prefill in tokens, the largest first, with seconds of the longest
        part.

        Empty: prefill cannot be preempted."""

    def run_in_parts(self, batch: UBatch, /) -> Iterator[float]:
        """Run a prefill batch whose parts steps may come between.

        Yields after each part the seconds that the next one will take; 0: unknown."""

    @property
    def moves_cells(self) -> bool:
        """True if `move_cells` is supported."""

    @property
    def mrope(self) -> bool:
        """True if rows of images have positions of their own."""

    @property
    def start_token(self) -> int:
        """The token from which the decoder of a model with an encoder goes on; -1: the model has none."""

    def sampler_state(self, slot: int, /) -> tuple[float, ...]:
        """Device's state of the slot's sampler (mirostat, adaptive-p)."""

    def move_cells(self, moves: Moves, /) -> None:
        """Move KV cells between two steps: (from, to, positions to shift), in order."""
