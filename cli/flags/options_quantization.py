"""Flags of `quantize`, `imatrix` and `perplexity`, by the names of llama.cpp's tools."""

from __future__ import annotations

from logitless.cli.flags.flags import IGNORED, Flag, Group
from logitless.cli.flags.model_options import DOWNLOADS, MODEL
from logitless.cli.flags.options import DEVICE, GENERAL, THREADS
from logitless.engine.loading.values import file_name, text, whole

QUANTIZE = (
    Group("Quantize", (
        Flag("-m --model", "the model to quantize, a file or a Hugging Face folder: the first word, IN", file_name,
             None, "FILE", common=True),
        Flag("-o --output", "the model to write: the second word, OUT", file_name, None, "FILE", common=True),
        Flag("--type", "type of the file: the third word; --list shows them", text, None, "TYPE", common=True),
        Flag("--imatrix", "weigh errors by this importance matrix", file_name, None, "FILE", common=True),
        Flag("--allow-requantize", "also quantize what is quantized already, which loses more of it"),
        Flag("--leave-output-tensor", "keep output.weight as it is"),
        Flag("--pure", "one type for all matrices, no mixture"),
        Flag("--output-tensor-type", "type of output.weight", text, None, "TYPE"),
        Flag("--token-embedding-type", "type of the token embedding", text, None, "TYPE"),
        Flag("--tensor-type", "type of the tensors whose names have this regular expression; may be given again", text,
             None, "NAME=TYPE", many=True),
        Flag("--dry-run", "show the sizes, and write nothing"),
        Flag("--list", "show the types and leave"),
        Flag("-t --threads", kind=text, metavar="N", status=IGNORED),
        *GENERAL,
    )),
)  # fmt: skip

CONVERT = (
    Group("Convert", (
        Flag("-m --model", "the folder: the first word, FOLDER", file_name, None, "FOLDER", common=True),
        Flag("-o --output", "the GGUF file to write; with --base the folder", file_name, None, "FILE", common=True),
        Flag("--base", "write a fine-tuned GGUF file (the first word) as a folder, in the form and types of this one",
             file_name, None, "FOLDER", common=True),
        Flag("--type", "type of the file, as of quantize (default: the folder's)", text, None, "TYPE", common=True),
        Flag("--mmproj", "write the folder's image encoder and projector instead of its text model", common=True),
        *GENERAL,
    )),
)  # fmt: skip

WINDOWS = (
    Flag("-c --ctx-size", "tokens of a window (default: 512, at most the model's)", whole(2), None, common=True),
    Flag("--chunks", "windows at most", whole(1), None, common=True),
    Flag("--chunk --from-chunk", "windows to leave out at the beginning", whole(0), 0),
)
IMATRIX = (
    Group("Importance matrix", (
        MODEL, *DOWNLOADS,
        Flag("-f --file", "the text to run the model on", file_name, None, "FILE", common=True),
        Flag("-o --output", "the file to write", file_name, None, "FILE", common=True),
        *WINDOWS,
        Flag("--process-output", "also of the output matrix", off="--no-process-output"),
        Flag("--parse-special", "read the text of special tokens as those tokens", off="--no-parse-special"),
        DEVICE, THREADS, *GENERAL,
    )),
)  # fmt: skip
PERPLEXITY = (
    Group("Perplexity", (
        MODEL, *DOWNLOADS,
        Flag("-f --file", "the text", file_name, None, "FILE", common=True),
        *WINDOWS, DEVICE, THREADS, *GENERAL,
    )),
)  # fmt: skip
