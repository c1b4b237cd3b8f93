"""Flag tables of `finetune`, `train` and `export-lora`, with llama.cpp's names and defaults."""

from __future__ import annotations

from logitless.cli.flags.flags import IGNORED, Flag, Group
from logitless.cli.flags.model_options import MODEL
from logitless.cli.flags.options import DEVICE, GENERAL, GRADERS, JSON, LONG, THREADS, VERBOSE, model_flags
from logitless.engine.loading.values import (
    choice,
    file_name,
    file_names,
    folder_name,
    not_empty,
    number,
    several,
    text,
    whole,
    words,
)
from logitless.models.param import FLOAT_MAX, INT_MAX
from logitless.training import config
from logitless.training.config import DEFAULTS, FIELDS, NONE, SAME, TRACKERS, Hyperparameter, type_of

_RANKS = {
    "tok_embd": "token embedding",
    "out": "output matrix",
    "wq": "query projection",
    "wk": "key projection",
    "wv": "value projection",
    "wo": "attention output",
    "w1": "gate of the feed-forward",
    "w2": "down projection of the feed-forward",
    "w3": "up projection of the feed-forward",
    "att_norm": "norm before the attention",
    "ffn_norm": "norm before the feed-forward",
    "out_norm": "norm before the output",
}

_KINDS = {
    "epochs": whole(1, or_minus_one="any"),
    "iterations": whole(1),
    "seed": whole(0, 2**31 - 1, or_minus_one="0"),
    "report_to": several(*TRACKERS),
    "report_project": not_empty,
    "report_dir": folder_name,
}


def _hyperparameter_flag(name: str, param: Hyperparameter) -> Flag:
    """The flag of a hyperparameter (training/config.py)."""
    kind = type_of(name)
    names = param.flag or f"--{name.replace('_', '-')}"
    default = DEFAULTS[name] if param.flag_default is SAME else param.flag_default
    if kind is bool:
        return Flag(names, param.doc, default=default, off=param.off, common=param.common)
    read = _KINDS.get(name)
    if read is None and kind is int:
        read = whole(int(param.low), int(min(param.high, INT_MAX)))
    elif read is None and kind is float:
        read = number(param.low, min(param.high, FLOAT_MAX))
    elif read is None:
        read = choice(*param.choices) if param.choices else words if param.most or param.least else text
    many = read is words
    metavar = param.metavar or ("N" if kind is int else "X")
    return Flag(names, param.doc, read, None if many else default, metavar, many=many, common=param.common)


HYPERPARAMETERS = {name: _hyperparameter_flag(name, param) for name, (_, param) in FIELDS.items() if param.flag != NONE}


def _declared(group: str) -> tuple[Flag, ...]:
    return tuple(flag for name, flag in HYPERPARAMETERS.items() if FIELDS[name][1].group == group)


_WINDOW = Flag("-c --ctx-size --ctx", "tokens of a window", whole(1, 2**20), 128, common=True)  # of a new model
FINETUNE_DATA = Group("Data", (
    Flag("-f --file --train-data", "training data: a text, or rows (.jsonl, .json, .csv, .parquet, "
         "hf:OWNER/NAME[:SPLIT])", file_name, None, "FILE", common=True),
    *_declared(config.DATA),
    Flag("-e --escape", "read \\n, \\t and the like in --sample-start", default=True, off="--no-escape"),
    Flag("--force-reshuffle", "order the samples anew when going on from a checkpoint"),
))  # fmt: skip
DATA = Group("Data", tuple(_WINDOW if flag.dest == _WINDOW.dest else flag for flag in FINETUNE_DATA.flags))
OPTIMIZER = Group("Optimizer", (
    Flag("--adam-alpha", "peak learning rate (default: 1e-3; to learn from preferences 1e-4)", number(1e-30, 1e3), None,
         "X", common=True),
    *_declared(config.OPTIMIZER),
    Flag("-lr-half --learning-rate-half", "halve the rate of -lr in so many epochs", number(1e-3), None, "X"),
    Flag("-lr-halvings --learning-rate-halvings", "halvings at most of -lr-half; 0: any", whole(0, 64), 0),
    Flag("--adam-decay", "weight decay of adamw", number(0, 1), 0.1, "X"),
))  # fmt: skip
FILES = Group("Files", (
    Flag("--checkpoint-in", "go on from here, if the file exists", file_name, "", "FILE", common=True),
    Flag("--checkpoint-out", "write checkpoints here", file_name, "", "FILE", common=True),
    Flag("--pattern-fn-it", "placeholder of the step's number in file names", not_empty, "ITERATION", "TEXT"),
    Flag("--fn-latest", "text in its place in the newest file's name", text, "LATEST", "TEXT"),
    Flag("--output-type", "type of a whole model, as of `quantize`: F32, BF16, Q8_0, Q4_K_M, ...", text, "F32", "TYPE"),
    Flag("--plot", "draw the loss curves; .png needs Pillow", file_name, None, "FILE.svg|png", common=True),
    *_declared(config.SAVES),
))  # fmt: skip
PLACE = Group("Device", (
    DEVICE, THREADS, *(flag for flag in _declared(config.PLACE) if flag.dest != "workers"),
    Flag("--use-flash", off="--no-flash", status=IGNORED),  # attention never makes its matrix here
))  # fmt: skip
WORKERS = Group("Data parallelism", (HYPERPARAMETERS["workers"],))
_FINETUNE = (
    Group("Finetune", (
        MODEL,
        Flag("-o --output", "train all weights, and write the model here", file_name, None, "FILE", common=True),
        Flag("--lora-out", "train a LoRA adapter, and write it here", file_name, None, "FILE", common=True),
        *_declared(config.METHOD),
        Flag("--grader", "JSON of the grader of reinforcement, which gives the rewards", file_name, None, "FILE"),
        *GRADERS,
        Flag("--only-write-lora", "write the adapter of --checkpoint-in, without training"),
        Flag("-n", "0: the same", choice("0"), None, "0"),
        *_declared(config.ADAPTER),
        *(
            Flag(f"--rank-{kind.replace('_', '-')}", f"rank for the {what}; 0: none", whole(0, 4096))
            for kind, what in _RANKS.items()
        ),
        VERBOSE, *LONG,
    )),
    FINETUNE_DATA,
    Group("Images", model_flags("mmproj mmproj_auto image_min_tokens image_max_tokens")),
    OPTIMIZER, FILES, PLACE,
)  # fmt: skip
FINETUNE = (*_FINETUNE, WORKERS)
_TRAIN = (
    Group("New model", (
        Flag("-o --output", "the model to write", file_name, None, "FILE", common=True),
        Flag("--vocab-model", "take the vocabulary of this GGUF file (default: bytes)", file_name, None, "FILE",
             common=True),
        Flag("--name", "the model's name (default: the file's)", text, None, "TEXT"),
        Flag("--chat-template", "a Jinja template to put into the file", text, None, "TEMPLATE"),
        Flag("--shape", "sizes by name, as of `synth`", text, "tiny", "NAME", common=True),
        Flag("--embd", "width", whole(2, 2**16)),
        Flag("--layer", "blocks", whole(1, 512)),
        Flag("--head", "heads", whole(1, 1024)),
        Flag("--head-kv", "heads of keys and values", whole(1, 1024)),
        Flag("--ff", "width of the feed-forward", whole(1, 2**18)),
        VERBOSE, *LONG,
    )),
    DATA, OPTIMIZER, FILES, PLACE,
)  # fmt: skip
TRAIN = (*_TRAIN, WORKERS)
PLAN_FINETUNE = (
    Group("Plan", (JSON, Flag("--full", "of all weights, as with -o FILE (default: of an adapter)"))),
    *_FINETUNE,
)
PLAN_TRAIN = (Group("Plan", (JSON,)), *_TRAIN)
EXPORT_LORA = (
    Group("Merge", (
        MODEL,
        Flag("-o --output", "the model to write", file_name, None, "FILE", common=True),
        Flag("--peft-out", "write the adapter as peft loads it, into this folder", folder_name, None, "DIR",
             common=True),
        Flag("-l --lora", "an adapter; may be given again", file_names, None, "FILE", many=True),
        Flag("-s --lora-scaled", "an adapter and its scale, or FILE X; may be given again", file_names, None, "FILE:X",
             many=True, then_number=True),
        Flag("--output-type", "type of the merged matrices, as of `quantize`: F16, Q4_K_M, ... (default: their own)",
             text, None, "TYPE"),
        Flag("-t --threads", kind=text, metavar="N", status=IGNORED),
        *GENERAL,
    )),
)  # fmt: skip
