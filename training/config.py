"""TrainingConfig: the one declaration of each hyperparameter of a training run.

A field's line has its type, default, limits and meaning. Flags of `finetune` and `train`, fields of
a job's `hyperparameters`, keywords of `logitless.Trainer`, the OpenAPI document and the table in
docs/training.md follow from it, and so does what is refused beside another method."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from typing import Annotated, Any, Union, get_args, get_origin

from msgspec import Struct, ValidationError, convert

from logitless.models.param import FLOAT_MAX, INT_MAX, Param, params_of
from logitless.training.errors import TrainingError

SUPERVISED, REINFORCEMENT = "supervised", "reinforcement"
PREFERENCE = ("dpo", "orpo", "kto", "simpo")
METHODS = (SUPERVISED, *PREFERENCE)  # that learn from data
TRACKERS = ("wandb", "mlflow", "tensorboard")
STARTS = ("gaussian", "pissa")
METHOD, ADAPTER, DATA, OPTIMIZER, SAVES, PLACE = "Method", "Adapter", "Data", "Optimizer", "Files", "Device"
OF_ADAPTER, OF_WEIGHTS, OF_ADAMW = "an adapter", "a whole model", "adamw"
AUTO = "auto"  # chosen from the data of a job
_INT64_MAX = 2**63 - 1
NONE = "-"  # no flag, no field of jobs
SAME = object()  # the field's own default


@dataclass(frozen=True)
class Hyperparameter(Param):
    """Declaration of a hyperparameter; without more it has a flag and a job's field of its own name."""

    hard: bool = True
    methods: tuple[str, ...] = ()  # training methods that have it; (): all
    of: str = ""  # OF_ADAPTER, OF_WEIGHTS, OF_ADAMW: refused beside the other
    needs: str = ""  # field without which this one has no effect
    group: str = OPTIMIZER  # heading of the flag
    off: str = ""  # names that turn a switch off
    metavar: str = ""
    flag_default: Any = SAME
    job: str = ""  # name in a job; "": the field's
    job_default: Any = SAME
    job_type: type | None = None
    job_methods: tuple[str, ...] = ()  # methods of jobs that have it; (): `methods`
    job_low: float | None = None
    job_high: float | None = None
    reward_low: float | None = None  # least value in jobs that learn from rewards
    by_method: Mapping[str, float] = field(default_factory=dict)  # defaults of methods, where None is the field's


H = Hyperparameter
_RL = (REINFORCEMENT,)


class TrainingConfig(Struct, frozen=True, kw_only=True):
    """Configuration of a training run; defaults are those of `logitless.Trainer`."""

    method: Annotated[
        str,
        H("how to learn: supervised, from preferences, or from rewards (reinforcement)",
          choices=(*METHODS, REINFORCEMENT), group=METHOD, metavar="NAME", job=NONE, common=True),
    ] = SUPERVISED  # fmt: skip
    full: Annotated[bool, H("train all weights instead of an adapter", flag=NONE)] = False
    beta: Annotated[
        float | None,
        H("weight of the preference (default: 0.1; of simpo 2); of reinforcement that of the divergence (0)",
          1e-6, 1e3, methods=(*PREFERENCE, REINFORCEMENT), group=METHOD, reward_low=0, common=True,
          by_method={"dpo": 0.1, "orpo": 0.1, "kto": 0.1, "simpo": 2.0, REINFORCEMENT: 0.0}),
    ] = None  # fmt: skip
    gamma: Annotated[
        float | None,
        H("margin of simpo (default: 1)", 0, 1e3, methods=("simpo",), group=METHOD, by_method={"simpo": 1.0}),
    ] = None
    desirable_weight: Annotated[
        float | None,
        H(
            "weight of good answers, of kto (default: 1)",
            0,
            1e3,
            methods=("kto",),
            group=METHOD,
            by_method={"kto": 1.0},
        ),
    ] = None
    undesirable_weight: Annotated[
        float | None,
        H("weight of bad answers, of kto (default: 1)", 0, 1e3, methods=("kto",), group=METHOD, by_method={"kto": 1.0}),
    ] = None
    compute_multiplier: Annotated[
        float, H("of the answers to a prompt: 8 times this", 1e-5, 64, methods=_RL, flag=NONE)
    ] = 1.0
    n_samples: Annotated[int, H("answers to a prompt", 2, 512, methods=_RL, group=METHOD, job_default=AUTO)] = 8
    n_updates: Annotated[int, H("optimizer steps on the same answers", 1, 64, methods=_RL, group=METHOD)] = 1
    max_completion_tokens: Annotated[
        int | None,
        H("tokens of an answer at most (default: 256, if there is room)", 1, methods=_RL, group=METHOD,
          job_default=AUTO, job_high=1 << 16),
    ] = None  # fmt: skip
    max_tool_turns: Annotated[
        int, H("turns of an answer whose tool calls the grader's endpoint answers", 0, 64, methods=_RL, group=METHOD)
    ] = 0
    eval_samples: Annotated[int, H("answers to a prompt that validates", 1, 512, methods=_RL, group=METHOD)] = 1
    reasoning_effort: Annotated[
        str,
        H("where the chat template has it", choices=("default", "none", "minimal", "low", "medium", "high"),
          methods=_RL, flag=NONE),
    ] = "default"  # fmt: skip
    clip_range: Annotated[float, H("bound of ratios around 1", 1e-3, 1, methods=_RL, group=METHOD)] = 0.2
    loss_type: Annotated[
        str, H("grpo or dr_grpo", choices=("grpo", "dr_grpo"), methods=_RL, group=METHOD, metavar="NAME")
    ] = "grpo"

    lora_r: Annotated[
        int,
        H("rank of the adapter", 1, 4096, of=OF_ADAPTER, group=ADAPTER, job_default=8, job_high=1024, common=True),
    ] = 4
    lora_alpha: Annotated[
        float, H("scale times rank; 0: the rank", 0, 1e6, of=OF_ADAPTER, group=ADAPTER, common=True)
    ] = 0.0
    lora_target_modules: Annotated[
        tuple[str, ...],
        H("matrices with an adapter: q_proj, down_proj, all-linear, … or patterns of tensor names (default: all of "
          "blocks)", most=256, of=OF_ADAPTER, group=ADAPTER, metavar="NAMES"),
    ] = ()  # fmt: skip
    lora_rslora: Annotated[bool, H("scale by alpha / √r instead of alpha / r", of=OF_ADAPTER, group=ADAPTER)] = False
    lora_dora: Annotated[bool, H("train the norms of the matrices' rows, too (DoRA)", of=OF_ADAPTER, group=ADAPTER)] = (
        False
    )
    lora_init: Annotated[
        str,
        H("pissa: begin with the principal singular vectors of the matrices", choices=STARTS, of=OF_ADAPTER,
          group=ADAPTER, metavar="NAME"),
    ] = "gaussian"  # fmt: skip
    lora_plus_ratio: Annotated[
        float, H("factor of the learning rate of B (LoRA+)", 1e-3, 1e3, of=OF_ADAPTER, group=ADAPTER)
    ] = 1.0
    lora_ranks: Annotated[
        Mapping[str, int],
        H("ranks of kinds of tensors: wq, w2, tok_embd, …; 0: none", of=OF_ADAPTER, flag=NONE, job=NONE),
    ] = {}
    train_tensors: Annotated[
        tuple[str, ...],
        H("of a whole model: names to train, such as 'blk.*'", least=1, of=OF_WEIGHTS, group=ADAPTER,
          metavar="PATTERNS", flag_default=(), job=NONE),
    ] = ("*",)  # fmt: skip

    ctx_size: Annotated[
        int | None,
        H("tokens of a window (default: as many as the longest row has, at least 128; 128 of a text; at most the "
          "model's)", 1, 2**20, flag="-c --ctx-size --ctx", methods=METHODS, group=DATA, common=True,
          job="context_length", job_default=AUTO, job_low=2, job_high=1 << 16),
    ] = None  # fmt: skip
    batch_size: Annotated[
        int, H("windows of one device run", 1, 2**16, flag="-b --batch-size --batch", group=DATA, job=NONE, common=True)
    ] = 8
    batch_examples: Annotated[
        int,
        H("examples or prompts of a step, packed into windows; 0: batch_size times grad_acc windows", 0, 1024,
          flag=NONE, job="batch_size", job_default=AUTO, job_low=1),
    ] = 0  # fmt: skip
    grad_acc: Annotated[
        int, H("device runs of an optimizer step, each with windows of its own", 1, 2**16, group=DATA, job=NONE)
    ] = 1
    val_split: Annotated[
        float,
        H("part that validates; the end, if windows overlap", 0, 0.99, flag="-val-split --val-split", flag_default=0.05,
          group=DATA, common=True, job="validation_split", job_high=0.9),
    ] = 0.0  # fmt: skip
    validate_every: Annotated[
        int,
        H("steps between validations; 0: after each epoch", 0, needs="val_split", group=DATA, job="eval_interval",
          job_default=AUTO, job_low=1, job_methods=_RL),
    ] = 0  # fmt: skip
    stride: Annotated[
        int,
        H("tokens from one window of a text to the next; 0: half a window", 0, 2**20, methods=METHODS, group=DATA,
          job=NONE),
    ] = 0  # fmt: skip
    pack: Annotated[
        bool,
        H(
            "put several rows into a window where they fit",
            methods=(SUPERVISED,),
            off="--no-pack",
            group=DATA,
            job=NONE,
        ),
    ] = True
    shuffle: Annotated[bool, H("visit the windows in random order", off="--no-shuffle", group=DATA, job=NONE)] = True
    sample_start: Annotated[
        str | None,
        H("samples of a text begin after this; '': at every token", methods=METHODS, group=DATA, metavar="TEXT",
          job=NONE),
    ] = None  # fmt: skip
    include_sample_start: Annotated[
        bool, H("the sample's start is part of it", methods=METHODS, needs="sample_start", group=DATA, job=NONE)
    ] = False
    overlapping_samples: Annotated[
        bool, H("samples go on into the next one", methods=METHODS, needs="sample_start", group=DATA, job=NONE)
    ] = False
    fill_with_next_samples: Annotated[
        bool,
        H("fill windows with the samples that follow", methods=METHODS, needs="sample_start", group=DATA, job=NONE),
    ] = False
    separate_with_eos: Annotated[
        bool,
        H("put an end token between samples", methods=METHODS, needs="fill_with_next_samples", group=DATA, job=NONE,
          off="--no-separate-with-eos"),
    ] = False  # fmt: skip
    separate_with_bos: Annotated[
        bool,
        H("put a BOS between samples", methods=METHODS, needs="fill_with_next_samples", group=DATA, job=NONE,
          off="--no-separate-with-bos"),
    ] = True  # fmt: skip
    sample_random_offsets: Annotated[
        bool,
        H("begin at a random token of a window's first sample", methods=METHODS, needs="sample_start", group=DATA,
          job=NONE),
    ] = False  # fmt: skip
    chat_template: Annotated[
        str,
        H("Jinja or a built-in's name, of the rows instead of the model's; requests need the same", flag=NONE),
    ] = ""
    seed: Annotated[
        int,
        H("of everything random; -1 means 0", 0, flag="-s --seed", flag_default=-1, group=DATA, job=NONE, common=True),
    ] = 0

    optimizer: Annotated[str, H("adamw or sgd", choices=("adamw", "sgd"), flag="-opt --optimizer", metavar="NAME")] = (
        "adamw"
    )
    epochs: Annotated[
        float,
        H("passes over the data; -1: only --adam-iter counts", 0, flag="-epochs --epochs", flag_default=-1,
          metavar="N", common=True, job="n_epochs", job_type=int, job_default=AUTO, job_low=1, job_high=1000),
    ] = 0  # fmt: skip
    iterations: Annotated[
        int,
        H("optimizer steps at most (default: 256; with --epochs: any)", 0, flag="--adam-iter --iterations",
          flag_default=None, common=True, job=NONE),
    ] = 256  # fmt: skip
    learning_rate: Annotated[
        float | None,
        H("a rate without warm-up and cosine, as llama-finetune's", 1e-30, flag="-lr --learning-rate", common=True,
          job=NONE),
    ] = None  # fmt: skip
    learning_rate_multiplier: Annotated[
        float,
        H("factor of the learning rate, in jobs of 1e-3 for an adapter, of 1e-5 for all weights (by preference a "
          "tenth)", 1e-6, 1e4, flag=NONE, job_default=AUTO),
    ] = 1.0  # fmt: skip
    schedule: Annotated[
        str,
        H("course of the learning rate: constant after the warm-up, a cosine, or halving down to learning_rate_min",
          choices=("constant", "cosine", "halving"), flag=NONE, job=NONE),
    ] = "constant"  # fmt: skip
    learning_rate_min: Annotated[
        float, H("halve the rate of -lr down to this", 0, flag="-lr-min --learning-rate-min", job=NONE)
    ] = 0.0
    decay_epochs: Annotated[
        float,
        H("epochs in which it gets there; 0: all", 0, needs="learning_rate_min", flag="-decay-epochs --decay-epochs",
          job=NONE),
    ] = 0.0  # fmt: skip
    adam_min_alpha: Annotated[float, H("least learning rate", 0, 1e3, job=NONE)] = 0.0
    warmup: Annotated[
        int | None,
        H("steps in which the rate rises (default: a tenth of the steps, at most 100)", 0, flag_default=None,
          job="warmup_steps", job_default=AUTO),
    ] = 0  # fmt: skip
    cos_decay_steps: Annotated[int, H("steps of the cosine; 0: those of the run", 0, job=NONE)] = 1000
    cos_decay_min: Annotated[float, H("factor at its end", 0, 1, job=NONE)] = 0.1
    cos_decay_restart: Annotated[
        float, H("factor between the lengths of its periods", 1, needs="enable_restart", job=NONE)
    ] = 1.1
    enable_restart: Annotated[bool, H("begin a new period when one ends", off="--disable-restart", job=NONE)] = False
    weight_decay: Annotated[
        float | None,
        H("of matrices, times the learning rate (default: 0.1; of sgd 0), as llama-finetune's", 0, 1,
          flag="-wd --weight-decay", flag_default=None, job_default=0.1),
    ] = 0.0  # fmt: skip
    adam_decay_min_ndim: Annotated[int, H("dimensions that a tensor needs to decay", 0, 9, of=OF_ADAMW, job=NONE)] = 2
    adam_beta1: Annotated[float, H("decay of the first moment", 0, 0.999999, of=OF_ADAMW)] = 0.9
    adam_beta2: Annotated[float, H("decay of the second moment", 0, 0.999999, of=OF_ADAMW)] = 0.999
    adam_eps: Annotated[float, H("epsilon, added to the denominator", 0, 1, of=OF_ADAMW, job=NONE)] = 1e-8
    max_grad_norm: Annotated[
        float, H("largest norm of the gradient; 0: any", 0, flag="--adam-gclip", of=OF_ADAMW, job_high=1e6)
    ] = 1.0
    adam_epsf: Annotated[float, H("stop when the loss changes by less from step to step; 0: never", 0, job=NONE)] = 0.0
    neftune_noise_alpha: Annotated[
        float,
        H("uniform noise on the embeddings of training, within X / √(tokens · width); 0: none", 0, 1e3,
          methods=(SUPERVISED,)),
    ] = 0.0  # fmt: skip
    opt_past: Annotated[int, H("losses to look back at; 0: none", 0, job=NONE)] = 0
    opt_delta: Annotated[
        float, H("stop when the loss changed by less since then; 0: never", 0, needs="opt_past", job=NONE)
    ] = 1e-5
    opt_max_no_improvement: Annotated[
        int, H("stop after so many steps without a better loss; 0: never", 0, job=NONE)
    ] = 0
    early_stopping_patience: Annotated[
        int,
        H("validations without a better loss (of reinforcement mean reward) that end a job, whose model is then the "
          "best one's; 0: any", 0, flag=NONE),
    ] = 0  # fmt: skip

    save_every: Annotated[
        int, H("steps between saves; 0: only at the end", 0, flag_default=10, group=SAVES, job=NONE, common=True)
    ] = 0
    report_to: Annotated[
        tuple[str, ...],
        H(f"trackers that get the metrics: {', '.join(TRACKERS)}", choices=TRACKERS, group=SAVES, metavar="NAMES",
          job=NONE, common=True),
    ] = ()  # fmt: skip
    report_project: Annotated[
        str,
        H("wandb's project, mlflow's experiment", needs="report_to", group=SAVES, metavar="NAME", job=NONE),
    ] = "logitless"
    report_name: Annotated[
        str,
        H("the run's name there (default: the result's file)", needs="report_to", group=SAVES, metavar="NAME",
          flag_default=None, job=NONE),
    ] = ""  # fmt: skip
    report_dir: Annotated[
        str,
        H("folder of event files of tensorboard, and of wandb", needs="report_to", group=SAVES, metavar="DIR",
          job=NONE),
    ] = "runs"  # fmt: skip
    use_checkpointing: Annotated[
        bool,
        H("compute activations again instead of keeping them all: less memory, the same result",
          off="--no-checkpointing", group=PLACE, job=NONE),
    ] = True  # fmt: skip
    workers: Annotated[
        int,
        H("processes that share the device runs of a step (grad_acc), to the bytes of one; the threads are of each",
          1, 256, group=PLACE, job=NONE),
    ] = 1  # fmt: skip
    mmproj: Annotated[
        str | None,
        H("projector of rows with images or sounds (default: the only one beside the model)", flag=NONE, job=NONE),
    ] = None

    @property
    def n_ctx(self) -> int:
        """Tokens of a window; they have been chosen."""
        assert self.ctx_size is not None
        return self.ctx_size

    @property
    def n_logical(self) -> int:
        """Samples or examples of an optimizer step."""
        return self.batch_examples or self.batch_size * self.grad_acc


FIELDS: Mapping[str, tuple[Any, Hyperparameter]] = params_of(TrainingConfig)  # type: ignore[assignment]
DEFAULTS: Mapping[str, Any] = {name: getattr(TrainingConfig(), name) for name in FIELDS}


def type_of(name: str) -> Any:
    """The type of a field's values, beside None."""
    kind = FIELDS[name][0]
    return next(t for t in get_args(kind) if t is not type(None)) if get_origin(kind) in _UNIONS else kind


_UNIONS = (Union, type(int | None))


# -- keywords


def config_of(values: Mapping[str, Any]) -> TrainingConfig:
    """The configuration with these values. TrainingError names the field that is wrong, or the nearest one."""
    values = {name: _plain(value) for name, value in values.items()}
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6)
            raise TrainingError(f"{name}: is no field of TrainingConfig" + (f"; {near[0]} is" if near else ""))
        _check(name, values[name])
    try:
        convert(values, TrainingConfig)
    except ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        name = place.partition("$.")[2].partition("[")[0].rstrip("`")
        raise TrainingError(f"{name}: {values.get(name)!r}: {problem[0].lower()}{problem[1:]}") from None
    plain: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return TrainingConfig(**plain)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and paths as plain values."""
    if isinstance(value, PathLike):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def check(config: TrainingConfig) -> None:
    """TrainingError: a field of the optimizer step is outside its limits, or the run has no end."""
    for name in _STEP_FIELDS:
        _check(name, getattr(config, name))
    if not (config.epochs or config.iterations):
        raise TrainingError("a run needs a limit: epochs or iterations")


_STEP_FIELDS = (
    *("ctx_size", "batch_size", "grad_acc", "schedule", "learning_rate", "cos_decay_restart"),
    *("optimizer", "adam_beta1", "adam_beta2", "weight_decay"),
)


def _check(name: str, value: Any) -> None:
    """TrainingError: the value is outside the field's limits."""
    param = FIELDS[name][1]
    if isinstance(value, int | float) and not isinstance(value, bool) and type_of(name) in (int, float):
        most = min(param.high, FLOAT_MAX if type_of(name) is float else _INT64_MAX)
        if not param.low <= value <= most:
            within = (
                f"at least {_short(param.low)}"
                if value < param.low and math.isinf(param.high)
                else (f"between {_short(param.low)} and {_short(most)}")
            )
            within = "finite" if abs(value) == math.inf else within
            raise TrainingError(f"{name}: {value} is not {within}")
    elif param.choices:
        for one in (value,) if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
            if one not in param.choices:
                raise TrainingError(f"{name}: {one!r} is not one of {', '.join(param.choices)}")


def _short(x: float) -> str:
    return f"{x:.0f}" if 1 <= abs(x) < 1e15 and x == int(x) else f"{x:g}"


def changed(config: TrainingConfig) -> set[str]:
    """Names of the fields that differ from the defaults."""
    return {name for name, default in DEFAULTS.items() if not _equals(getattr(config, name), default)}


def _equals(value: Any, default: Any) -> bool:
    """True if a value, perhaps of a wrong type, is the default."""
    numbers = (int, float)  # neither bool nor arrays
    is_alike = type(value) in (numbers if type(default) in numbers else (type(default),))
    return is_alike and bool(value == default)


def unused(
    values: Mapping[str, Any], names: Collection[str], spell: Callable[[str], str] = str
) -> Iterator[tuple[str, str]]:
    """Fields among `names` that have no effect beside the others' values, each with the reason.

    `spell`: a field's name as its user writes it."""
    of = {
        OF_ADAPTER: "" if not values["full"] else "all weights are trained",
        OF_WEIGHTS: "" if values["full"] else "an adapter is trained",
        OF_ADAMW: "" if values["optimizer"] == "adamw" else f"the optimizer is {values['optimizer']}",
    }
    method = values["method"]
    for name in names:
        param = FIELDS[name][1]
        if param.methods and method not in param.methods:
            yield name, not_of_method(param.methods, method)
        elif reason := of.get(param.of):
            yield name, f"is of {param.of}, and {reason}"
        elif param.needs and (value := values[param.needs]) in (None, False, 0, ()):
            missing = f"which is {value or 0:g}" if param.needs in names else "which is not given"
            yield name, f"is of {spell(param.needs)}, {missing}"


def not_of_method(methods: Collection[str], method: str) -> str:
    """Reason why a field of these methods is refused beside another."""
    learning = "supervised learning" if tuple(methods) == (SUPERVISED,) else ", ".join(methods)
    return f"is of {learning}, and the method is {method}"


# -- jobs


@cache
def job_fields(method: str) -> Mapping[str, str]:
    """The configuration's fields that a job of this method has: its name of each → the field."""
    return {
        param.job or name: name
        for name, (_, param) in FIELDS.items()
        if param.job != NONE and method in (param.job_methods or param.methods or (method,))
    }


def job_default(name: str, method: str) -> Any:
    """A field's default in jobs; AUTO: chosen from the data."""
    param = FIELDS[name][1]
    return param.by_method.get(method, DEFAULTS[name] if param.job_default is SAME else param.job_default)


@cache
def job_defaults(method: str) -> Mapping[str, Any]:
    """The defaults of a job's hyperparameters, by its names."""
    return {name: job_default(field, method) for name, field in job_fields(method).items()}


def job_param(name: str, method: str) -> tuple[Any, Param]:
    """(type, declaration) of a field in jobs of a method."""
    param = FIELDS[name][1]
    low = param.low if param.job_low is None else param.job_low
    if method == REINFORCEMENT and param.reward_low is not None:
        low = param.reward_low
    high = param.high if param.job_high is None else param.job_high
    kind = param.job_type or type_of(name)
    high = min(high, INT_MAX) if kind is int else high
    numeric = kind in (int, float)
    return kind, Param(param.doc, low, high, numeric, param.choices, most=param.most)


def config_of_job(row: Mapping[str, Any], method: str, seed: int) -> TrainingConfig:
    """The configuration of a job; what is still to be chosen has the defaults of this module."""
    own = {field: row.get(name, job_default(field, method)) for name, field in job_fields(method).items()}
    values = {field: value for field, value in own.items() if value != AUTO}
    values["lora_target_modules"] = tuple(values["lora_target_modules"])
    return TrainingConfig(**values, method=method, seed=seed, schedule="cosine", cos_decay_steps=0, iterations=0)


def job_row(config: TrainingConfig) -> dict[str, Any]:
    """A job's hyperparameters, as it shows them."""
    row = {name: getattr(config, field) for name, field in job_fields(config.method).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in row.items()}
