"""The flags of speculation (llama-server's names), and what the scheduler and the parser of requests make of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import (
    CliError,
    Flag,
    Group,
    UsageError,
    choice,
    device_list,
    file_name,
    number,
    text,
    whole,
)
from logitless.cli.flags.model_keys import overrides
from logitless.cli.flags.model_options import Repo
from logitless.cli.flags.placement import layers, n_layers
from logitless.engine.errors import RequestError

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine
    from logitless.engine.speculation.settings import NgramSizes, SpeculationParams, SpeculationSettings
    from logitless.engine.speculation.speculator import BatchDrafter, Speculator
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams
    from logitless.models.tokenizer import Tokenizer

MOST_DIFFERENCE = 128  # between the sizes of two vocabularies; like the next, llama.cpp's rule
FIRST_COMMON = 5  # the token from which on two vocabularies must agree

KINDS = "draft-simple, draft-mtp, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache"


def _sizes(kind: str) -> tuple[Flag, ...]:
    return (
        Flag(f"--spec-{kind}-size-n", f"{kind}: tokens that must have come before", whole(1, 1024), 12),
        Flag(f"--spec-{kind}-size-m", f"{kind}: most tokens to draft", whole(1, 1024), 48),
        Flag(f"--spec-{kind}-min-hits", f"{kind}: how often they must have come", whole(1, 65535), 1),
    )


def speculation_group(kv_types: tuple[str, ...]) -> Group:
    """The group of flags."""
    return Group(
        "Speculation (same texts, fewer steps; a request may choose with speculative.type)",
        (
            Flag(
                "--spec-type",
                f"who drafts, separated by commas: none, {KINDS}",
                text,
                "none",
                "KINDS",
                env="LLAMA_ARG_SPEC_TYPE",
            ),
            Flag("--spec-default", "the same as --spec-type ngram-mod"),
            Flag(
                "-md --model-draft --spec-draft-model",
                "a smaller model with the same vocabulary, for draft-simple; or a file with the block of draft-mtp",
                file_name,
                metavar="FILE",
                env="LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_MODEL_DRAFT",
            ),
            Flag(
                "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
                "the same of Hugging Face's hub: USER/REPO:QUANT",
                Repo.parse,
                metavar="REPO",
                env="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
            ),
            Flag(
                "-devd --device-draft --spec-draft-device",
                "what computes the draft model (default: what computes the model)",
                device_list,
                None,
                "NAME,...",
            ),
            Flag(
                "--spec-draft-n-max --draft --draft-n --draft-max",
                "draft-simple, draft-mtp: most tokens to draft",
                whole(0, 1024),
                3,
                env="LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX",
            ),
            Flag(
                "--spec-draft-adapt",
                "draft-simple, draft-mtp: drafts are as long as pays, as it turns out; else as long as they may be",
                default=True,
                off="--no-spec-draft-adapt",
            ),
            Flag(
                "--spec-draft-n-min --draft-min --draft-n-min",
                "a shorter draft is not verified",
                whole(0, 1024),
                0,
                env="LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_DRAFT_MIN",
            ),
            Flag(
                "--spec-draft-p-min --draft-p-min",
                "draft-simple, draft-mtp: stop where a choice has less probability",
                number(0, 1),
                0.0,
                "X",
                env="LLAMA_ARG_SPEC_DRAFT_P_MIN LLAMA_ARG_DRAFT_P_MIN",
            ),
            Flag(
                "-ctkd --cache-type-k-draft --spec-draft-type-k",
                "number type of the draft model's cached keys",
                choice(*kv_types),
                "f16",
                "TYPE",
                env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K LLAMA_ARG_CACHE_TYPE_K_DRAFT",
            ),
            Flag(
                "-ctvd --cache-type-v-draft --spec-draft-type-v",
                "number type of the draft model's cached values",
                choice(*kv_types),
                "f16",
                "TYPE",
                env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V LLAMA_ARG_CACHE_TYPE_V_DRAFT",
            ),
            Flag(
                "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
                "how many of the draft model's layers the devices have: a number, auto or all",
                layers,
                "auto",
                env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
            ),
            *_sizes("ngram-simple"),
            *_sizes("ngram-map-k"),
            *_sizes("ngram-map-k4v"),
            Flag("--spec-ngram-mod-n-match", "ngram-mod: tokens that must have come before", whole(1, 1024), 24),
            Flag("--spec-ngram-mod-n-min", "ngram-mod: a shorter draft is not verified", whole(0, 1024), 48),
            Flag("--spec-ngram-mod-n-max", "ngram-mod: most tokens to draft", whole(1, 1024), 64),
        ),
    )


def settings(options: SimpleNamespace) -> SpeculationSettings:
    """The sizes of each kind."""
    from logitless.engine.speculation.settings import NgramSizes, SpeculationSettings

    def sizes(kind: str) -> NgramSizes:
        return NgramSizes(*(getattr(options, f"spec_{kind}_{name}") for name in ("size_n", "size_m", "min_hits")))

    return SpeculationSettings(
        draft_n_max=options.spec_draft_n_max,
        simple=sizes("ngram_simple"),
        map_k=sizes("ngram_map_k"),
        map_k4v=sizes("ngram_map_k4v"),
        mod_n_match=options.spec_ngram_mod_n_match,
        mod_n_min=options.spec_ngram_mod_n_min,
        mod_n_max=options.spec_ngram_mod_n_max,
    )


def defaults(options: SimpleNamespace) -> SpeculationParams:
    """What a request gets that says nothing about speculation."""
    from logitless.engine.speculation.settings import MODEL, SpeculationParams
    from logitless.server.protocol.speculation import parse_kinds

    try:
        kinds = parse_kinds("spec-type", options.spec_type, models(options))
    except RequestError as error:
        line = error.message.replace("field 'spec-type'", "--spec-type")
        if "needs a server" in line:
            raise CliError(f"--spec-type {MODEL} needs --model-draft FILE") from None
        raise UsageError(line) from None
    if getattr(options, "spec_default", False) and "ngram-mod" not in kinds:
        kinds = (*kinds, "ngram-mod")
    n_min, p_min = (getattr(options, f"spec_draft_{name}", 0) for name in ("n_min", "p_min"))
    return SpeculationParams(kinds, n_min=n_min, p_min=p_min)


def models(options: SimpleNamespace) -> tuple[str, ...]:
    """The kinds of models that draft."""
    from logitless.engine.speculation.settings import MODEL, NEXTN

    smaller = getattr(options, "model_draft", None) and not block_file(options)
    return ((MODEL,) if smaller else ()) + ((NEXTN,) if NEXTN in _named(options) else ())


def block_file(options: SimpleNamespace) -> str:
    """The draft model's file, where it is that of the model's own block."""
    return str(getattr(options, "model_draft", None) or "") if _wants_block(options) else ""


def _wants_block(options: SimpleNamespace) -> bool:
    """draft-mtp, and no smaller model."""
    from logitless.engine.speculation.settings import MODEL, NEXTN

    kinds = _named(options)
    return NEXTN in kinds and MODEL not in kinds


def _named(options: SimpleNamespace) -> list[str]:
    return [kind.strip() for kind in getattr(options, "spec_type", "").split(",")]


def check_nextn(options: SimpleNamespace, gguf: GGUFFile, hparams: Hparams) -> None:
    """Refuse draft-mtp where the file has no block that guesses."""
    from logitless.engine.speculation.settings import NEXTN
    from logitless.models.architectures.mtp import can_guess
    from logitless.models.architectures.registry import ARCHITECTURES
    from logitless.models.weights.weights import check_weights

    if NEXTN not in models(options):
        return
    if not can_guess(gguf, hparams):
        known = ", ".join(name for name, kind in ARCHITECTURES.items() if kind.nextn)
        raise CliError(
            f"--spec-type {NEXTN}: the model has no block that predicts one token more (files of {known} may)"
        )
    check_weights(gguf, hparams, nextn=True)


def find_draft_model(options: SimpleNamespace, path: Path) -> None:
    """Download the draft model, or the block that draft-mtp wants, if it is the hub's; `path`: the model's file."""
    if options.hf_repo_draft is not None and options.model_draft:
        raise UsageError("--hf-repo-draft and --model-draft: give one of them")
    repo, wants_block = options.hf_repo_draft, _wants_block(options)
    if repo is None and wants_block and not options.model_draft and not _has_block(path):
        repo = options.hf_repo
    if repo is None:
        return
    from logitless.cli.hub.hub import Hub

    hub = Hub(options.hf_token, offline=options.offline)
    found = hub.block(repo, path) if wants_block else None
    if found is None and options.hf_repo_draft is not None:
        found = hub.model(repo)
    options.model_draft = None if found is None else str(found)


def _has_block(path: Path) -> bool:
    from logitless.models.architectures.mtp import can_guess
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of

    with GGUFFile.open(path) as gguf:
        return can_guess(gguf, hparams_of(gguf))


def check_draft_model(options: SimpleNamespace, target: GGUFFile) -> None:
    """Refuse a draft model that cannot be read, or that means something else by its tokens."""
    from logitless.engine.speculation.settings import NEXTN
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of

    if options.model_draft is None or block_file(options):
        return
    with GGUFFile.open(options.model_draft, overrides(options)) as draft:
        if any(".nextn." in name for name in draft.tensors) and not any(n.startswith("blk.0.") for n in draft.tensors):
            raise CliError(
                f"--model-draft {options.model_draft}: has a block that predicts one token more, and no layers before "
                f"it: give --spec-type {NEXTN}"
            )
        hparams_of(draft)
        both = target.metadata, draft.metadata
        kinds, texts = ([m.get(f"tokenizer.ggml.{key}") for m in both] for key in ("model", "tokens"))
        reason = ""
        if kinds[0] != kinds[1]:
            reason = f"its vocabulary is of kind {kinds[1]}, the model's of kind {kinds[0]}"
        elif not isinstance(texts[0], list) or not isinstance(texts[1], list):
            reason = "one of the two files has no vocabulary"
        elif abs(len(texts[0]) - len(texts[1])) > MOST_DIFFERENCE:
            reason = f"its vocabulary has {len(texts[1])} tokens, the model's has {len(texts[0])}"
        else:
            pairs = enumerate(zip(*texts, strict=False))
            wrong = next((id for id, (a, b) in pairs if a != b and id >= FIRST_COMMON), None)
            if wrong is not None:
                reason = f"token {wrong} is {texts[1][wrong]!r}, the model's is {texts[0][wrong]!r}"
        if reason:
            raise CliError(f"--model-draft {options.model_draft}: {reason[:300]}")


def draft_engine(options: SimpleNamespace, engine: Engine) -> Engine | None:
    """The engine of the smaller model beside the other's, with nothing allocated yet; None where no such model
    drafts."""
    from dataclasses import replace

    from logitless.cli.setup.engine import make_engine
    from logitless.engine.runner.placement import PlacementOptions
    from logitless.engine.speculation.state_rows import N_ROWS

    if options.model_draft is None or block_file(options):
        return None
    devices = tuple(options.device_draft.split(",")) if options.device_draft else engine.options.devices
    wanted = replace(
        engine.options,
        n_ctx=engine.n_ctx,
        type_k=options.cache_type_k_draft,
        type_v=options.cache_type_v_draft,
        devices=devices,
        placement=PlacementOptions(n_layers(options.gpu_layers_draft)),
        swa_full=True,  # it goes back whenever it was wrong
        n_checkpoints=N_ROWS - 2,
        n_guesses=0,
        block="",
    )
    return make_engine(options.model_draft, wanted, beside=engine if devices == engine.options.devices else None)


def make_speculator(options: SimpleNamespace, engine: Engine, tokenizer: Tokenizer) -> Speculator:
    """The drafters of a server, with the draft model loaded beside the engine's."""
    from logitless.cli.setup.engine import load_weights
    from logitless.engine.speculation.draft_length import Worth
    from logitless.engine.speculation.draft_model import ModelDrafter
    from logitless.engine.speculation.mtp import NextnDrafter
    from logitless.engine.speculation.settings import MODEL, NEXTN
    from logitless.engine.speculation.speculator import Speculator

    drafting: dict[str, BatchDrafter] = {}
    if engine.hidden is not None:
        drafting[NEXTN] = NextnDrafter(engine, engine.hidden, engine.hparams.n_vocab, tokenizer.eog_ids)
    if (draft := draft_engine(options, engine)) is not None:
        load_weights(draft)
        drafting[MODEL] = ModelDrafter(
            draft,
            n_pages=draft.n_pages,
            n_vocab=min(draft.hparams.n_vocab, engine.hparams.n_vocab),
            n_ubatch=draft.options.n_ubatch,
            eog_ids=tokenizer.eog_ids,
            has_states=draft.states is not None,
        )
    worth = Worth() if drafting and options.spec_draft_adapt else None
    return Speculator(settings(options), drafting, worth)
