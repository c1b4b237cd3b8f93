"""`logitless export-lora`: a model with adapters merged into its weights, or an adapter in peft's format."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError
from logitless.cli.outputs import check_output, checked_type
from logitless.engine.loading.adapters import scaled
from logitless.models.adapters.lora import read_adapter
from logitless.models.adapters.merge import merge
from logitless.models.adapters.peft import write_peft
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of


def run(options: SimpleNamespace) -> int:
    if not options.model or bool(options.output) == bool(options.peft_out):
        raise UsageError("export-lora: -m FILE is required, and -o FILE or --peft-out DIR")
    adapters = [(path, 1.0) for path in options.lora] + [scaled("--lora-scaled", text) for text in options.lora_scaled]
    if not adapters:
        raise UsageError("export-lora: --lora FILE or --lora-scaled FILE:SCALE is required")
    if options.peft_out:
        return _to_peft(options, [path for path, scale in adapters if scale == 1])
    file_type = checked_type(options.output_type) if options.output_type else ""
    inputs = [("-m", options.model), *(("--lora", path) for path, _ in adapters)]
    check_output(options.output, "-o", inputs)
    with GGUFFile.open(options.model) as base:
        h = hparams_of(base)
        pairs = [(read_adapter(path, base, h), scale) for path, scale in adapters]
        changed = merge(options.output, base, h, pairs, file_type)
    print(f"{options.output}: {len(changed)} tensors changed", file=sys.stderr)
    return 0


def _to_peft(options: SimpleNamespace, paths: list[str]) -> int:
    if len(options.lora) + len(options.lora_scaled) != 1 or not paths:
        raise UsageError("export-lora: --peft-out takes one adapter, with the scale 1")
    if options.output_type:
        raise UsageError("export-lora: --output-type is of a merged model, and --peft-out writes an adapter")
    with GGUFFile.open(options.model) as base:
        h = hparams_of(base)
        write_peft(options.peft_out, read_adapter(paths[0], base, h), base, h)
    return 0
