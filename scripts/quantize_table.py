"""`scripts/quantize-table`: perplexity of every type of `logitless quantize`, measured here and by llama.cpp.

For each type a model is quantized without and with an importance matrix of another text. llama.cpp
(the package xllamacpp) reads the same files and windows; its own quantizer would write the same
bytes (tests/models/quantization/test_quantize.py)."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from logitless.backends.registry import open_backends
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import define_model, hparams_of
from logitless.models.quantization.imatrix import Imatrix, read_imatrix, write_imatrix
from logitless.models.quantization.input_squares import InputSquares
from logitless.models.quantization.presets import PRESETS
from logitless.models.quantization.quantize_model import plan_quantization
from logitless.models.weights.weights import check_weights
from logitless.training.score import window_losses
from tests.helpers.llama_cpp_library import activations

Windows = npt.NDArray[np.int32]


def windows(gguf: GGUFFile, text: Path, size: int, most: int) -> Windows:
    vocabulary = tokenizer.from_metadata(gguf.metadata)
    ids = vocabulary.encode(text.read_text(encoding="utf-8", errors="replace")[: most * size * 16])
    rows = np.array(ids[: len(ids) // size * size], np.int32).reshape(-1, size)[:most]
    if vocabulary.add_bos:
        rows[:, 0] = vocabulary.bos_id
    return rows


def ours(path: Path, rows: Windows) -> float:
    with GGUFFile.open(path) as gguf, Session(open_backends(["cpu"])) as session:
        model = define_model(session, gguf, hparams_of(gguf), rows.shape[1])
        losses = [window_losses(session, model, row)[rows.shape[1] // 2 :] for row in rows]
    return float(np.exp(np.concatenate(losses).astype(np.float64).mean()))


def theirs(path: Path, rows: Windows, n_vocab: int, folder: Path) -> float:
    losses = activations(path, rows, n_vocab, folder, collect=False)["losses"]
    return float(np.exp(losses[:, rows.shape[1] // 2 :].mean()))


def imatrix_of(gguf: GGUFFile, rows: Windows, path: Path) -> Imatrix:
    h = hparams_of(gguf)
    with Session(open_backends(["cpu"])) as session:
        model = define_model(session, gguf, h, rows.shape[1])
        squares = InputSquares(session, model, gguf, check_weights(gguf, h), rows.shape[1], output=True)
        for row in rows:
            squares.add(row)
    write_imatrix(path, h.arch, squares.result(), datasets=[], n_chunks=len(rows), chunk_size=rows.shape[1])
    return read_imatrix(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("-f", "--file", type=Path, required=True, help="the text that is measured")
    parser.add_argument("--imatrix-text", type=Path, required=True)
    parser.add_argument("-c", "--ctx-size", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=20)
    o = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, GGUFFile.open(o.model) as gguf:
        folder, n_vocab = Path(name), hparams_of(gguf).n_vocab
        rows = windows(gguf, o.file, o.ctx_size, o.chunks)
        imatrix = imatrix_of(gguf, windows(gguf, o.imatrix_text, o.ctx_size, 4 * o.chunks), folder / "i.gguf")
        print("| type | bits | s | here | llama.cpp | here, imatrix | llama.cpp, imatrix |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for preset in PRESETS:
            cells, out = [], folder / "q.gguf"
            for matrix in (None, imatrix):
                if matrix is None and preset == "Q2_K_S":
                    cells += ["", ""]
                    continue
                plan, began = plan_quantization(gguf, preset, imatrix=matrix), time.process_time()
                plan.write(out)
                seconds = time.process_time() - began
                cells += [f"{ours(out, rows):.3f}", f"{theirs(out, rows, n_vocab, folder):.3f}"]
            print(f"| {preset} | {plan.bits_per_weight:.2f} | {seconds:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
