"""Speculative decoding from the options: kinds of drafters, the draft model, the MTP head, drafter files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from logitless.engine.loading.options import ModelOptions, OptionConflict, OptionError
from logitless.engine.loading.placement import draft_placement
from logitless.engine.runner.model_runner import ModelRunner, RunnerOptions
from logitless.engine.speculation.draft_builder import TokenSelection
from logitless.engine.speculation.draft_learner import DraftLearner
from logitless.engine.speculation.draft_length import RARE_PROBE, AdaptiveDraftLength
from logitless.engine.speculation.draft_model import N_ROWS, ModelDrafter
from logitless.engine.speculation.head_file import HeadFile
from logitless.engine.speculation.mtp import DFlashDrafter, LearningDrafter, MTPDrafter
from logitless.engine.speculation.settings import (
    DFLASH,
    EAGLE3,
    HEADS,
    KINDS,
    LEARN,
    MODEL,
    MODEL_ONLY,
    MODELS,
    MTP,
    NgramSizes,
    SpeculationParams,
    SpeculationSettings,
)
from logitless.engine.speculation.speculator import BatchDrafter, Speculator
from logitless.models.architectures.mtp import can_guess
from logitless.models.architectures.registry import ARCHITECTURES
from logitless.models.drafters.drafter_file import MAX_VOCAB_DIFFERENCE, drafter_kind, open_drafter
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.hparams.overrides import Overrides
from logitless.models.model import hparams_of
from logitless.models.tokenizer import Tokenizer
from logitless.models.weights.weights import check_weights

FIRST_COMMON = 5  # the token id from which on both vocabularies must agree; llama.cpp's rule
KIND_OF = {"dflash": DFLASH, "eagle3": EAGLE3, "gemma4-assistant": MTP}  # by architecture of a drafter's file


def spec_kinds(options: ModelOptions) -> tuple[str, ...]:
    """The kinds of `spec_type`, each once."""
    kinds = [kind for kind in (part.strip() for part in options.spec_type.split(",")) if kind not in ("", "none")]
    kinds += [LEARN] * options.spec_learn
    for kind in kinds:
        if kind in MODEL_ONLY:
            raise OptionError(f"--spec-type: {kind} is not supported; this server has {', '.join(KINDS)}")
        if kind not in KINDS:
            raise OptionError(f"--spec-type: {kind[:32]!r} is not one of none, {', '.join(KINDS)}")
    return tuple(dict.fromkeys(kinds))


def with_drafter_kind(options: ModelOptions) -> ModelOptions:
    """The options with the kind of the drafter or MTP head in `model_draft` added to `spec_type`.

    A draft model adds none. OptionConflict: `spec_type` names another kind than the file's, or one that needs a
    file."""
    kinds, path = spec_kinds(options), options.model_draft
    file_kind = "" if path is None else KIND_OF.get(drafter_kind(path), "")
    for kind in kinds:
        if kind in KIND_OF.values() and kind not in (file_kind, MTP):
            needs = "needs --model-draft FILE, a drafter of this model"
            raise OptionConflict(f"--spec-type {kind}: {f'{path} is no file of such a drafter' if path else needs}")
        if file_kind and kind in MODELS and kind != file_kind:
            raise OptionConflict(f"--spec-type {kind}: {path} is a drafter for {file_kind}")
    if not file_kind and path is not None and not set(kinds) & set(MODELS) and _has_mtp_head(path):
        file_kind = MTP
    return options if not file_kind or file_kind in kinds else replace(options, spec_type=",".join((*kinds, file_kind)))


def _has_mtp_head(path: str) -> bool:
    """True if the file's last block predicts one token more."""
    with GGUFFile.open(path) as gguf:
        n = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.block_count")
        return isinstance(n, int) and f"blk.{n - 1}.nextn.eh_proj.weight" in gguf.tensors


def drafter_file(options: ModelOptions) -> str:
    """The file of a drafter that reads the model's hidden states; "": none."""
    return options.model_draft if options.model_draft and drafter_kind(options.model_draft) else ""


def mtp_file(options: ModelOptions) -> str:
    """The file of the MTP head: `model_draft`, where draft-mtp and no draft model is wanted; "": none."""
    kinds = spec_kinds(options)
    wants_head = MTP in kinds and MODEL not in kinds and not drafter_file(options)
    return options.model_draft or "" if wants_head else ""


def model_kinds(options: ModelOptions) -> tuple[str, ...]:
    """The kinds of drafters that have weights: a draft model, the MTP head, a drafter, a draft head.

    OptionConflict: a draft head beside another one of them, which would always draft first."""
    with_model = bool(options.model_draft) and not mtp_file(options) and not drafter_file(options)
    kinds = ((MODEL,) if with_model else ()) + tuple(kind for kind in HEADS if kind in spec_kinds(options))
    if len(kinds) > 1 and LEARN in kinds:
        raise OptionConflict(f"--spec-learn: {kinds[0]} drafts already; n-grams can go before it")
    return kinds


def default_speculation(options: ModelOptions) -> SpeculationParams:
    """Speculation of a request that says nothing about it."""
    kinds = spec_kinds(options)
    if MODEL in kinds and MODEL not in model_kinds(options):
        raise OptionConflict(f"--spec-type {MODEL} needs --model-draft FILE")
    if options.spec_default and "ngram-mod" not in kinds:
        kinds = (*kinds, "ngram-mod")
    return SpeculationParams(kinds, n_min=options.spec_draft_n_min, p_min=options.spec_draft_p_min)


def speculation_settings(options: ModelOptions) -> SpeculationSettings:
    """Lengths of keys and drafts of each kind."""

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


def n_draft_tokens(options: ModelOptions) -> int:
    """Draft tokens that recurrent states need rows for; 0: no MTP head, drafter or draft head is loaded."""
    return max(1, options.spec_draft_n_max) if set(HEADS) & set(model_kinds(options)) else 0


def check_mtp_head(options: ModelOptions, gguf: GGUFFile, hparams: Hparams) -> None:
    """OptionConflict: draft-mtp is wanted, and the file has no MTP head; or no draft head can learn from the model."""
    if not hparams.causal and LEARN in model_kinds(options):
        raise OptionConflict("--spec-learn: the model makes vectors of texts, it does not write")
    if hparams.n_encoder and LEARN in model_kinds(options):
        raise OptionConflict("--spec-learn: the model has an encoder, behind which no head can learn")
    if MTP not in model_kinds(options) or drafter_file(options):
        return
    if not can_guess(gguf, hparams):
        known = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.mtp.enabled)
        raise OptionConflict(
            f"--spec-type {MTP}: the model has no block that predicts one token more (files of {known} may)"
        )
    check_weights(gguf, hparams, mtp=True)


def check_draft_model(options: ModelOptions, overrides: Overrides, target: GGUFFile, hparams: Hparams) -> None:
    """OptionConflict: the draft model or the drafter has another vocabulary. ModelFileError: it cannot be read,
    or does not fit."""
    if options.model_draft is None or mtp_file(options):
        return
    if drafter_file(options):
        with open_drafter(options.model_draft, hparams).gguf as gguf:
            reason = _vocabulary_difference(target, gguf)
        if reason:
            raise OptionConflict(f"--model-draft {options.model_draft}: {reason[:300]}")
        return
    with GGUFFile.open(options.model_draft, overrides) as draft:
        if any(".nextn." in name for name in draft.tensors) and not any(n.startswith("blk.0.") for n in draft.tensors):
            raise OptionConflict(
                f"--model-draft {options.model_draft}: has a block that predicts one token more, and no layers before "
                f"it: give --spec-type {MTP}"
            )
        if hparams_of(draft).n_encoder:
            raise OptionConflict(f"--model-draft {options.model_draft}: has an encoder and cannot draft")
        if reason := _vocabulary_difference(target, draft):
            raise OptionConflict(f"--model-draft {options.model_draft}: {reason[:300]}")


def _vocabulary_difference(target: GGUFFile, draft: GGUFFile) -> str:
    """The reason why draft tokens would mean something else to the model; "": they do not."""
    both = target.metadata, draft.metadata
    kinds, texts = ([m.get(f"tokenizer.ggml.{key}") for m in both] for key in ("model", "tokens"))
    if kinds[0] != kinds[1]:
        return f"its vocabulary is of kind {kinds[1]}, the model's of kind {kinds[0]}"
    if not isinstance(texts[0], list) or not isinstance(texts[1], list):
        return "one of the two files has no vocabulary"
    if abs(len(texts[0]) - len(texts[1])) > MAX_VOCAB_DIFFERENCE:
        return f"its vocabulary has {len(texts[1])} tokens, the model's has {len(texts[0])}"
    pairs = enumerate(zip(*texts, strict=False))
    wrong = next((id for id, (a, b) in pairs if a != b and id >= FIRST_COMMON), None)
    return "" if wrong is None else f"token {wrong} is {texts[1][wrong]!r}, the model's is {texts[0][wrong]!r}"


def draft_engine_options(options: ModelOptions, engine: ModelRunner) -> RunnerOptions:
    """Engine options of the draft model beside the model's engine."""
    devices = tuple(options.device_draft.split(",")) if options.device_draft else engine.options.devices
    return replace(
        engine.options,
        n_ctx=engine.n_ctx,
        least_ctx=0,
        host_bytes=0,
        type_k=options.cache_type_k_draft,
        type_v=options.cache_type_v_draft,
        devices=devices,
        placement=draft_placement(options, devices),
        swa_full=True,  # rejected drafts go back to any place
        n_checkpoints=N_ROWS - 2,
        n_draft_tokens=0,
        learns=False,
        control_vectors=(),
        block="",
        drafter="",
    )


def make_learner(options: ModelOptions, engine: ModelRunner, folder: Path) -> DraftLearner | None:
    """The learner of a draft head, with the values of its file; None: the options want none.

    `folder`: the cache folder. Call it before the engine's weights are loaded."""
    if engine.draft_head is None:
        return None
    file = HeadFile(folder, engine.draft_head)
    file.load()
    return DraftLearner(engine, file, options.spec_draft_n_max)


def make_speculator(
    options: ModelOptions,
    engine: ModelRunner,
    draft: ModelRunner | None,
    tokenizer: Tokenizer,
    learner: DraftLearner | None = None,
) -> Speculator:
    """The drafters of a model; `draft`: the loaded engine of the draft model; `learner`: of a draft head."""
    drafters: dict[str, BatchDrafter] = {}
    if engine.hidden is not None and learner is not None:
        drafters[LEARN] = LearningDrafter(engine, engine.hidden, learner, tokenizer.eog_ids)
    elif engine.hidden is not None:
        file, all_ids = engine.drafter_file, range(engine.hparams.n_vocab)
        kind = MTP if file is None else KIND_OF[file.hparams.arch]
        ids = all_ids if file is None or file.ids is None else TokenSelection(file.ids.tolist())
        if file is not None and kind == DFLASH:
            drafters[kind] = DFlashDrafter(engine, file, ids, tokenizer.eog_ids)
        else:
            drafters[kind] = MTPDrafter(engine, engine.hidden, ids, tokenizer.eog_ids)
    if draft is not None:
        drafters[MODEL] = ModelDrafter(
            draft,
            n_blocks=draft.n_blocks,
            n_vocab=min(draft.hparams.n_vocab, engine.hparams.n_vocab),
            n_ubatch=draft.options.n_ubatch,
            eog_ids=tokenizer.eog_ids,
            has_states=draft.states is not None,
        )
    draft_length = None
    if drafters and options.spec_draft_adapt:
        draft_length = AdaptiveDraftLength() if learner is None else AdaptiveDraftLength(RARE_PROBE)
    if learner is not None and draft_length is not None:
        draft_length.acceptance.expect(learner.accuracy)
        learner.on_change = draft_length.acceptance.expect
    return Speculator(speculation_settings(options), drafters, draft_length)
