"""`logitless convert`: a Hugging Face folder as a GGUF file, which llama.cpp loads, too."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.commands.quantization.quantize import write
from logitless.cli.flags.flags import UsageError
from logitless.cli.outputs import check_output


def run(o: SimpleNamespace) -> int:
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.quantization.presets import PresetError
    from logitless.models.quantization.quantize_model import plan_copy, plan_quantization

    if not o.model or not o.output:
        raise UsageError("convert: FOLDER and -o FILE.gguf are required")
    if Path(o.model).is_file():
        raise UsageError(f"convert: {o.model} is a file, not a folder; `logitless quantize` reads GGUF files")
    check_output(o.output, "-o")
    try:
        with GGUFFile.open(o.model) as gguf:
            plan = plan_quantization(gguf, o.type, allow_requantize=True) if o.type else plan_copy(gguf)
            for warning in plan.warnings():
                print(f"logitless: warning: {warning}", file=sys.stderr)
            write(plan, o.output)
    except PresetError as error:
        raise UsageError(f"convert: {error}") from None
    print(f"{o.output}: {len(plan.types)} tensors, {plan.nbytes / 1e6:.1f} MB", file=sys.stderr)
    return 0
