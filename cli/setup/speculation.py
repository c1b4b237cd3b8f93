"""Draft models and speculators from command-line options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import (
    CliError,
    UsageError,
)
from logitless.cli.flags.model_keys import overrides
from logitless.cli.flags.placement import n_layers

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import Engine
    from logitless.engine.speculation.speculator import BatchDrafter, Speculator
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.tokenizer import Tokenizer
from logitless.cli.flags.speculation import _wants_block, block_file, settings

MOST_DIFFERENCE = 128  # between the sizes of two vocabularies; like the next, llama.cpp's rule


FIRST_COMMON = 5  # the token from which on two vocabularies must agree


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
