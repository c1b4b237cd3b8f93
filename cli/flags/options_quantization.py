"""Flags of `quantize` and `imatrix`, by the names of llama-quantize and llama-imatrix."""

from __future__ import annotations

from logitless.cli.flags.flags import IGNORED, Flag, Group
from logitless.cli.flags.options import GENERAL
from logitless.engine.loading.values import file_name, text

QUANTIZE = (
    Group(
        "Quantize",
        (
            Flag("-m --model", "the model to quantize: the first word, IN", file_name, None, "FILE", common=True),
            Flag("-o --output", "the model to write: the second word, OUT", file_name, None, "FILE", common=True),
            Flag("--type", "type of the file: the third word; --list shows them", text, None, "TYPE", common=True),
            Flag("--imatrix", "weigh errors by this importance matrix", file_name, None, "FILE", common=True),
            Flag("--allow-requantize", "also quantize what is quantized already, which loses more of it"),
            Flag("--leave-output-tensor", "keep output.weight as it is"),
            Flag("--pure", "one type for all matrices, no mixture"),
            Flag("--output-tensor-type", "type of output.weight", text, None, "TYPE"),
            Flag("--token-embedding-type", "type of the token embedding", text, None, "TYPE"),
            Flag(
                "--tensor-type",
                "type of the tensors whose names have this regular expression; may be given again",
                text,
                None,
                "NAME=TYPE",
                many=True,
            ),
            Flag("--dry-run", "show the sizes, and write nothing"),
            Flag("--list", "show the types and leave"),
            Flag("-t --threads", kind=text, metavar="N", status=IGNORED),
            *GENERAL,
        ),
    ),
)
