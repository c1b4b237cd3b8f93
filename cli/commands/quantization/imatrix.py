"""`logitless imatrix`: an importance matrix of a model on a text, in llama.cpp's format."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.outputs import check_output
from logitless.cli.progress import COMPILING, StatusLine
from logitless.cli.setup.text_windows import text_run
from logitless.models.quantization.imatrix import write_imatrix
from logitless.models.quantization.input_squares import InputSquares
from logitless.models.weights.weights import check_weights


def run(o: SimpleNamespace) -> int:
    if not o.output:
        raise UsageError("imatrix: -o FILE is required")
    check_output(o.output, "-o", [("-m", o.model), ("-f", o.file)])
    with text_run(o, "imatrix") as text:
        h, line = text.model.hparams, StatusLine()
        parts = check_weights(text.gguf, h)
        squares = InputSquares(text.session, text.model, text.gguf, parts, o.ctx_size, output=o.process_output)
        for i, tokens in enumerate(text.windows, 1):
            try:
                squares.add(tokens)
            except OverflowError as error:
                raise CliError(f"imatrix: window {i}: {error}") from None
            COMPILING.end()
            if sys.stderr.isatty():
                line.show(f"{i} of {len(text.windows)} windows")
        line.end()
        result = squares.result()
        n = len(text.windows)
        write_imatrix(o.output, h.arch, result, datasets=[o.file], n_chunks=n, chunk_size=o.ctx_size)
    print(f"{o.output}: {len(result)} matrices, {n} windows of {o.ctx_size} tokens", file=sys.stderr)
    missed = [name for name, (_, counts) in result.items() if not counts.all()]
    if missed:
        summary = f"{len(missed)} matrices have experts without a row ('{missed[0]}', …): their weights count evenly"
        print(f"logitless: warning: {summary}", file=sys.stderr)
    return 0
