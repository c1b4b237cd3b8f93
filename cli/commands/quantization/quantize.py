"""`logitless quantize`: a model file with fewer bits a weight, in llama-quantize's types."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError
from logitless.cli.outputs import check_output
from logitless.cli.progress import StatusLine
from logitless.models.gguf.file import GGUFFile
from logitless.models.quantization.imatrix import read_imatrix
from logitless.models.quantization.presets import ALIASES, PRESETS, PresetError, TypeOptions, check_type, preset
from logitless.models.quantization.quantize_model import Quantization, plan_quantization


def run(o: SimpleNamespace) -> int:
    if o.list:
        print("types:", ", ".join([*PRESETS, *ALIASES]))
        return 0
    if o.dry_run and not o.type:  # llama-quantize's short form: IN TYPE
        o.output, o.type = None, o.output
    if not o.model or not o.type or not (o.output or o.dry_run):
        raise UsageError("quantize: IN.gguf, OUT.gguf and TYPE are required; --list shows the types")
    try:
        name, options = preset(o.type), _type_options(o)
        if o.output:
            check_output(o.output, "OUT", [("IN", o.model), ("--imatrix", o.imatrix)])
        imatrix = None if o.imatrix is None else read_imatrix(o.imatrix)
        with GGUFFile.open(o.model) as gguf:
            plan = plan_quantization(gguf, name, imatrix=imatrix, options=options, allow_requantize=o.allow_requantize)
            for warning in plan.warnings():
                print(f"logitless: warning: {warning}", file=sys.stderr)
            if not o.dry_run:
                write(plan, o.output)
            before = sum(info.nbytes for info in gguf.tensors.values())
    except PresetError as error:
        raise UsageError(f"quantize: {error}") from None
    size = f"{plan.nbytes / 1e6:.1f} of {before / 1e6:.1f} MB, {plan.bits_per_weight:.2f} bits a weight"
    print(f"{o.model if o.dry_run else o.output}: {name}, {size}", file=sys.stderr)
    return 0


def _type_options(o: SimpleNamespace) -> TypeOptions:
    """PresetError for a type that is not written here."""
    types = {}
    for text in o.tensor_type:
        pattern, equals, dtype = text.rpartition("=")
        if not equals:
            raise UsageError(f"--tensor-type: {text!r} is not NAME=TYPE")
        types[pattern] = check_type(dtype)
    return TypeOptions(
        pure=o.pure,
        leave_output_tensor=o.leave_output_tensor,
        output_tensor_type=check_type(o.output_tensor_type) if o.output_tensor_type else "",
        token_embedding_type=check_type(o.token_embedding_type) if o.token_embedding_type else "",
        tensor_type=types,
    )


def write(plan: Quantization, path: str) -> None:
    """Write the file, with its progress on a terminal."""
    line = StatusLine()

    def show(done: int, total: int) -> None:
        line.show(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")

    plan.write(path, show if sys.stderr.isatty() else None)
    line.end()
