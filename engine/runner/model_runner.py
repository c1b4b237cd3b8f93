"""Model runner: one model on its devices; runs the batch of a scheduler step.

A step's graph is tokens → logits → sampled ids. Plans are cached by bucketed shapes; everything
else of a request (temperatures, block tables, random numbers, penalties) is an input. One thread at
a time may call `step`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from logitless.backends.errors import DeviceError, DeviceLost
from logitless.backends.registry import can_open, open_backends
from logitless.engine.batch import BLOCK_SIZE, DeviceFailed, StepFailed, StepResult, UBatch
from logitless.engine.kv_cache.block_pool import pool_size, window_pool_size
from logitless.engine.kv_cache.recurrent_state import n_state_rows
from logitless.engine.kv_cache.slot_files import CacheKind
from logitless.engine.media import media_encoder
from logitless.engine.media.media_encoder import MediaEncoder
from logitless.engine.runner.buckets import USUAL_STREAMS, StepShape, draft_shape, shape_of, usual
from logitless.engine.runner.cache_types import check_types, refusal
from logitless.engine.runner.copy_move import KVMover
from logitless.engine.runner.device_store import DeviceBlocks, DeviceStore
from logitless.engine.runner.embedder import Embedder
from logitless.engine.runner.hidden_rows import N_EXAMPLES, HiddenRows
from logitless.engine.runner.lost_devices import LostDevices
from logitless.engine.runner.placement import ANYWHERE, MIN_CTX, PlacementOptions, chosen, division, excess, fit, usable
from logitless.engine.runner.preemptible_prefill import PreemptiblePrefill
from logitless.engine.runner.step_graph import StepGraph
from logitless.engine.runner.step_inputs import StepFeeds, token_masks
from logitless.engine.sampling.sampler import split_log_probs, split_probs
from logitless.graph.backend import Backend
from logitless.graph.execution.expert_cache import CacheMemory
from logitless.graph.execution.plan import Plan
from logitless.graph.execution.session import DeviceBytes, Measurement, Session
from logitless.graph.ops.sampling import samplers
from logitless.graph.order import toposort
from logitless.graph.tensor import Tensor, feed
from logitless.models.adapters.control_vector import digest, read_directions, steered
from logitless.models.adapters.full_finetunes import FullFinetunes
from logitless.models.adapters.low_rank import LowRank
from logitless.models.adapters.stacked_lora import AdapterChoice, StackedLora
from logitless.models.architectures.mtp import Hidden
from logitless.models.batch import PagedMemory
from logitless.models.drafters.draft_head import HeadValues
from logitless.models.drafters.drafter_file import open_drafter
from logitless.models.drafters.kinds import define_drafter
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.overrides import NONE, Overrides
from logitless.models.media.params import MediaParams, params_for
from logitless.models.media.prompt_media import Tile
from logitless.models.model import AdaptedModel, Model, define_model, hparams_of
from logitless.models.weights.fingerprint import fingerprint
from logitless.models.weights.placement import Places, prepare_host, set_placement
from logitless.models.weights.weights import check_weights

if TYPE_CHECKING:
    from logitless.backends.self_test import Failures, SelfTest

log = logging.getLogger("logitless.engine")
MOST_MEDIA_ROWS = 8192  # maximum of rows of images and sounds on the device
RETREAT = 0.8  # of the devices' memory, after an allocation that failed
MOST_RETREATS = 6  # then the CPU has all layers


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options of a model runner; names follow llama-server's flags."""

    n_ctx: int = 0  # tokens in the KV cache; 0: the training context (times the slots, if not unified)
    n_slots: int = 4
    n_ubatch: int = 512
    unified: bool = True
    n_ctx_slot: int = 0  # most tokens of a slot; 0: its whole share
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int = 0  # 0: every core of the process
    devices: tuple[str, ...] = ("cpu",)
    device_reason: str = ""  # why these were chosen; "": the user names them
    placement: PlacementOptions = ANYWHERE
    embeddings: bool = False  # prepare the kernels of embeddings at load
    warmup: bool = True  # plans of usual steps are made before a request needs them
    control_vectors: tuple[tuple[str, float], ...] = ()  # files and their scales
    control_layers: tuple[int, int] = (0, 0)  # the first and the last with vectors; 0: of all
    overrides: Overrides = NONE  # metadata that replaces the file's
    n_checkpoints: int = 2  # checkpoints of each slot (recurrent states, sliding windows)
    moves: str = ""  # flag that needs moves of KV entries, prepared at load; "": none
    swa_full: bool = True  # sliding-window layers have full-size KV; else a smaller KV group, where it suffices
    n_draft_tokens: int = 0  # draft tokens of the MTP head, drafter or draft head; 0: none is loaded
    learns: bool = False  # with a draft head (models/drafters/draft_head.py) instead of the MTP head
    block: str = ""  # file of the MTP head, if the model's file has none
    drafter: str = ""  # file of a drafter (models/drafters/), which drafts instead of the MTP head
    mmproj: str = ""  # file of encoders and projectors of media; "": none
    projector_device: str = ""  # of the encoders; "": the first beside the CPU
    image_tokens: tuple[int, int] = (0, 0)  # least and most rows of an image of dynamic size; 0: the projector's
    least_ctx: int = 0  # the context may be shortened to this for the memory of devices; 0: n_ctx
    host_bytes: int = 0  # memory for what is on the CPU beside other devices; 0: not checked


class ModelRunner:
    """A model on its devices, with KV cache, adapters and plans.

    Raises ModelFileError, DeviceError or ValueError with one line that says why it cannot be
    loaded."""

    def __init__(
        self, path: str | Path, options: RunnerOptions | None = None, *, target: ModelRunner | None = None
    ) -> None:
        """`target`: another model runner whose devices and threads this one shares; close that one later."""
        self.options = options = options or RunnerOptions()
        self.gguf = GGUFFile.open(path, options.overrides, block=options.block)
        self.hparams = h = hparams_of(self.gguf)
        self.directions = read_directions(options.control_vectors, h, options.control_layers)
        self.drafter_file = open_drafter(options.drafter, h) if options.drafter else None
        self._projector: tuple[GGUFFile, MediaParams] | None = None
        if options.mmproj:
            projector = GGUFFile.open(options.mmproj)
            self._projector = projector, params_for(self.gguf, h, projector, options.image_tokens, options.n_ubatch)
        self._kv_types = options.type_k, options.type_v, "" if target is None else "-draft"
        check_types(h, *self._kv_types, self.drafter_file.kv_layers if self.drafter_file is not None else ())
        if options.moves and h.remembers:
            raise ValueError(f"{options.moves}: this model's {h.remembers} cannot forget tokens")
        if options.embeddings and h.compression:
            raise ValueError("--embeddings: this model makes no vectors of texts")
        self._size(options.n_ctx or h.n_ctx_train * (1 if options.unified else options.n_slots))
        n_states = n_state_rows(options.n_slots, options.n_checkpoints, options.n_draft_tokens) if h.recurrent else 0
        self.states = DeviceStore(n_states) if n_states else None
        rows = {} if self.drafter_file is None else self.drafter_file.draft_rows(options.n_draft_tokens)
        sizes = options.n_ubatch, options.n_slots, N_EXAMPLES if options.learns else 0, n_states
        self.hidden = HiddenRows(*sizes, **rows) if options.n_draft_tokens else None
        self.draft_head = HeadValues(h, self.gguf) if options.learns else None
        self._self_tests: list[SelfTest] = []  # that had no time to end, or have variants that nobody has used
        self._distrusted: dict[str, Failures] = {}  # by device: failures that were found later
        self.rerouted: dict[str, str] = {}  # op that failed a device's self-test and runs elsewhere → reason
        has = usable(options.host_bytes, options.placement.spare[-1:], 0) if options.host_bytes else None
        self.expert_memory = CacheMemory(options.placement.expert_cache, has)
        self._ahead: list[StepShape] = []  # warm-up set: shapes to plan while idle, the next one last
        self._feeds: WeakKeyDictionary[Plan, StepFeeds] = WeakKeyDictionary()
        self._target = target
        self._share, self._n_retreats = 1.0, 0  # of the devices' memory that a placement may use
        self._slept = False  # the next `wake` may take up devices that were lost
        self._lost = LostDevices(can_open)
        self._open(options.devices)
        self.adapters = StackedLora(self.session, check_weights(self.gguf, h))
        self.weight_sets = FullFinetunes(self.session, self.model, self.gguf, options.block)
        template = self.gguf.metadata.get("tokenizer.chat_template.rerank", "")
        if not isinstance(template, str):
            raise ModelFileError(path, f"key 'tokenizer.chat_template.rerank' is {template}, which is not a text")
        self.embedder = Embedder(self.tuned, h, options.n_ubatch, self.n_ctx_slot, template, lambda: self.media)
        if len(self.session.backends) > 1 and target is None and h.causal:
            self._fit_context()

    def _size(self, n_ctx: int) -> None:
        """Set the sizes that follow from the tokens of the KV cache. ValueError: none are left for a slot."""
        options, h = self.options, self.hparams
        self.n_ctx, share = n_ctx, 1 if options.unified else options.n_slots
        most = h.n_ctx_train if h.learned_positions else self.n_ctx
        self.n_ctx_slot = min(self.n_ctx // share, options.n_ctx_slot or self.n_ctx, most)
        if self.n_ctx_slot < 1:
            raise ValueError(f"--ctx-size {self.n_ctx} leaves nothing for each of {options.n_slots} slots")
        self.n_blocks = pool_size(self.n_ctx, options.n_slots, unified=options.unified)
        self.table_blocks = -(-self.n_ctx_slot // BLOCK_SIZE)
        n_window_blocks = window_pool_size(h.window, options.n_slots, options.n_ubatch, options.n_checkpoints)
        if options.swa_full or options.moves or not h.has_windows or n_window_blocks >= self.n_blocks:
            n_window_blocks = 0
        self.full_kv = DeviceBlocks(self.n_blocks)
        self.window_kv = DeviceBlocks(n_window_blocks, h.window) if n_window_blocks else None

    def _fit_context(self) -> None:
        """Shorten the context until the layers that are to be on devices have room there, and the rest on the host.

        ValueError: the context that the user wants needs more of the host's memory than there is."""
        self.options = replace(self.options, placement=self.options.placement.with_experts(lambda: self._fits(None)))
        upper, least = self.n_ctx, min(self.options.least_ctx or self.n_ctx, self.n_ctx)
        self._place_on(self._chosen(lambda _: True))
        sizes = self._sizes()
        over = self._excess(sizes)
        if over > 0 and least < upper:
            self._resize(least)
            self._place_on(self._chosen(lambda _: True))
            slope = (sum(s.total for s in sizes) - sum(s.total for s in self._sizes())) / (upper - least)
            n_ctx = max(least, int(upper - over / max(slope, 1e-9)) // 256 * 256)
            self._resize(n_ctx)
            while n_ctx > least and self._chosen(self._fits) != self._chosen(lambda _: True):
                n_ctx = max(least, n_ctx * 9 // 10 // 256 * 256)
                self._resize(n_ctx)
            log.warning("context reduced from %d to %d tokens, so that layers fit into the devices", upper, n_ctx)
        self._place()
        if self.n_ctx > MIN_CTX and least == upper and (over := self._excess_on_host(self._sizes(), weights=False)) > 0:
            self.session.close()
            more = f"{over / 2**30:.1f} GiB more than there is room for"
            raise ValueError(f"--ctx-size {upper}: the layers on the CPU would need {more}")

    def _excess(self, sizes: Sequence[DeviceBytes]) -> int:
        """Bytes for which devices of their own memory have no room, or the host."""
        over = excess(sizes, self.session.backends, self.options.placement.spare, self._share)
        return max(over, self._excess_on_host(sizes))

    def _excess_on_host(self, sizes: Sequence[DeviceBytes], *, weights: bool = True) -> int:
        pairs, has = zip(sizes, self.session.backends, strict=True), self.expert_memory.host_nbytes
        need = sum(s.total - (0 if weights else s.weights) for s, b in pairs if not b.memory_bytes)
        return need - has if has is not None else 0

    def _resize(self, n_ctx: int) -> None:
        """Define the session's memory anew for so many tokens; nothing is allocated."""
        backends = self.session.backends
        self.session.release()
        self._size(n_ctx)
        self.embedder.set_context(self.n_ctx_slot)
        self._open_again(self.devices, backends)

    def _open_again(self, devices: Sequence[str], backends: Sequence[Backend] = ()) -> None:
        """Open another session (see `_open`), which has the adapters and the full finetunes of the one before."""
        self._open(devices, backends)
        self.adapters.move_to(self.session)
        self.weight_sets.move_to(self.session, self.model)

    @property
    def is_first(self) -> bool:
        """True if the devices are its own."""
        return self._target is None

    def _open(self, devices: Sequence[str], backends: Sequence[Backend] = ()) -> None:
        """Open a session on these devices, or on backends that are open, and define model, KV cache and
        states; nothing is allocated yet."""
        options, h = self.options, self.hparams
        self.devices = tuple(devices)
        self._target_session = self._target.session if self._target is not None else None
        if self._target_session is not None:
            backends = self._target_session.backends
        backends = backends or open_backends(devices, options.threads)
        self.session: Session = Session(backends)
        self._placed = False
        named = options.placement.devices(options.devices, devices, backends)
        self.session.division = division(options.placement, named, self.session, h, self.drafter_file)
        file, mtp = self.drafter_file, options.n_draft_tokens > 0 and not (options.drafter or options.learns)
        model = define_model(self.session, self.gguf, h, self.n_ctx_slot, mtp=mtp)
        drafter = define_drafter(self.session, file, self.n_ctx_slot)
        self.model = steered(self.session, model, self.directions)
        self.memory = PagedMemory.define(
            self.session,
            h,
            self.n_blocks + 1,  # a spare block and a spare table are for padding tokens
            (options.n_slots + 1, self.table_blocks),
            *(options.type_k, options.type_v),
            n_states=self.states.n if self.states is not None else 0,
            n_window=self.window_kv.n + 1 if self.window_kv is not None else 0,
            mtp=mtp,
            behind=file.kv_layers if file is not None else (),
        )
        if self.states is not None:
            self.states.open(self.session, self.memory.states)
        for blocks, pool in zip(self._blocks, self.memory.pools, strict=True):
            blocks.open_blocks(self.session, pool)
        self.cells = KVMover(self.session, self.model, self.memory, drafter)
        sampler_state = self.session.define("sampler_state", (options.n_slots, samplers.N_STATE), "f32")
        width = file.width if file is not None else h.hidden_width if mtp else h.n_embd
        rows = None if self.hidden is None else Hidden.define(self.session, width, self.hidden.n)
        self.media = None
        if self._projector is not None:
            n_rows = min(self.n_ctx, MOST_MEDIA_ROWS)
            self.media = MediaEncoder(self.session, *self._projector, h.n_embd, n_rows)
        head = self.draft_head.define(self.session) if self.draft_head is not None else drafter
        self.graph = StepGraph(self.memory, sampler_state, rows, self.media.pools if self.media else (), head)
        able = h.causal and self.is_first and self.states is None and (self.hidden is None or options.learns)
        able = able and not h.n_encoder and all(backend.preemptible for backend in backends)
        self.preemptible = PreemptiblePrefill(self, options.n_ubatch if able else 0, self.n_ctx_slot)

    @property
    def _blocks(self) -> list[DeviceBlocks]:
        return [self.full_kv] if self.window_kv is None else [self.full_kv, self.window_kv]

    def load(self) -> None:
        """Upload the weights, reserve the memory of the largest step and make the common plans."""
        self._place()
        self.exceeds_memory = prepare_host(self.session, self.hparams, self.model.tensors, self.expert_memory)
        if self._projector is not None:  # the first request with media loads its weights
            media_encoder.check_numbers(*self._projector, self.hparams.n_embd)
        self.rerouted, self._self_tests = {}, []
        if self.options.embeddings or not self.hparams.causal:
            self.session.prepare_kernels(self.embedder.everything())
        if not self.hparams.causal:
            self._examine(self.embedder.everything())
            self.embedder.load()
            self.gguf.release()
            return
        self._examine(*self._everything(), self.cells.copied())
        caches = self._check_caches()
        if self.options.device_reason and (reason := caches or self._failure_in_layers()):
            self._use_cpu(reason)
            return
        for graph in self._everything():
            self.session.prepare_kernels(graph)
        self.session.reserve(self._reserved)
        for blocks in self._blocks:
            blocks.write_table(self.options.n_slots, [blocks.n] * self.table_blocks)
        largest = StepShape(self.options.n_ubatch, 0)
        self.session.cached_plan(largest, lambda: self.build(largest))
        self.run_alone()
        self.embedder.load_source(self.memory)
        if self.hidden is not None:  # the first draft plan loads the weights of what drafts
            self.session.cached_plan(shape := draft_shape(1, self.hidden.n_block), lambda: self.build(shape))
        self.cells.prepare_copies()
        # recurrent states and windows cannot drop tokens
        if not self.hparams.remembers and self.window_kv is None:
            problem = self.cells.prepare_moves(self.prepare_kernels, soon=bool(self.options.moves))
            if problem and self.options.moves:
                raise DeviceError(f"{self.options.moves}: {problem}")
        self.gguf.release()
        self._ahead = self._usual()[::-1]

    def prepare_ahead(self, request_waits: Callable[[], bool] = lambda: False) -> bool:
        """Prefault KV memory and make one more plan of the warm-up set, so that no request waits
        for it.

        Returns False if there is nothing left to make. Errors are ignored: the step that needs the
        plan reports them. `request_waits()` is True if a request waits by now. Raises DeviceFailed
        where an op failed its self-test only now: the model is loaded again without it, and the content
        of all KV blocks is gone."""
        for test in self._self_tests:
            if test.untested:
                self._go_on_testing(test)
                return True
        if not self.options.warmup:
            return False
        for blocks in self._blocks:
            blocks.prefault(request_waits)
        try:
            if not self._ahead:
                media = self.media is not None and self.media.prepare_ahead(request_waits)
                return media or self.preemptible.prepare_ahead(request_waits)
            shape = self._ahead.pop()
            self.session.cached_plan(shape, lambda: self.build(shape))
        except (MemoryError, OSError, DeviceLost):
            self._ahead.clear()
            self.preemptible.clear()
            if self.media is not None:
                self.media.unprepared.clear()
        return True

    def prepare_training(self) -> None:
        """Start to compile the training kernels in the background; returns at once."""
        types = sorted({t.dtype for t in self.model.weights.tensors.values() if len(t.shape) == 2})
        for backend in self.session.backends:
            backend.prefetch_training(types)

    def prepare_kernels(self, nodes: Sequence[Tensor]) -> None:
        """Load, or compile and load, the kernels of these nodes. Any thread may call."""
        self.session.backends[-1].prepare(nodes)

    def _examine(self, *graphs: Sequence[Tensor]) -> None:
        """Self-test the devices on the ops of graphs.

        An op that fails on one device runs on the next."""
        if len(self.session.backends) > 1:  # the last one has no device to fall back to
            from logitless.backends import self_test

            for backend in self.session.backends[:-1]:
                if failures := self._distrusted.get(backend.name):
                    backend.refuse(failures)
                    self.rerouted |= failures
            for graph in graphs:
                failures, unfinished = self_test.self_test_session(self.session, graph)
                self.rerouted |= failures
                self._self_tests += unfinished

    def _check_caches(self) -> str:
        """Why the devices have no attention over the cache's types. DeviceError where the user names them."""
        reason = refusal(self._largest(), self.session.backends[:-1], *self._kv_types)
        if reason and not self.options.device_reason and self.options.placement.n_gpu_layers != 0:
            raise DeviceError(reason)
        return reason

    def _failure_in_layers(self) -> str:
        """A line on ops of every layer that failed a self-test: a step would change the device in each; else ""."""
        counts = Counter(t.op for t in toposort(self._largest()))
        failed = sorted(op for op in self.rerouted if counts[op] >= self.hparams.n_layer)
        return f"{', '.join(self.devices)} failed the self-test of {', '.join(failed)}" if failed else ""

    def retreat(self, error: Exception) -> None:
        """Open the model again with less of the devices' memory, at last with none: an allocation has failed.

        Only `load` may be called next."""
        spare, self._n_retreats = self.options.placement.spare, self._n_retreats + 1
        pairs = enumerate(zip(self._sizes(), self.session.backends, strict=True))
        used = max((d.total / usable(b.memory_bytes, spare, i) for i, (d, b) in pairs if b.memory_bytes), default=1.0)
        self._share = RETREAT * min(self._share, used)
        placement, names = self.options.placement, ", ".join(self.devices)
        n = placement.n_gpu_layers
        self.sleep()
        self._slept = False
        if self._n_retreats > MOST_RETREATS:
            self.options = replace(self.options, devices=("cpu",))
            self.devices = ("cpu",)
        elif n is not None:
            fewer = int(min(n, self.hparams.n_layer + 1) * RETREAT)
            self.options = replace(self.options, placement=replace(placement, n_gpu_layers=fewer))
        self._open_again(self.devices)
        if len(self.session.backends) > 1 and self.hparams.causal and self.is_first:
            self._fit_context()
        how = "fewer layers or a shorter context there" if len(self.session.backends) > 1 else "the CPU"
        log.warning("%s: an allocation failed (%s); again with %s", names, " ".join(str(error).split()), how)

    def _use_cpu(self, reason: str) -> None:
        """Load on the CPU, for the device that was chosen without the user's word is wrong."""
        self.options = replace(self.options, devices=("cpu",), device_reason=reason)
        self.sleep()
        self.devices = ("cpu",)
        self.wake()

    def _go_on_testing(self, test: SelfTest) -> None:
        """Run one more case of a self-test that had no time to end. Raises DeviceFailed where it failed."""
        from logitless.backends import self_test

        before = set(test.failures)
        try:
            test.run(0.0)
        except (MemoryError, OSError) as error:
            raise self._failure(error) from error
        self._self_tests = [t for t in self._self_tests if t.untested or t.unused]
        new_failures = {op: reason for op, reason in test.failures.items() if op not in before}
        if not new_failures:
            return
        self_test.log_failures(test.backend, new_failures)
        self._distrusted.setdefault(test.backend.name, {}).update(new_failures)
        try:
            self.sleep()
            self.wake()
        except (DeviceError, DeviceLost, MemoryError) as error:
            self._fall_back(error)
        raise DeviceFailed(f"{test.backend.name} failed the self-test of {', '.join(new_failures)}")

    def _test_first_use(self, variant: int) -> None:
        """Test this variant of kernels, where it is new. Raises DeviceFailed."""
        for test in [test for test in self._self_tests if test.use(variant)]:
            self._go_on_testing(test)

    def _place(self) -> None:
        """Assign layers to devices, once for a session."""
        if not self._placed:
            self._placed = True
            self._place_on(self._chosen(self._fits))

    def _place_on(self, places: Places | None) -> None:
        """Set the placement of layers, and the expert cache for it. ValueError: that is too small."""
        set_placement(self.session, places, self.hparams, self.model.tensors, self.expert_memory)

    def _chosen(self, fits: Callable[[Places | None], bool]) -> Places | None:
        """The placement by the options, if `fits` tells what the devices have room for."""
        options = self.options
        devices = options.placement.devices(options.devices, self.devices, self.session.backends)
        encoder = options.projector_device if self.media is not None else ""
        return chosen(options.placement, devices, self.hparams.n_layer, fits, encoder_device=encoder)

    def _fits(self, places: Places | None) -> bool:
        """True if the devices have enough memory for this placement."""
        self._place_on(places)
        return fit(self._sizes(), self.session.backends, self.options.placement.spare, self._share)

    def _sizes(self) -> list[DeviceBytes]:
        """Bytes of each device with the present placement."""
        builds = self._largest, *self.source_graphs, *self._mtp_graphs, *self._media_graphs
        return self.session.device_bytes([self.session.measure(build) for build in builds])

    def _fall_back(self, error: Exception) -> None:
        """Reload the model without the lost device, and without devices that fail while reloading.

        The content of their memory is gone."""
        while True:
            line = f"{error}".lower()  # begins with the device's name, or with its kind
            names = [n for n in self.devices if line.startswith((f"{n}:", f"{n.partition(':')[0]}: "))] or self.devices
            lost = names[0]
            with suppress(Exception):
                self.session.close()
            self.devices = tuple(name for name in self.devices if name != lost) or ("cpu",)
            log.warning("%s: the device was lost (%s); from now on: %s", lost, error, ", ".join(self.devices))
            try:
                return self.wake()
            except (DeviceError, DeviceLost, MemoryError) as another:
                if lost == "cpu":
                    raise
                error = another

    def sleep(self) -> None:
        """Free weights, KV cache, plans and threads. Only `wake` may be called next."""
        self._slept = True
        self._ahead.clear()
        self.preemptible.clear()
        if self.is_first:
            self.session.close()
        else:
            self.session.release()
        self.gguf.release()

    def _reopen(self) -> None:
        """Open the devices; after sleep also those that were lost, where they have returned."""
        names = self.devices
        if self._slept and self.is_first:
            names = tuple(n for n in self.options.devices if n in self.devices or can_open(n)) or self.devices
            if names != self.devices:
                log.warning("devices have returned; from now on: %s", ", ".join(names))
        self._slept = False
        self._open_again(names)

    @property
    def lost_remotes(self) -> list[str]:
        """The remote devices that were lost."""
        absent = [name for name in self.options.devices if name not in self.devices] if self.is_first else []
        return [name for name in absent if name.startswith("rpc:")]

    def take_up_returned(self) -> bool:
        """Load the model again if a lost remote device answers; False: none does yet.

        No sequence may run. The content of all KV blocks is gone where it was loaded. The devices are tried
        on another thread: call it again after a while."""
        if not self._lost.answered(self.lost_remotes):
            return False
        try:
            self._check_files()
        except ModelFileError as error:
            log.warning("a device has returned, but %s", error)
            return False
        try:
            self.sleep()
            self.wake()
        except (DeviceError, DeviceLost, MemoryError) as error:
            self._fall_back(error)
        return True

    def wake(self) -> None:
        """Load the model again.

        Raises ModelFileError if its file has changed, or the errors of `load`."""
        self._check_files()
        self._reopen()
        self.load()

    def _check_files(self) -> None:
        """Raise ModelFileError if a file of the model has changed."""
        for file in self._files:
            file.check_unchanged()

    @property
    def _files(self) -> list[GGUFFile]:
        """Files of the model, its projector and its drafter."""
        others = [self._projector[0]] if self._projector is not None else []
        return [self.gguf, *others, *([self.drafter_file.gguf] if self.drafter_file is not None else [])]

    # --- the graph --------------------------------------------------------------------------------

    def build(self, shape: StepShape) -> list[Tensor]:
        """Graph of a step: nodes that only run, then nodes whose results are fetched."""
        model = self._tuned_model(shape.weights, shape.n_tokens if shape.lora else 0)
        effects, fetched = self.graph.nodes(model, shape)
        return effects + fetched

    def tuned(self, choice: AdapterChoice) -> AdaptedModel:
        """Model with weights and adapters, for graphs other than request steps."""
        weights, mix = choice
        return AdaptedModel(
            self.session,
            lambda n: self._tuned_model(weights, n if mix else 0),
            f"{weights}.{self.adapters.generation if mix else 0}",
            lambda n: {"lora_scales": self.adapters.row_scales([mix] * n, n)} if mix else {},
        )

    def _tuned_model(self, weights: int, n_gated: int = 0) -> Model:
        """Model with these weights. With `n_gated` > 0, it has LoRA scales of each row as an input.

        That input is "lora_scales", (n_gated, n_columns) f32."""
        model = self.weight_sets.model(weights)
        if not n_gated:
            return model
        scales = feed("lora_scales", (n_gated, self.adapters.n_columns))
        return model.adapted(LowRank(self.adapters.pairs, scales, deltas=self.adapters.deltas))

    def measure(self, eval_order: str = "") -> Measurement:
        """Device and memory of every node in the largest ordinary step; nothing is allocated.

        `eval_order`: see Session.measure."""
        self._place()
        return self.session.measure(self._largest, eval_order=eval_order)

    def dry_run(self) -> tuple[list[DeviceBytes], object]:
        """Memory dry run: bytes of each device with all slots decoding; nothing is allocated there.

        The second result keeps the host's own share alive: kernels, and the programs of the plans
        that requests of all slots need."""
        self._place()
        reason = self._check_caches()
        if reason and self.options.device_reason:  # as `load`
            self.options = replace(self.options, devices=("cpu",), device_reason=reason)
            self._open_again(("cpu",))
            self._place()
        for graph in self._everything():
            self.session.prepare_kernels(graph)
        steps = [partial(self.build, shape) for shape in self._usual(2 * self.options.n_slots)]
        apart = [*self.preemptible.builds, *self._media_graphs]
        return self.session.planned_bytes([self._reserved, self.cells.copied, *self.source_graphs, *steps], apart)

    def _everything(self) -> list[list[Tensor]]:
        """Graphs that together contain every op of a step, of an MTP draft and of media."""
        graphs = [self.build(StepShape(self.options.n_ubatch, 64, n_top=1)), *(build() for build in self._mtp_graphs)]
        graphs += [build() for build in self.embedder.of_sources(self.memory, min(64, self.n_ctx_slot))]
        if self.media is not None:
            graphs += [build() for build in self.media.largest]
            graphs.append(self.build(StepShape(self.options.n_ubatch, 64, media=True)))
        return graphs

    @property
    def _mtp_graphs(self) -> list[Callable[[], list[Tensor]]]:
        if self.hidden is None:
            return []
        return [partial(self.build, draft_shape(self.options.n_slots, self.hidden.n_block)._replace(n_probs=1))]

    @property
    def source_graphs(self) -> list[Callable[[], list[Tensor]]]:
        """The largest graphs of an encoder in front."""
        return self.embedder.of_sources(self.memory, self.n_ctx_slot)

    @property
    def _media_graphs(self) -> list[Callable[[], list[Tensor]]]:
        return self.media.largest if self.media is not None else []

    def _usual(self, most: int = USUAL_STREAMS) -> list[StepShape]:
        """Shapes of the warm-up set, with up to `most` decoding sequences."""
        options, n_block = self.options, self.hidden.n_block if self.hidden is not None else 1
        return usual(options.n_slots, options.n_ubatch, most, options.n_draft_tokens, n_block)

    def _reserved(self) -> list[Tensor]:
        """Graph whose memory all steps share: the most tokens and sampled positions."""
        return self.build(StepShape(self.options.n_ubatch, 64))

    def _largest(self) -> list[Tensor]:
        """Graph of the largest ordinary step."""
        if not self.hparams.causal:
            return self.embedder.everything()
        return self.build(StepShape(self.options.n_ubatch, self.options.n_slots))

    # --- a step -----------------------------------------------------------------------------------

    def step(self, batch: UBatch) -> StepResult:
        """Run one ubatch.

        Raises StepFailed if the device cannot; the step has no effect then. Raises DeviceFailed if
        a device was lost: the next step runs on the remaining ones, and the content of all KV
        blocks is gone."""
        shape = shape_of(batch, self.adapters.generation if batch.mixes else 0)
        # the target has replaced a lost device
        if self._target is not None and self._target.session is not self._target_session:
            self.devices = self._target.devices
            self.wake()
            raise DeviceFailed("the devices have been replaced")
        try:
            self.before_step(batch)
            self.embedder.write_sources(batch, self.memory)
            return self._run(shape, batch)
        except (MemoryError, OSError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StepFailed:
        """The error of a step that a device's error ends; a lost device is replaced."""
        if isinstance(error, DeviceLost) and self._target is None:  # else the other model runner replaces the devices
            self._fall_back(error)
            return DeviceFailed(str(error))
        return StepFailed(str(error) or type(error).__name__)

    def encode_media(self, tiles: Sequence[Tile]) -> Iterator[float]:
        """Encode tiles of one size (see MediaEncoder.encode). Errors: as of `step`."""
        assert self.media is not None
        try:
            yield from self.media.encode(tiles)
        except (MemoryError, OSError) as error:
            raise self._failure(error) from error

    @property
    def part_sizes(self) -> Mapping[int, float]:
        """Preemptible prefill sizes: tokens → seconds of the longest part."""
        return self.preemptible.sizes

    def run_in_parts(self, batch: UBatch) -> Iterator[float]:
        """Run a prefill batch that decode steps may preempt (see PreemptiblePrefill.run). Errors: as of `step`."""
        try:
            yield from self.preemptible.run(batch)
        except (MemoryError, OSError) as error:
            raise self._failure(error) from error

    def before_step(self, batch: UBatch) -> None:
        """Write changed block tables and do pending block copies, before the batch's plan runs."""
        for blocks, tables in zip(self._blocks, (batch.tables, batch.window_tables), strict=False):
            for slot, table in tables.items():
                blocks.write_table(slot, table)
        self.cells.copy(batch.copies, batch.window_copies)

    def feeds_of(self, plan: Plan) -> StepFeeds:
        """Input writer of a plan."""
        feeds = self._feeds.get(plan)
        if feeds is None:
            self._feeds[plan] = feeds = self.step_feeds(plan.input_buffers)
        return feeds

    def run_alone(self) -> None:
        """Run an empty decode step of one sequence."""
        self._run(StepShape(1, 1, whole=True), UBatch())

    def _run(self, shape: StepShape, batch: UBatch) -> StepResult:
        plan = self.session.cached_plan(shape, lambda: self.build(shape))
        feeds = self.feeds_of(plan)
        feeds.write(batch)
        if self._self_tests and shape.n_out:
            chains = plan.input_buffers["sample.chain"]
            self._test_first_use(samplers.ALL if shape.n_probs else samplers.variant_of(chains))
        if feeds.row_scales is not None:
            mixes = [batch.mixes.get(slot, ()) for slot in batch.slot]
            feeds.row_scales[:] = self.adapters.row_scales(mixes, shape.n_tokens)
        unsampled: dict[int, str] = {}
        n_masks, n_vocab = shape.n_masks, self.hparams.n_vocab
        late = (lambda: token_masks(batch, n_masks, shape.n_out, n_vocab, unsampled)) if n_masks else None
        n_out = len(batch.out)
        n_tables, n_copies = len(batch.tables) + len(batch.window_tables), len(batch.copies) + len(batch.window_copies)
        n_written = feeds.nbytes + 4 * self.table_blocks * n_tables + 8 * n_copies
        if not shape.n_out:
            plan.run(None, (0,) * plan.n_fetches)
            return StepResult(np.zeros(0, np.uint32), bytes_written=n_written)
        n_effects = plan.n_fetches - (1 + bool(shape.n_top) + shape.logits)  # nodes that only run
        fetched = plan.run(None, (0,) * n_effects + (n_out,) * (plan.n_fetches - n_effects), late)[n_effects:]
        words = fetched[0]  # (n_out, 1 or 3 + 2·n_probs) i32
        logprobs = top_ids = None
        if shape.n_top:
            chosen, top_ids, top = split_log_probs(fetched[1], shape.n_top - 1)
            logprobs = np.concatenate([chosen[:, None], top], 1)
        return StepResult(
            words[:, 0].view(np.uint32),
            logprobs,
            top_ids,
            split_probs(words, shape.n_probs) if shape.n_probs else None,
            sum([f.nbytes for f in fetched]),
            n_written,
            unsampled,
            fetched[-1] if shape.logits else None,
        )

    def step_feeds(self, room: Mapping[str, npt.NDArray[Any]]) -> StepFeeds:
        """Input writer for these input arrays.

        Padding tokens belong to a spare sequence on the spare block."""
        window_spare = self.window_kv.n * BLOCK_SIZE if self.window_kv is not None else 0
        spare_hidden = self.hidden.spare if self.hidden is not None else 0
        return StepFeeds(room, self.options.n_slots, self.full_kv.n * BLOCK_SIZE, window_spare, spare_hidden)

    def sampler_state(self, slot: int) -> tuple[float, ...]:
        """Row of the samplers' state, (N_STATE,)."""
        return tuple(self.session.read_bytes("sampler_state", slot * 16, 16).view(np.float32).tolist())

    def move_cells(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Move KV entries: (source token slot, target token slot, change of position).

        See KVMover.move."""
        self.cells.move(moves)

    @property
    def moves_cells(self) -> bool:
        return self.cells.can_move

    @property
    def start_token(self) -> int:
        return self.hparams.start_token

    @property
    def mrope(self) -> bool:
        return bool(self.hparams.mrope)

    @cached_property
    def cache_kind(self) -> CacheKind:
        """Layout of KV blocks, for slot files."""
        model = fingerprint(self.gguf, self.hparams, self.n_ctx_slot) + digest(self.directions)
        types, auxiliary = (self.options.type_k, self.options.type_v), self.window_kv or self.states
        window = self.window_kv.window if self.window_kv is not None else 0
        return CacheKind(
            model, *types, BLOCK_SIZE, self.full_kv.nbytes, auxiliary.nbytes if auxiliary is not None else 0, window
        )

    def close(self) -> None:
        """Free everything and close the model's files."""
        if self.is_first:
            self.session.close()
        self.weight_sets.close()
        for file in self._files:
            file.close()
