"""`logitless export-lora`: a model with adapters merged into its weights."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError
from logitless.cli.setup.training_run import checked_type


def run(options: SimpleNamespace) -> int:
    from logitless.cli.outputs import check_output
    from logitless.engine.loading.adapters import scaled
    from logitless.models.adapters.lora import read_adapter
    from logitless.models.adapters.merge import merge
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of

    if not options.model or not options.output:
        raise UsageError("export-lora: -m FILE and -o FILE are required")
    adapters = [(path, 1.0) for path in options.lora] + [scaled(text) for text in options.lora_scaled]
    if not adapters:
        raise UsageError("export-lora: --lora FILE or --lora-scaled FILE:SCALE is required")
    file_type = checked_type(options.output_type) if options.output_type else ""
    inputs = [("-m", options.model), *(("--lora", path) for path, _ in adapters)]
    check_output(options.output, "-o", inputs)
    with GGUFFile.open(options.model) as base:
        h = hparams_of(base)
        pairs = [(read_adapter(path, base, h), scale) for path, scale in adapters]
        changed = merge(options.output, base, h, pairs, file_type)
    print(f"{options.output}: {len(changed)} tensors changed", file=sys.stderr)
    return 0
