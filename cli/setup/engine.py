"""From flags to what a command runs: sampling defaults, engine options, the model file's header and vocabulary."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.flags.model_keys import overrides
from logitless.cli.flags.options import SAMPLING
from logitless.cli.flags.placement import placement
from logitless.cli.progress import COMPILING, show_compiling
from logitless.models.errors import ModelFileError

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine, EngineOptions
    from logitless.engine.sampling.grammar_mask import Constraint
    from logitless.engine.sampling.sampler import SamplingParams
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.engine.speculation.speculator import Speculator
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams
    from logitless.models.tokenizer import Tokenizer

# flag → field of a request, where the names differ
_FIELDS = {
    "temp": "temperature",
    "dynatemp_exp": "dynatemp_exponent",
    "typical": "typical_p",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
}
_GRAMMARS = {  # flag → kind of grammar
    "grammar": "gbnf",
    "grammar_file": "gbnf",
    "json_schema": "json_schema",
    "json_schema_file": "json_schema",
}
_APART = {"samplers", "sampler_seq", "dry_sequence_breaker", "logit_bias", "ignore_eos", "backend_sampling", *_GRAMMARS}
_BIAS = re.compile(r"(\d+)([+-].+)")


def sampling_defaults(options: SimpleNamespace, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling flags, read by the very parser that reads a request's fields."""
    from logitless.engine.errors import InvalidRequest
    from logitless.engine.sampling.sampler import SamplingParams, chain_from_names
    from logitless.server.protocol.fields import Fields
    from logitless.server.protocol.sampling import parse_sampling

    flags = [f.dest for f in SAMPLING.flags if f.dest not in _APART]
    body = {_FIELDS.get(flag, flag): getattr(options, flag) for flag in flags}
    body["samplers"] = options.sampler_seq or [name for name in re.split("[;,]", options.samplers) if name]
    if options.dry_sequence_breaker:
        body["dry_sequence_breakers"] = options.dry_sequence_breaker
    body["ignore_eos"] = options.ignore_eos
    flag = "--sampler-seq" if options.sampler_seq else "--samplers"
    try:
        _, unknown = chain_from_names(body["samplers"])
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if unknown:
        raise UsageError(f"{flag}: unknown sampler {unknown[0][:32]!r}")
    try:
        params = parse_sampling(Fields(body), SamplingParams(), tokenizer, 0)
    except InvalidRequest as error:
        raise UsageError(error.message.replace("field '", "flag '")) from None
    if options.dry_sequence_breaker == ["none"]:
        params = replace(params, dry_sequence_breakers=())
    bias = tuple(_bias(text, tokenizer.n_vocab) for text in options.logit_bias)
    return replace(params, logit_bias=(*bias, *params.logit_bias), grammar=_constraint(options, tokenizer))


def _constraint(options: SimpleNamespace, tokenizer: Tokenizer) -> Constraint | None:
    """The grammar of the flags, if any."""
    given = [flag for flag in _GRAMMARS if getattr(options, flag)]
    if not given:
        return None
    from logitless.engine.sampling.grammar_mask import Constraint
    from logitless.models.grammar import Grammar, GrammarError

    names = [f"--{flag.replace('_', '-')}" for flag in given]
    if len(given) > 1:
        raise UsageError(f"{names[1]}: cannot be given together with {names[0]}")
    value, kind = getattr(options, given[0]), _GRAMMARS[given[0]]
    source = text_file(value) if given[0].endswith("_file") else value
    try:
        return Constraint(Grammar.compile(kind, source, tokenizer), source if kind == "gbnf" else "")
    except GrammarError as error:
        raise UsageError(f"{names[0]}: {error}") from None


def _bias(text: str, n_vocab: int) -> tuple[int, float]:
    found = _BIAS.fullmatch(text)
    try:
        token, value = int(found[1]), float(found[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise UsageError(f"--logit-bias: {text!r} is not a token id and a number, such as 15043+1") from None
    if token >= n_vocab or math.isnan(value) or value == math.inf:
        raise UsageError(f"--logit-bias: {text!r}: ids end at {n_vocab - 1}, and the bias is a number or -inf")
    return token, value


def n_threads(options: SimpleNamespace) -> int:
    """The larger of -t and -tb; 0 means every core."""
    asked = [n for n in (options.threads, options.threads_batch) if n is not None]
    return 0 if -1 in asked else max(asked)


def n_slots(options: SimpleNamespace) -> int:
    n: int = getattr(options, "parallel", 1)
    return 4 if n == -1 else n


def weights_nbytes(gguf: GGUFFile) -> int:
    """Of its weights as they are held. The file's own pages are the system's, and given back with each of them."""
    from logitless.models.quantization.requantize import held_nbytes

    return sum(held_nbytes(t.dtype, t.nbytes) for t in gguf.tensors.values())


def engine_options(options: SimpleNamespace, hparams: Hparams, nbytes: int) -> EngineOptions:
    """The engine's options; a context that does not fit into memory is refused, or made smaller if none was named."""
    from logitless.cli.commands.devices import total_memory
    from logitless.cli.flags.speculation import block_file, models
    from logitless.cli.setup.cache_bytes import cache_bytes
    from logitless.engine.kv_cache.recurrent_state import n_state_rows
    from logitless.engine.runner.model_runner import EngineOptions
    from logitless.engine.speculation.settings import NEXTN

    devices, places = placement(options)
    unified, per_slot = getattr(options, "kv_unified", True), getattr(options, "kv_unified_per_slot", 0)
    room = int(0.9 * total_memory()) - nbytes
    n_checkpoints = getattr(options, "ctx_checkpoints", 2)
    n_guesses = max(1, getattr(options, "spec_draft_n_max", 3)) if NEXTN in models(options) else 0
    if hparams.recurrent:
        states = n_state_rows(n_slots(options), n_checkpoints, n_guesses) * hparams.recurrent.nbytes
        if states > max(room, 0) and (n_checkpoints > 2 or n_guesses):
            needed, has = states / 2**30, max(room, 0) / 2**30
            flag = f"--ctx-checkpoints {n_checkpoints}" if n_checkpoints > 2 else f"--spec-type {NEXTN}"
            raise CliError(f"{flag}: would need {needed:.1f} GiB, there is room for {has:.1f}")
        room -= states
    types = {"type_k": options.cache_type_k, "type_v": options.cache_type_v}
    sizes = {"n_slots": n_slots(options), "n_ubatch": min(options.ubatch_size, options.batch_size)}
    swa_full = getattr(options, "swa_full", True) or bool(moves_for(options))
    cache = cache_bytes(hparams, **types, **sizes, n_kept=n_checkpoints, swa_full=swa_full, nextn=n_guesses > 0)
    n_ctx = options.ctx_size
    if cache.of(n_ctx) > max(room, 0) and n_ctx > 4096:
        needed, has = cache.of(n_ctx) / 2**30, max(room, 0) / 2**30
        raise CliError(f"--ctx-size {n_ctx}: the KV cache would need {needed:.1f} GiB, and there is room for {has:.1f}")
    if n_ctx == 0:
        wanted = (per_slot or hparams.n_ctx_train) * (1 if unified and not per_slot else n_slots(options))
        fits = max(cache.most(room // 2) // 256 * 256, 4096)
        n_ctx = min(wanted, fits)
        if n_ctx < wanted:
            print(f"logitless: context reduced from {wanted} to {n_ctx} tokens to fit into memory", file=sys.stderr)
    return EngineOptions(
        n_ctx=n_ctx,
        unified=unified,
        n_ctx_slot=per_slot,
        **types,
        **sizes,
        threads=n_threads(options),
        overrides=overrides(options),
        n_checkpoints=n_checkpoints,
        moves=moves_for(options),
        swa_full=swa_full,
        n_guesses=n_guesses,
        block=block_file(options),
        devices=devices,
        placement=places,
        embeddings=getattr(options, "embedding", False) or getattr(options, "rerank", False),
    )


def moves_for(options: SimpleNamespace) -> str:
    """The flag that needs cells of the cache to be moved, if there is one."""
    if getattr(options, "context_shift", False):
        return "--context-shift"
    return "--cache-reuse" if getattr(options, "cache_reuse", 0) else ""


def open_engine(path: str | Path, options: SimpleNamespace) -> Engine:
    """The engine of a model, with nothing allocated yet. Wrong options are told in one line."""
    from logitless.cli.flags import speculation
    from logitless.models.gguf.file import GGUFFile

    with GGUFFile.open(path, overrides(options), block=speculation.block_file(options)) as gguf:
        hparams = hparams_of_writer(gguf, path)
        speculation.check_nextn(options, gguf, hparams)
        wanted = engine_options(options, hparams, weights_nbytes(gguf))
    return make_engine(path, wanted)


def hparams_of_writer(gguf: GGUFFile, path: str | Path) -> Hparams:
    """The hyper-parameters of a model that writes; refuses one that makes vectors of texts."""
    from logitless.models.model import hparams_of

    h = hparams_of(gguf)
    if not h.causal:
        raise CliError(f"{path}: makes vectors of texts, it does not write: only `logitless serve` can run it")
    return h


def make_engine(path: str | Path, wanted: EngineOptions, *, beside: Engine | None = None) -> Engine:
    from logitless.engine.runner.model_runner import Engine

    show_compiling()
    try:
        return Engine(path, wanted, beside=beside)
    except ModelFileError:
        raise
    except ValueError as error:
        raise CliError(str(error)) from None


def load_weights(engine: Engine) -> None:
    """Bring the model to the device."""
    try:
        engine.load()
    except MemoryError as error:
        hint = "" if engine.devices == ("cpu",) else "; --gpu-layers N leaves layers to the CPU"
        raise CliError(f"out of memory{f' ({error})' if str(error) else ''}{hint}") from None
    finally:
        COMPILING.end()


def make_scheduler(
    engine: Engine, tokenizer: Tokenizer, options: SimpleNamespace, speculator: Speculator | None = None
) -> Scheduler:
    from logitless.cli.commands.devices import total_memory
    from logitless.cli.flags.cache_options import cache_ram_bytes
    from logitless.engine.scheduler.scheduler import Scheduler

    if options.ctx_size and engine.n_ctx_slot > engine.hparams.n_ctx_train:
        print(
            f"logitless: warning: a sequence may have {engine.n_ctx_slot} tokens, the model was trained on "
            f"{engine.hparams.n_ctx_train}",
            file=sys.stderr,
        )
    return Scheduler(
        engine,
        tokenizer,
        n_slots=engine.options.n_slots,
        n_ctx=engine.n_ctx,
        n_ubatch=engine.options.n_ubatch,
        n_batch=options.batch_size,
        unified=engine.options.unified,
        n_ctx_slot=engine.n_ctx_slot,
        slot_prompt_similarity=getattr(options, "slot_prompt_similarity", 0.1),
        cache_ram=cache_ram_bytes(getattr(options, "cache_ram", 0), total_memory()),
        context_shift=getattr(options, "context_shift", False),
        cache_idle_slots=getattr(options, "cache_idle_slots", True),
        queue_requests=getattr(options, "queue_requests", -1),
        queue_tokens=getattr(options, "queue_tokens", -1),
        speculator=speculator,
    )


def model_path(options: SimpleNamespace, command: str) -> str:
    path = named_model(options)
    if path is None:
        raise UsageError(f"{command}: -m FILE is required")
    return str(path)


def named_model(options: SimpleNamespace) -> Path | None:
    """The model's file, downloaded if need be; None: no flag names one."""
    if any(getattr(options, flag, None) for flag in ("hf_repo", "hf_file", "model_url")):
        from logitless.cli.hub import model_source

        return model_source.find(options)
    return Path(options.model) if options.model else None


def text_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as error:
        raise CliError(f"{path}: byte {error.start} is not UTF-8") from None
