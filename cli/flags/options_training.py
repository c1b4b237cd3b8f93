"""Flag tables of `finetune`, `train` and `export-lora`, with llama.cpp's names and defaults."""

from __future__ import annotations

from logitless.cli.flags.flags import IGNORED, Flag, Group
from logitless.cli.flags.log_options import VERBOSE
from logitless.cli.flags.model_options import MODEL
from logitless.cli.flags.options import DEVICE, GENERAL, GRADERS, JSON, LONG, THREADS, model_flags
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

DATA = Group(
    "Data",
    (
        Flag(
            "-f --file --train-data",
            "training data: a text, or rows (.jsonl, .json, .csv, .parquet, hf:OWNER/NAME[:SPLIT])",
            file_name,
            None,
            "FILE",
            common=True,
        ),
        Flag("-c --ctx-size --ctx", "tokens of a window", whole(1, 2**20), 128, common=True),
        Flag("-b --batch-size --batch", "windows of one device run", whole(1, 2**16), 8, common=True),
        Flag("--grad-acc", "device runs of an optimizer step, each with windows of its own", whole(1, 2**16), 1),
        Flag(
            "-val-split --val-split",
            "part that validates; the end, if windows overlap",
            number(0, 0.99),
            0.05,
            "X",
            common=True,
        ),
        Flag("--validate-every", "steps between validations; 0: after each epoch", whole(0), 0),
        Flag("--stride", "tokens from one window of a text to the next; 0: half a window", whole(0, 2**20), 0),
        Flag("--pack", "put several rows into a window where they fit", default=True, off="--no-pack"),
        Flag("--shuffle", "visit the windows in random order", default=True, off="--no-shuffle"),
        Flag("--sample-start", "samples of a text begin after this; '': at every token", text, None, "TEXT"),
        Flag("--include-sample-start", "the sample's start is part of it"),
        Flag("-e --escape", "read \\n, \\t and the like in --sample-start", default=True, off="--no-escape"),
        Flag("--overlapping-samples", "samples go on into the next one"),
        Flag("--fill-with-next-samples", "fill windows with the samples that follow"),
        Flag("--separate-with-eos", "put an end token between samples", off="--no-separate-with-eos"),
        Flag("--separate-with-bos", "put a BOS between samples", default=True, off="--no-separate-with-bos"),
        Flag("--sample-random-offsets", "begin at a random token of a window's first sample"),
        Flag("--force-reshuffle", "order the samples anew when going on from a checkpoint"),
        Flag("-s --seed", "of everything random; -1 means 0", whole(0, 2**31 - 1, or_minus_one="0"), -1, common=True),
    ),
)
_FITTING = Flag(  # a new model has the context that it is trained with; another one has its own
    "-c --ctx-size --ctx",
    "tokens of a window (default: as many as the longest row has, at least 128; 128 of a text; at most the model's)",
    whole(1, 2**20),
    common=True,
)
FINETUNE_DATA = Group(DATA.title, tuple(_FITTING if f.dest == "ctx_size" else f for f in DATA.flags))
OPTIMIZER = Group(
    "Optimizer",
    (
        Flag("-opt --optimizer", "adamw or sgd", choice("adamw", "sgd"), "adamw", "NAME"),
        Flag(
            "-epochs --epochs",
            "passes over the data; -1: only --adam-iter counts",
            whole(1, or_minus_one="any"),
            -1,
            common=True,
        ),
        Flag(
            "--adam-iter --iterations",
            "optimizer steps at most (default: 256; with --epochs: any)",
            whole(1),
            common=True,
        ),
        Flag(
            "--adam-alpha",
            "peak learning rate (default: 1e-3; to learn from preferences 1e-4)",
            number(1e-30, 1e3),
            None,
            "X",
            common=True,
        ),
        Flag("--adam-min-alpha", "least learning rate", number(0, 1e3), 0.0, "X"),
        Flag(
            "-lr --learning-rate",
            "a rate without warm-up and cosine, as llama-finetune's",
            number(1e-30),
            None,
            "X",
            common=True,
        ),
        Flag("-lr-min --learning-rate-min", "halve the rate of -lr down to this", number(0), 0.0, "X"),
        Flag("-decay-epochs --decay-epochs", "epochs in which it gets there; 0: all", number(0), 0.0, "X"),
        Flag("-lr-half --learning-rate-half", "halve the rate of -lr in so many epochs", number(1e-3), None, "X"),
        Flag("-lr-halvings --learning-rate-halvings", "halvings at most of -lr-half; 0: any", whole(0, 64), 0),
        Flag("--warmup", "steps in which the rate rises (default: a tenth of the steps, at most 100)", whole(0)),
        Flag("--cos-decay-steps", "steps of the cosine", whole(1), 1000),
        Flag("--cos-decay-min", "factor at its end", number(0, 1), 0.1, "X"),
        Flag("--cos-decay-restart", "factor between the lengths of its periods", number(1), 1.1, "X"),
        Flag("--enable-restart", "begin a new period when one ends", off="--disable-restart"),
        Flag("--adam-decay", "weight decay of adamw", number(0, 1), 0.1, "X"),
        Flag("-wd --weight-decay", "the same, and that of sgd (0), as llama-finetune's", number(0, 1), None, "X"),
        Flag("--adam-decay-min-ndim", "dimensions that a tensor needs to decay, of adamw", whole(0, 9), 2),
        Flag("--adam-beta1", "decay of the first moment", number(0, 0.999999), 0.9, "X"),
        Flag("--adam-beta2", "decay of the second moment", number(0, 0.999999), 0.999, "X"),
        Flag("--adam-eps", "epsilon of adamw: added to the denominator", number(0, 1), 1e-8, "X"),
        Flag("--adam-gclip", "largest norm of the gradient, of adamw; 0: any", number(0), 1.0, "X"),
        Flag("--adam-epsf", "stop when the loss changes by less from step to step; 0: never", number(0), 0.0, "X"),
        Flag(
            "--neftune-noise-alpha",
            "uniform noise on the embeddings of training, within X / √(tokens · width); 0: none",
            number(0, 1e3),
            0.0,
            "X",
        ),
        Flag("--opt-past", "losses to look back at; 0: none", whole(0), 0),
        Flag("--opt-delta", "stop when the loss changed by less since then; 0: never", number(0), 1e-5, "X"),
        Flag("--opt-max-no-improvement", "stop after so many steps without a better loss; 0: never", whole(0), 0),
    ),
)
FILES = Group(
    "Files",
    (
        Flag("--checkpoint-in", "go on from here, if the file exists", file_name, "", "FILE", common=True),
        Flag("--checkpoint-out", "write checkpoints here", file_name, "", "FILE", common=True),
        Flag("--save-every", "steps between saves; 0: only at the end", whole(0), 10, common=True),
        Flag("--pattern-fn-it", "placeholder of the step's number in file names", not_empty, "ITERATION", "TEXT"),
        Flag("--fn-latest", "text in its place in the newest file's name", text, "LATEST", "TEXT"),
        Flag(
            "--output-type",
            "type of a whole model, as of `quantize`: F32, BF16, Q8_0, Q4_K_M, ...",
            text,
            "F32",
            "TYPE",
        ),
        Flag("--plot", "draw the loss curves; .png needs Pillow", file_name, None, "FILE.svg|png", common=True),
        Flag(
            "--report-to",
            "trackers that get the metrics: wandb, mlflow, tensorboard",
            several("wandb", "mlflow", "tensorboard"),
            (),
            "NAMES",
            common=True,
        ),
        Flag("--report-project", "wandb's project, mlflow's experiment", not_empty, "logitless", "NAME"),
        Flag("--report-name", "the run's name there (default: the result's file)", text, None, "NAME"),
        Flag("--report-dir", "folder of event files of tensorboard, and of wandb", folder_name, "runs", "DIR"),
    ),
)
PLACE = Group(
    "Device",
    (
        DEVICE,
        THREADS,
        Flag(
            "--use-checkpointing",
            "compute activations again instead of keeping them all: less memory, the same result",
            default=True,
            off="--no-checkpointing",
        ),
        Flag("--use-flash", off="--no-flash", status=IGNORED),  # attention never makes its matrix here
    ),
)
WORKERS = Group(
    "Data parallelism",
    (
        Flag(
            "--workers",
            "processes that share the device runs of a step (--grad-acc), to the bytes of one; -t is of each",
            whole(1, 256),
            1,
        ),
    ),
)
_FINETUNE = (
    Group(
        "Finetune",
        (
            MODEL,
            Flag("-o --output", "train all weights, and write the model here", file_name, None, "FILE", common=True),
            Flag("--lora-out", "train a LoRA adapter, and write it here", file_name, None, "FILE", common=True),
            Flag(
                "--method",
                "how to learn: supervised, from preferences, or from rewards (reinforcement)",
                choice("supervised", "dpo", "orpo", "kto", "simpo", "reinforcement"),
                "supervised",
                "NAME",
                common=True,
            ),
            Flag(
                "--beta",
                "weight of the preference (default: 0.1; of simpo 2); of reinforcement that of the divergence (0)",
                number(1e-6, 1e3),
                None,
                "X",
                common=True,
            ),
            Flag("--gamma", "margin of simpo (default: 1)", number(0, 1e3), None, "X"),
            Flag("--desirable-weight", "weight of good answers, of kto (default: 1)", number(0, 1e3), None, "X"),
            Flag("--undesirable-weight", "weight of bad answers, of kto (default: 1)", number(0, 1e3), None, "X"),
            Flag("--grader", "JSON of the grader of reinforcement, which gives the rewards", file_name, None, "FILE"),
            *GRADERS,
            Flag("--n-samples", "answers to a prompt", whole(2, 512), 8),
            Flag("--n-updates", "optimizer steps on the same answers", whole(1, 64), 1),
            Flag("--max-completion-tokens", "tokens of an answer at most (default: 256, if there is room)", whole(1)),
            Flag("--max-tool-turns", "turns of an answer whose tool calls the endpoint answers", whole(0, 64), 0),
            Flag("--clip-range", "bound of ratios around 1", number(1e-3, 1), 0.2, "X"),
            Flag("--loss-type", "grpo or dr_grpo", choice("grpo", "dr_grpo"), "grpo", "NAME"),
            Flag("--eval-samples", "answers to a prompt that validates", whole(1, 512), 1),
            Flag("--only-write-lora", "write the adapter of --checkpoint-in, without training"),
            Flag("-n", "0: the same", choice("0"), None, "0"),
            Flag("--lora-r", "rank of the adapter", whole(1, 4096), 4, common=True),
            Flag("--lora-alpha", "scale times rank; 0: the rank", number(0, 1e6), 0.0, "X", common=True),
            Flag(
                "--lora-target-modules",
                "matrices with an adapter: q_proj, down_proj, … or patterns of tensor names (default: all of blocks)",
                words,
                None,
                "NAMES",
                many=True,
            ),
            Flag("--lora-rslora", "scale by alpha / √r instead of alpha / r"),
            Flag("--lora-dora", "train the norms of the matrices' rows, too (DoRA)"),
            Flag(
                "--lora-init",
                "pissa: begin with the principal singular vectors of the matrices",
                choice("gaussian", "pissa"),
                "gaussian",
                "NAME",
            ),
            Flag("--lora-plus-ratio", "factor of the learning rate of B (LoRA+)", number(1e-3, 1e3), 1.0, "X"),
            *(
                Flag(f"--rank-{kind.replace('_', '-')}", f"rank for the {what}; 0: none", whole(0, 4096))
                for kind, what in _RANKS.items()
            ),
            Flag(
                "--train-tensors",
                "of a whole model: names to train, such as 'blk.*'",
                words,
                None,
                "PATTERNS",
                many=True,
            ),
            VERBOSE,
            *LONG,
        ),
    ),
    FINETUNE_DATA,
    Group("Images", model_flags("mmproj mmproj_auto image_min_tokens image_max_tokens")),
    OPTIMIZER,
    FILES,
    PLACE,
)
FINETUNE = (*_FINETUNE, WORKERS)
_TRAIN = (
    Group(
        "New model",
        (
            Flag("-o --output", "the model to write", file_name, None, "FILE", common=True),
            Flag(
                "--vocab-model",
                "take the vocabulary of this GGUF file (default: bytes)",
                file_name,
                None,
                "FILE",
                common=True,
            ),
            Flag("--name", "the model's name (default: the file's)", text, None, "TEXT"),
            Flag("--chat-template", "a Jinja template to put into the file", text, None, "TEMPLATE"),
            Flag("--shape", "sizes by name, as of `synth`", text, "tiny", "NAME", common=True),
            Flag("--embd", "width", whole(2, 2**16)),
            Flag("--layer", "blocks", whole(1, 512)),
            Flag("--head", "heads", whole(1, 1024)),
            Flag("--head-kv", "heads of keys and values", whole(1, 1024)),
            Flag("--ff", "width of the feed-forward", whole(1, 2**18)),
            VERBOSE,
            *LONG,
        ),
    ),
    DATA,
    OPTIMIZER,
    FILES,
    PLACE,
)
TRAIN = (*_TRAIN, WORKERS)
PLAN_FINETUNE = (
    Group("Plan", (JSON, Flag("--full", "of all weights, as with -o FILE (default: of an adapter)"))),
    *_FINETUNE,
)
PLAN_TRAIN = (Group("Plan", (JSON,)), *_TRAIN)
EXPORT_LORA = (
    Group(
        "Merge",
        (
            MODEL,
            Flag("-o --output", "the model to write", file_name, None, "FILE", common=True),
            Flag(
                "--peft-out",
                "write the adapter as peft loads it, into this folder",
                folder_name,
                None,
                "DIR",
                common=True,
            ),
            Flag("-l --lora", "an adapter; may be given again", file_names, None, "FILE", many=True),
            Flag(
                "-s --lora-scaled",
                "an adapter and its scale, or FILE X; may be given again",
                file_names,
                None,
                "FILE:X",
                many=True,
                then_number=True,
            ),
            Flag(
                "--output-type",
                "type of the merged matrices, as of `quantize`: F16, Q4_K_M, ... (default: their own)",
                text,
                None,
                "TYPE",
            ),
            Flag("-t --threads", kind=text, metavar="N", status=IGNORED),
            *GENERAL,
        ),
    ),
)
