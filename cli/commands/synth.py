"""`logitless synth`: a GGUF model with random weights."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import UsageError
from logitless.cli.outputs import check_output
from logitless.cli.progress import StatusLine


def run(options: SimpleNamespace) -> int:
    from logitless.models.quantization.quantize import DTYPES
    from logitless.models.synthetic.model import SHAPES, parse_dtype, synthesize
    from logitless.models.synthetic.projector import PROJECTOR_SHAPES, synthesize_projector

    if options.list:
        column = max(map(len, [*SHAPES, *PROJECTOR_SHAPES])) + 2
        for name, s in SHAPES.items():
            heads = f"{s.n_head} heads" if s.n_head == s.n_head_kv else f"{s.n_head} heads ({s.n_head_kv} KV)"
            experts = f" of {s.n_expert} experts, {s.n_expert_used} used" if s.n_expert else ""
            layers = f"{s.n_layer} layers, {heads}, ffn {s.n_ff}{experts}"
            print(f"{name:<{column}}width {s.n_embd}, {layers}, vocabulary {s.n_vocab}")
        for name, p in PROJECTOR_SHAPES.items():
            layers = f"{p.n_layer} layers, {p.n_head} heads, ffn {p.n_ff}"
            size = f"{p.image_size} x {p.image_size}" if p.image_size else "30 seconds"
            print(f"{name:<{column}}width {p.n_embd}, {layers}, projector {p.kind} of {size}")
        print("types:", ", ".join(DTYPES).upper())
        return 0
    if not options.output:
        raise UsageError("synth: -o FILE is required")
    shapes = {name.lower(): name for name in SHAPES}
    shape = shapes.get(options.shape.lower())
    if shape is None:
        raise UsageError(f"--shape: {options.shape!r} is not one of {', '.join(SHAPES)}")
    try:
        parse_dtype(options.type)
    except ValueError as error:
        raise UsageError(f"--type: {error}") from None
    projector_shape = options.mmproj_shape.lower()
    if projector_shape not in PROJECTOR_SHAPES:
        raise UsageError(f"--mmproj-shape: {options.mmproj_shape!r} is not one of {', '.join(PROJECTOR_SHAPES)}")
    check_output(options.output, "-o")
    if options.mmproj:
        check_output(options.mmproj, "--mmproj", [("-o", options.output)])
    line = StatusLine()
    sizes = (
        (lambda done, total: line.show(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB")) if sys.stderr.isatty() else None
    )
    synthesize(options.output, shape, options.type, options.seed, progress=sizes)
    if options.mmproj:
        synthesize_projector(options.mmproj, SHAPES[shape].n_embd, projector_shape, options.seed, progress=sizes)
    line.end()
    print(f"{options.output}: {shape} {options.type.upper()}, seed {options.seed}", file=sys.stderr)
    if options.mmproj:
        print(f"{options.mmproj}: {projector_shape} F16, seed {options.seed}", file=sys.stderr)
    return 0
