"""`logitless convert`: a Hugging Face folder or its projector as a GGUF file, and a fine-tuned file as a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from logitless.cli.commands.quantization.quantize import write
from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.outputs import check_output
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.save import write_folder
from logitless.models.huggingface.visions import has_projector, projector_file
from logitless.models.quantization.presets import PresetError
from logitless.models.quantization.quantize_model import plan_copy, plan_quantization


def run(o: SimpleNamespace) -> int:
    if not o.model or not o.output:
        raise UsageError("convert: FOLDER and -o FILE.gguf are required")
    if o.base:
        return _as_folder(o)
    if Path(o.model).is_file():
        hint = "--base FOLDER makes a folder of it, and `logitless quantize` another file"
        raise UsageError(f"convert: {o.model} is a file, not a folder; {hint}")
    if o.mmproj and o.type:
        raise UsageError("convert: --type is of models; a projector has the types of the folder")
    check_output(o.output, "-o")
    try:
        with GGUFFile.open(projector_file(Path(o.model)) if o.mmproj else o.model) as gguf:
            plan = plan_quantization(gguf, o.type, allow_requantize=True) if o.type else plan_copy(gguf)
            for warning in plan.warnings():
                print(f"logitless: warning: {warning}", file=sys.stderr)
            write(plan, o.output)
    except PresetError as error:
        raise UsageError(f"convert: {error}") from None
    print(f"{o.output}: {len(plan.types)} tensors, {plan.nbytes / 1e6:.1f} MB", file=sys.stderr)
    if not o.mmproj and has_projector(Path(o.model)):
        print(f"logitless convert {o.model} --mmproj -o mmproj.gguf writes its encoder", file=sys.stderr)
    return 0


def _as_folder(o: SimpleNamespace) -> int:
    out = Path(o.output)
    if o.type:
        raise UsageError("convert: --type is of GGUF files; a folder has the types of --base")
    if not Path(o.base).is_dir():
        raise CliError(f"--base: {o.base} is no folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CliError(f"-o: {o.output} is there already, and not an empty folder")
    try:
        with GGUFFile.open(o.base) as base, GGUFFile.open(o.model) as tuned:
            write_folder(out, base, tuned)
    except OSError as error:
        raise CliError(f"{o.output}: cannot be written: {error.strerror}") from None
    print(f"{o.output}: {len(list(out.iterdir()))} files", file=sys.stderr)
    return 0
