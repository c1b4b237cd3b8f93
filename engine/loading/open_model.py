"""Opening a model: the one way from a GGUF file and options to an engine that serves requests.

`open_model` reads the header and checks every option against it, which takes milliseconds and no
device memory. `OpenModel.load` then reads the weights and makes the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.backends.cores import cores
from logitless.backends.disk_cache import cache_folder
from logitless.backends.host_memory import total_memory
from logitless.engine.async_engine import LoadedModel, ModelInfo
from logitless.engine.kv_disk.disk_cache import DiskCache, private_folder
from logitless.engine.kv_disk.identity import root_names, space_of
from logitless.engine.loading.adapters import ScaledAdapters, control_vectors, read_adapters, register_adapters
from logitless.engine.loading.drafting import (
    check_draft_model,
    check_mtp_head,
    default_speculation,
    draft_engine_options,
    drafter_file,
    make_learner,
    make_speculator,
    model_kinds,
    mtp_file,
    n_draft_tokens,
    with_drafter_kind,
)
from logitless.engine.loading.memory import (
    cache_disk_bytes,
    cache_ram_bytes,
    fitting_context,
    weights_nbytes,
    whole_context,
)
from logitless.engine.loading.options import ModelOptions, OptionConflict, text_file
from logitless.engine.loading.placement import placement
from logitless.engine.records.store import Store
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.sampling.model_defaults import model_defaults
from logitless.engine.scheduler.scheduler import Scheduler, SchedulerConfig
from logitless.engine.sleep import Sleep, Sleeper
from logitless.engine.speculation.settings import LEARN, MTP, SpeculationParams
from logitless.engine.speculation.speculator import Speculator
from logitless.models import tokenizer
from logitless.models.adapters.control_vector import read_directions
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate, builtin_names, from_metadata, of_file
from logitless.models.drafters.drafter_file import open_drafter
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.gguf.types import FILE_TYPES
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.layer_sizes import LayerSizes
from logitless.models.hparams.overrides import Overrides, Value
from logitless.models.model import hparams_of
from logitless.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from logitless.engine.adapters import Adapters
    from logitless.engine.kv_events.publisher import KVEventPublisher
    from logitless.models.media.media_input import MediaInput
    from logitless.training.graders.grade import Surroundings

log = logging.getLogger("logitless.loading")
SETTLE_SECONDS = 1.0  # of a start, to know where prompts are on disk
DEVICE_KINDS = ("vulkan", "opencl", "rpc")  # an error of such a device begins so


def open_model(path: str | Path, options: ModelOptions | None = None, *, generates: bool = False) -> OpenModel:
    """Read a model's header and check the options against it; nothing is allocated.

    `generates`: refuse models that make embeddings only. OptionError names the option and
    ModelFileError the part of a file that cannot be used."""
    options = with_drafter_kind(options or ModelOptions())
    _check_kv_events(options)
    _check_cache_disk(options)
    overrides = metadata_overrides(options)
    with GGUFFile.open(path, overrides, block=mtp_file(options)) as gguf:
        h = generating_hparams(gguf, path, encoder=True) if generates else hparams_of(gguf)
        speculation = default_speculation(options)
        check_mtp_head(options, gguf, h)
        words = tokenizer.from_metadata(gguf.metadata, path=path)
        template = _chat_template(options, gguf, words)
        projector = projector_file(options, gguf, h)
        if projector and h.mrope and options.context_shift:
            log.warning("--context-shift: is off, for images have positions of their own in this model")
            options = replace(options, context_shift=False)
        engine_options = _engine_options(options, overrides, projector, gguf, h)
        adapters = read_adapters(options, gguf, h)
        read_directions(engine_options.control_vectors, h, engine_options.control_layers)
        check_draft_model(options, overrides, gguf, h)
        sampling = model_defaults(gguf.metadata, gguf.path)
    return OpenModel(Path(path), options, h, words, template, engine_options, speculation, adapters, sampling)


def open_engine(path: str | Path, options: ModelOptions) -> ModelRunner:
    """The engine of a generating model, without weights: for benchmarks and self-tests.

    The file needs neither a vocabulary nor a chat template. Errors: as of `open_model` and
    `OpenModel.engine`."""
    options = with_drafter_kind(options)
    overrides = metadata_overrides(options)
    with GGUFFile.open(path, overrides, block=mtp_file(options)) as gguf:
        h = generating_hparams(gguf, path)
        check_mtp_head(options, gguf, h)
        engine_options = _engine_options(options, overrides, projector_file(options, gguf, h), gguf, h)
    return _engine(path, engine_options)


@dataclass(frozen=True)
class OpenModel:
    """A model whose file and options are known to fit together, with nothing allocated yet."""

    path: Path
    options: ModelOptions
    hparams: Hparams
    tokenizer: Tokenizer
    template: ChatTemplate
    engine_options: RunnerOptions
    speculation: SpeculationParams  # of requests that say nothing about it
    adapters: ScaledAdapters
    sampling: Mapping[str, Any]  # fields of requests that say nothing about them, by the model's file

    def engine(self) -> ModelRunner:
        """The engine, without weights. OptionConflict, ModelFileError, DeviceError: it cannot run here."""
        return _engine(self.path, self.engine_options)

    def draft_engine(self, engine: ModelRunner) -> ModelRunner | None:
        """The draft model's engine beside the model's, without weights; None: no model drafts."""
        if self.options.model_draft is None or mtp_file(self.options) or drafter_file(self.options):
            return None
        runner_options = draft_engine_options(self.options, engine)
        if self.options.moe_cache_mib:
            log.info("--moe-cache-mib: not for the draft model, whose weights are whole (--cpu-moe-draft: on the CPU)")
        shares = runner_options.devices == engine.options.devices
        return _engine(self.options.model_draft, runner_options, target=engine if shares else None)

    def scheduler(
        self, engine: ModelRunner, speculator: Speculator | None = None, disk: DiskCache | None = None
    ) -> Scheduler:
        """The scheduler of requests on this engine."""
        o = self.options
        if o.ctx_size and engine.n_ctx_slot > self.hparams.n_ctx_train:
            n, trained = engine.n_ctx_slot, self.hparams.n_ctx_train
            log.warning("a sequence may have %d tokens, the model was trained on %d", n, trained)
        return Scheduler(
            engine,
            self.tokenizer,
            SchedulerConfig(
                n_slots=engine.options.n_slots,
                n_ctx=engine.n_ctx,
                n_ubatch=engine.options.n_ubatch,
                n_batch=o.batch_size,
                unified=engine.options.unified,
                n_ctx_slot=engine.n_ctx_slot,
                slot_prompt_similarity=o.slot_prompt_similarity,
                cache_ram=cache_ram_bytes(o.cache_ram, total_memory()),
                disk=disk,
                context_shift=o.context_shift,
                continuous=o.cont_batching,
                cache_idle_slots=o.cache_idle_slots,
                queue_requests=o.queue_requests,
                queue_tokens=o.queue_tokens,
            ),
            speculator=speculator,
        )

    def load(
        self,
        store: Store | None = None,
        *,
        name: str = "",
        names: Collection[str] | None = None,
        around: Callable[[], Surroundings] | None = None,
        port: int = 0,
    ) -> LoadedModel:
        """Bring the weights to the devices and make all that requests need.

        `store`: files and fine-tuning jobs, of the model called `name`; with `names`, only jobs
        of these names. `around`: the means of the jobs' graders. `port`: the
        server's, for the topic of KV events. MemoryError, DeviceError and OptionConflict say why
        it cannot be loaded."""
        from logitless.backends.registry import prefetch_kernels

        folder = self._cache_folder()
        # compile ahead; what other devices leave to the CPU is not known yet
        if self.engine_options.devices == ("cpu",):
            prefetch_kernels()
        engine = self.engine()
        learner = make_learner(self.options, engine, cache_folder())
        load_weights(engine)
        if learner is not None:
            learner.start()
        draft = self.draft_engine(engine)
        if draft is not None:
            load_weights(draft)
        speculator = make_speculator(self.options, engine, draft, self.tokenizer, learner)
        disk = self._disk(engine, folder) if folder is not None else None
        scheduler = self.scheduler(engine, speculator, disk)
        apply = not self.options.lora_init_without_apply
        adapters = register_adapters(engine, scheduler, self.adapters, apply=apply)
        if disk is not None:
            scheduler.cache.prefixes.root_name = root_names(adapters)
            disk.settle(SETTLE_SECONDS)
        parts: list[Sleeper] = [engine, *speculator.models.values(), scheduler.cache]
        sleep = Sleep(max(0, self.options.sleep_idle_seconds), parts)
        tuning, media = None, media_input(engine, self.tokenizer)
        if store is not None:
            from logitless.engine.finetuning.worker import FineTuningWorker

            tuning = FineTuningWorker(
                store,
                engine,
                self.tokenizer,
                self.template,
                adapters,
                name,
                names=names,
                scheduler=scheduler,
                around=around,
                media=media,
            )
        events = self._kv_events(scheduler, adapters, name or self.path.stem, port)
        return LoadedModel(
            scheduler,
            self.tokenizer,
            self.template,
            model_info(engine, self.tokenizer),
            adapters,
            engine,
            tuning,
            embedder=None if self.hparams.compression else engine.embedder,
            sleep=sleep,
            media=media,
            kv_events=events,
            disk=disk,
            learner=learner,
        )

    def _cache_folder(self) -> Path | None:
        """The folder of prompts on disk, made where it is missing; None: the options name none."""
        if self.options.cache_disk is None:
            return None
        try:
            return private_folder(Path(self.options.cache_disk))
        except OSError as error:
            name = error.filename or self.options.cache_disk
            raise OptionConflict(f"--cache-disk {name}: {error.strerror or error}") from None

    def _disk(self, engine: ModelRunner, folder: Path) -> DiskCache | None:
        """The prompt cache on disk; None: the devices' bits have no name."""
        try:
            return DiskCache(folder, cache_disk_bytes(self.options.cache_disk_size), space_of(engine))
        except ValueError as error:
            log.warning("--cache-disk %s: is not used, for %s", self.options.cache_disk, error)
            return None

    def _kv_events(
        self, scheduler: Scheduler, adapters: Adapters | None, name: str, port: int
    ) -> KVEventPublisher | None:
        """The publisher of the cache's events; None: nobody asked for it."""
        if not self.options.kv_events_endpoint:
            return None
        from logitless.engine.kv_events.block_events import BlockEvents
        from logitless.engine.kv_events.publisher import KVEventPublisher, default_topic

        o = self.options
        topic = o.kv_events_topic or default_topic(name, port)
        try:
            publisher = KVEventPublisher(o.kv_events_endpoint, topic, o.kv_events_replay_endpoint)
        except ValueError as error:
            raise OptionConflict(str(error)) from None
        label = None if adapters is None else lambda choice: (adapters.names(choice), adapters.label(choice))
        BlockEvents(publisher.publish, label).attach(scheduler.cache)
        return publisher


def _check_cache_disk(options: ModelOptions) -> None:
    """Raise OptionConflict for options of the prompt cache on disk that do not fit together."""
    if options.cache_disk_size is not None and options.cache_disk is None:
        raise OptionConflict("--cache-disk-size: needs --cache-disk")
    if options.cache_disk is not None and not options.cache_idle_slots:
        raise OptionConflict("--cache-disk: keeps prompts of idle slots, which --no-cache-idle-slots drops")


def _check_kv_events(options: ModelOptions) -> None:
    """Raise OptionConflict for options of KV events that go nowhere."""
    for name in ("replay_endpoint", "topic"):
        if getattr(options, f"kv_events_{name}") and not options.kv_events_endpoint:
            raise OptionConflict(f"--kv-events-{name.replace('_', '-')}: needs --kv-events-endpoint")
    if options.kv_events_endpoint and find_spec("zmq") is None:
        raise OptionConflict("--kv-events-endpoint: needs pyzmq: pip install 'logitless[kv-events]'")


def media_input(engine: ModelRunner, words: Tokenizer) -> MediaInput | None:
    """The reader of prompts with images; None without a projector."""
    if engine.media is None:
        return None
    from logitless.models.media.media_input import MediaInput

    return MediaInput(engine.media.params, words, mrope=bool(engine.hparams.mrope))


def demo_model() -> Path:
    """The demo model that is shipped: 0.9 million parameters, trained on Shakespeare (scripts/demo-model)."""
    return Path(str(files("logitless.models"))) / "demo" / "shakespeare.gguf"


def load_weights(engine: ModelRunner) -> None:
    """Bring the weights to the devices, to less of each memory where an allocation fails.

    MemoryError, or OptionConflict with a hint: the host has no room."""
    while True:
        try:
            return engine.load()
        except MemoryError as error:
            if engine.devices == ("cpu",):
                raise
            if not str(error).lower().startswith(DEVICE_KINDS):
                raise OptionConflict(f"out of memory ({error}); --ctx-size N takes less") from None
            engine.retreat(error)


def model_info(engine: ModelRunner, words: Tokenizer) -> ModelInfo:
    """Facts of a loaded model."""
    h, gguf = engine.hparams, engine.gguf
    file_type = gguf.metadata.get("general.file_type")
    return ModelInfo(
        n_ctx=engine.n_ctx_slot,
        n_ctx_train=h.n_ctx_train,
        n_vocab=words.n_vocab,
        n_embd=h.n_embd,
        n_params=gguf.n_params,
        nbytes=sum(t.nbytes for t in gguf.tensors.values()),
        vocab_type=int(words.vocab_type),
        ftype=FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else "",
        generates=h.causal,
        n_start=int(h.start_token >= 0),
        untrainable=h.untrainable,
    )


def generating_hparams(gguf: GGUFFile, path: str | Path, *, encoder: bool = False) -> Hparams:
    """Hyper-parameters of a model that generates text. OptionConflict: it makes embeddings only, or has an encoder in
    front and not `encoder`."""
    h = hparams_of(gguf)
    if not h.causal:
        raise OptionConflict(f"{path}: makes vectors of texts, it does not write: only `logitless serve` can run it")
    if h.n_encoder and not encoder:
        raise OptionConflict(f"{path}: has an encoder that reads prompts: only serve, generate, batch and plan run it")
    return h


def scoring_hparams(gguf: GGUFFile, path: str | Path) -> Hparams:
    """Hyper-parameters of a model that scores texts and can be trained. OptionConflict: this one is another."""
    h = generating_hparams(gguf, path)
    if h.untrainable:
        raise OptionConflict(f"{path}: {h.untrainable}: it scores no texts and cannot be fine-tuned")
    return h


def metadata_overrides(options: ModelOptions) -> Overrides:
    """Values that stand in for those of the file: `override_kv` and the RoPE options."""
    own: dict[str, Value] = {}
    if options.rope_scaling:
        own["rope.scaling.type"] = options.rope_scaling
    if options.rope_scale:
        own["rope.scaling.factor"] = options.rope_scale
    if options.rope_freq_scale:
        own["rope.scaling.factor"] = 1 / options.rope_freq_scale
    if options.rope_freq_base:
        own["rope.freq_base"] = options.rope_freq_base
    if options.yarn_orig_ctx:
        own["rope.scaling.original_context_length"] = options.yarn_orig_ctx
    for name, value in (("beta_fast", options.yarn_beta_fast), ("beta_slow", options.yarn_beta_slow)):
        if value > 0:
            own[f"rope.scaling.yarn_{name}"] = value
    return Overrides(tuple(options.override_kv), tuple(own.items()))


def _chat_template(options: ModelOptions, gguf: GGUFFile, words: Tokenizer) -> ChatTemplate:
    source, flag = options.chat_template, "--chat-template"
    if options.chat_template_file:
        source, flag = text_file(options.chat_template_file), "--chat-template-file"
    if source is not None and "{" not in source and source not in builtin_names():
        known = ", ".join(builtin_names())
        raise OptionConflict(f"{flag}: {source.strip()[:64]!r} is neither Jinja nor one of {known}")
    try:
        return of_file(gguf.metadata, words) if source is None else from_metadata({}, words, source)
    except ChatTemplateError as error:
        raise OptionConflict(f"{flag}: {error}") from None


def _engine_options(
    options: ModelOptions, overrides: Overrides, projector: str, gguf: GGUFFile, h: Hparams
) -> RunnerOptions:
    options, why = _with_devices(options)
    devices, places = placement(options)
    memory = total_memory()
    n_draft, drafter = n_draft_tokens(options), drafter_file(options)
    swa_full = options.swa_full or bool(options.moves_flag)
    if devices == ("cpu",) or options.gpu_layers == 0:
        weights = weights_nbytes(gguf)
        behind: Sequence[LayerSizes | int] = ()
        if drafter:
            with (file := open_drafter(drafter, h)).gguf:
                weights, behind = weights + weights_nbytes(file.gguf), file.kv_layers
        mtp = MTP in model_kinds(options) and not drafter
        n_ctx = fitting_context(
            options, h, weights, total_memory(), n_draft_tokens=n_draft, swa_full=swa_full, mtp=mtp, behind=behind
        )
    else:  # the runner knows the memory of its devices
        n_ctx = options.ctx_size or whole_context(options, h)
    return RunnerOptions(
        n_ctx=n_ctx,
        least_ctx=options.fit_ctx if options.fit and not options.ctx_size else n_ctx,
        host_bytes=memory if options.fit or options.ctx_size else 0,
        n_slots=options.n_slots,
        n_ubatch=min(options.ubatch_size, options.batch_size),
        unified=options.unified,
        n_ctx_slot=options.kv_unified_per_slot,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        threads=options.n_threads or cores(),
        devices=devices,
        device_reason=why,
        placement=places,
        embeddings=options.embedding or options.rerank,
        warmup=options.warmup,
        control_vectors=control_vectors(options),
        control_layers=options.control_vector_layer_range or (0, 0),
        overrides=overrides,
        n_checkpoints=options.ctx_checkpoints,
        moves=options.moves_flag,
        swa_full=swa_full,
        n_draft_tokens=n_draft,
        learns=LEARN in model_kinds(options),
        block=mtp_file(options),
        drafter=drafter,
        mmproj=projector,
        projector_device=(options.mmproj_device or "") if options.mmproj_offload else "cpu",
        image_tokens=(options.image_min_tokens, options.image_max_tokens),
    )


def _with_devices(options: ModelOptions) -> tuple[ModelOptions, str]:
    """The options with the devices by name, and why they are these; "": the user names them."""
    from logitless.backends.default_device import AUTO
    from logitless.backends.registry import default_device

    if options.device != AUTO:
        return options, ""
    for flag, off in (("--gpu-layers 0", options.gpu_layers == 0), ("--no-kv-offload", not options.kv_offload)):
        if off:
            return replace(options, device="cpu"), flag
    default = default_device(options.n_threads)
    return replace(options, device=",".join(default.names)), default.why


def projector_file(options: ModelOptions, gguf: GGUFFile, h: Hparams) -> str:
    """The projector's file: `mmproj`, else the one beside the model that belongs to it; "": none."""
    if options.mmproj or not options.mmproj_auto:
        return options.mmproj or ""
    from logitless.models.media.projector_choice import fitting_projector

    return str(fitting_projector(gguf.path, gguf, h) or "")


def _engine(path: str | Path, runner_options: RunnerOptions, *, target: ModelRunner | None = None) -> ModelRunner:
    try:
        return ModelRunner(path, runner_options, target=target)
    except ModelFileError:
        raise
    except ValueError as error:
        raise OptionConflict(str(error)) from None
