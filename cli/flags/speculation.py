"""The flags of speculation (llama-server's names), and what the scheduler and the parser of requests make of them."""

from __future__ import annotations

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
from logitless.cli.flags.model_options import Repo
from logitless.cli.flags.placement import layers
from logitless.engine.errors import RequestError

if TYPE_CHECKING:
    from logitless.engine.speculation.settings import NgramSizes, SpeculationParams, SpeculationSettings
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.hparams.hparams import Hparams


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
