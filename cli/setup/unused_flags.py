"""Refused combinations of flags: flags of `finetune` and `train` that have no effect beside others.

What training/config.py declares of a hyperparameter (its methods, an adapter's, of another field) is
checked by those declarations; here are the rules of flags that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError
from logitless.cli.flags.options_training import HYPERPARAMETERS
from logitless.training.adapters.options import HYPERPARAMETERS as OF_ADAPTER
from logitless.training.config import FIELDS, METHODS, REINFORCEMENT, SUPERVISED, not_of_method, unused

_FIELDS = {flag.dest: name for name, flag in HYPERPARAMETERS.items()}
_COSINE = ("cos_decay_steps", "cos_decay_min", "cos_decay_restart", "enable_restart")
_SAMPLES = tuple(name for name in FIELDS if FIELDS[name][1].needs in ("sample_start", "fill_with_next_samples"))
_GRADERS = ("grader", "allow_graders", "grader_url", "grader_api_key")
_WITHOUT_TRAINING = frozenset(  # what --only-write-lora uses, or compares with the checkpoint's
    (
        *("model", "lora_out", "only_write_lora", "n", "checkpoint_in", "pattern_fn_it", "fn_latest"),
        *("verbose", "device", "threads", "show", *OF_ADAPTER),
    )
)


def check_used(o: SimpleNamespace, *, full: bool, command: str = "finetune") -> None:
    """UsageError: a flag is given that the others leave without a meaning. `full`: all weights are
    trained, no adapter."""
    names = {dest: words[0] for dest, words in o.given}
    values = {name: getattr(o, flag.dest, None) for name, flag in HYPERPARAMETERS.items()}
    method: str = getattr(o, "method", SUPERVISED)
    values |= {"full": full, "method": method}
    declared = unused(
        values, [_FIELDS[dest] for dest in names if dest in _FIELDS], lambda n: HYPERPARAMETERS[n].all_names[0]
    )
    for dest, reason in (
        *((HYPERPARAMETERS[name].dest, reason) for name, reason in declared),
        *_unused_method(o, full, method),
        *_unused_data(o),
        *_unused_optimizer(o),
        *_unused_names(o),
    ):
        if dest in names:
            raise UsageError(f"{command}: {names[dest]} {reason}")


def check_only_write(o: SimpleNamespace) -> None:
    """UsageError: a flag of training is given, and nothing is trained."""
    for dest, words in o.given:
        if dest not in _WITHOUT_TRAINING and not dest.startswith("rank_"):
            raise UsageError(f"finetune: {words[0]} is of training, and --only-write-lora trains nothing")


def _each(dests: tuple[str, ...], reason: str) -> Iterator[tuple[str, str]]:
    return ((dest, reason) for dest in dests)


def _unused_method(o: SimpleNamespace, full: bool, method: str) -> Iterator[tuple[str, str]]:
    if full:
        ranks = tuple(dest for dest in vars(o) if dest.startswith("rank_"))
        yield from _each(ranks, "is of an adapter, and all weights are trained")
    else:
        yield "output_type", "is of a whole model, and an adapter is written in f32"
    if method in METHODS:
        yield from _each(_GRADERS, not_of_method((REINFORCEMENT,), method))


def _unused_data(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    from logitless.training.data.sources import is_rows

    if o.file is not None:
        rows, text = (f"is of {kind}, and --file {o.file} is not one" for kind in ("a .jsonl file", "a text"))
        if is_rows(o.file):
            yield from _each(("stride", "sample_start", "escape", *_SAMPLES), text)
        else:
            yield "pack", rows
    if o.sample_start is None:
        yield "escape", "is of --sample-start, which is not given"
    else:
        yield "stride", "is of a text without --sample-start"
        if not o.sample_start:
            reason = "has no meaning where a sample begins at every token (--sample-start '')"
            yield from _each(("include_sample_start", "overlapping_samples"), reason)
    if not o.checkpoint_in:
        yield "force_reshuffle", "is of --checkpoint-in, which is not given"


def _unused_optimizer(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    if o.learning_rate is not None:
        reason = "is of the schedule with warm-up and cosine, which -lr replaces"
        yield from _each(("adam_alpha", "adam_min_alpha", "warmup", *_COSINE), reason)
        if 0 < o.learning_rate <= o.learning_rate_min:
            yield "learning_rate_min", f"of {o.learning_rate_min:g} is not below the rate of -lr"
    else:
        yield from _each(("learning_rate_min", "decay_epochs"), "halves the rate of -lr, which is not given")
    if o.optimizer != "adamw":
        yield "adam_decay", f"is of adamw, and the optimizer is {o.optimizer}"
    if o.weight_decay is not None:
        yield "adam_decay", "and -wd are two names of the weight decay: give one of them"


def _unused_names(o: SimpleNamespace) -> Iterator[tuple[str, str]]:
    names = (getattr(o, "lora_out", None), o.output, o.checkpoint_in, o.checkpoint_out)
    if not any(name and o.pattern_fn_it in Path(name).name for name in names):
        yield from _each(("pattern_fn_it", "fn_latest"), "stands in no file's name")
