"""Refused combinations of flags: flags of `finetune` and `train` that have no effect beside others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError

_COSINE = ("cos_decay_steps", "cos_decay_min", "cos_decay_restart", "enable_restart")
_ADAM = ("adam_decay_min_ndim", "adam_beta1", "adam_beta2", "adam_eps", "adam_gclip", "adam_decay")
_SAMPLES = ("include_sample_start", "escape", "overlapping_samples", "fill_with_next_samples", "sample_random_offsets")
_SEPARATORS = ("separate_with_eos", "separate_with_bos")
_OPTIONS = ("lora_r", "lora_alpha", "lora_target_modules", "lora_rslora", "lora_dora", "lora_init")
_ADAPTER = (*_OPTIONS, "lora_plus_ratio")
_GRADERS = ("grader", "allow_graders", "grader_url", "grader_api_key")
_ANSWERS = ("n_samples", "max_completion_tokens", "max_tool_turns", "eval_samples")
_REWARDED = (*_GRADERS, *_ANSWERS, "n_updates", "clip_range", "loss_type")
_TEXTS = ("stride", "sample_start")
_WITHOUT_TRAINING = frozenset(  # what --only-write-lora uses, or compares with the checkpoint's
    [
        "model",
        "lora_out",
        "only_write_lora",
        "n",
        "checkpoint_in",
        "pattern_fn_it",
        "fn_latest",
        *_OPTIONS,
        "verbose",
        "device",
        "threads",
        "show",
    ]
)


def check_used(o: SimpleNamespace, *, full: bool, command: str = "finetune") -> None:
    """UsageError: a flag is given that the others leave without a meaning. `full`: all weights are
    trained, no adapter."""
    given = {dest: words[0] for dest, words in o.given}
    for dest, reason in (
        *_unused_method(o, full),
        *_unused_data(o),
        *_unused_optimizer(o),
        *_unused_names(o),
        *_unused_reports(o),
    ):
        if dest in given:
            raise UsageError(f"{command}: {given[dest]} {reason}")


def check_only_write(o: SimpleNamespace) -> None:
    """UsageError: a flag of training is given, and nothing is trained."""
    for dest, words in o.given:
        if dest not in _WITHOUT_TRAINING and not dest.startswith("rank_"):
            raise UsageError(f"finetune: {words[0]} is of training, and --only-write-lora trains nothing")


def _each(dests: tuple[str, ...], reason: str) -> Iterator[tuple[str, str]]:
    return ((dest, reason) for dest in dests)


def _unused_method(o: SimpleNamespace, full: bool) -> Iterator[tuple[str, str]]:
    if full:
        ranks = tuple(dest for dest in vars(o) if dest.startswith("rank_"))
        yield from _each((*_ADAPTER, *ranks), "is of an adapter, and all weights are trained")
    else:
        yield from _each(("train_tensors",), "is of a whole model, and an adapter is trained")
        yield from _each(("output_type",), "is of a whole model, and an adapter is written in f32")
    method = getattr(o, "method", "supervised")
    if method == "reinforcement":
        rewarded = "follows the prompts and --max-completion-tokens in reinforcement"
        yield from _each(("ctx_size", *_TEXTS, *_SAMPLES, *_SEPARATORS), rewarded)
    else:
        yield from _each(_REWARDED, f"is of reinforcement, and the method is {method}")
    if method != "supervised":
        yield from _each(("pack", "neftune_noise_alpha"), f"is of supervised learning, and the method is {method}")


def _unused_data(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    from logitless.training.data.sources import is_rows

    if o.file is not None:
        rows, text = (f"is of {kind}, and --file {o.file} is not one" for kind in ("a .jsonl file", "a text"))
        if is_rows(o.file):
            yield from _each(("stride", "sample_start", *_SAMPLES, *_SEPARATORS), text)
        else:
            yield from _each(("pack",), rows)
    if o.sample_start is None:
        yield from _each((*_SAMPLES, *_SEPARATORS), "is of --sample-start, which is not given")
    else:
        yield from _each(("stride",), "is of a text without --sample-start")
        if not o.sample_start:
            reason = "has no meaning where a sample begins at every token (--sample-start '')"
            yield from _each(("include_sample_start", "overlapping_samples"), reason)
    if not o.fill_with_next_samples:
        yield from _each(_SEPARATORS, "is of --fill-with-next-samples, which is not given")
    if not o.val_split:
        yield from _each(("validate_every",), "validates nothing with a --val-split of 0")
    if not o.checkpoint_in:
        yield from _each(("force_reshuffle",), "is of --checkpoint-in, which is not given")


def _unused_optimizer(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    if o.learning_rate is not None:
        reason = "is of the schedule with warm-up and cosine, which -lr replaces"
        yield from _each(("adam_alpha", "adam_min_alpha", "warmup", *_COSINE), reason)
        if 0 < o.learning_rate <= o.learning_rate_min:
            yield "learning_rate_min", f"of {o.learning_rate_min:g} is not below the rate of -lr"
    else:
        yield from _each(("learning_rate_min", "decay_epochs"), "halves the rate of -lr, which is not given")
    if not o.learning_rate_min:
        yield "decay_epochs", "is of -lr-min, which is not given"
    if not o.enable_restart:
        yield "cos_decay_restart", "is of --enable-restart, which is not given"
    if o.optimizer != "adamw":
        yield from _each(_ADAM, f"is of adamw, and the optimizer is {o.optimizer}")
    if o.weight_decay is not None:
        yield "adam_decay", "and -wd are two names of the weight decay: give one of them"
    if not o.opt_past:
        yield "opt_delta", "is of --opt-past, which is not given"


def _unused_reports(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    if not o.report_to:
        yield from _each(("report_project", "report_name", "report_dir"), "is of --report-to, which is not given")


def _unused_names(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    names = (getattr(o, "lora_out", None), o.output, o.checkpoint_in, o.checkpoint_out)
    if not any(name and o.pattern_fn_it in Path(name).name for name in names):
        yield from _each(("pattern_fn_it", "fn_latest"), "stands in no file's name")
