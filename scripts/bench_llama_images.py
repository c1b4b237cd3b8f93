"""`scripts/bench-llama --image`: encoding of images and sounds here and in llama.cpp (the package xllamacpp), by turns.

Each program is a server with a text model of two small layers, so that the time of a request is its image's: decoding,
resizing, encoding. Every image and sound is new.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from logitless.models.synthetic.model import SHAPES, synthesize
from logitless.models.synthetic.projector import PROJECTOR_SHAPES, synthesize_projector

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"siglip": 896, "qwen2.5vl": 448, "whisper": 0}  # pixels of a side, by the encoder's shape; 0: a sound
THERE = """
import sys, xllamacpp
model, projector, threads = sys.argv[1:]
p = xllamacpp.CommonParams()
p.model.path, p.mmproj.path, p.mmproj_use_gpu, p.n_ctx, p.n_parallel = model, projector, False, 2048, 1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(threads)
p.warmup, p.fit_params, p.verbosity, p.n_ubatch = False, False, -1, 2048
server = xllamacpp.Server(p)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


class Program:
    """A server with a vision model. Close it, or use it as a context manager."""

    def __init__(self, command: list[str], url: str = "") -> None:
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.url = url or self.process.stdout.readline().strip()
        while self.process.poll() is None:
            try:
                self.marker = self._ask("/props")["media_marker"]
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        sys.exit(1)  # it has said why

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def read(self, media: bytes, *, processor_time: bool) -> tuple[float, int]:
        """(seconds until the first token after it, tokens of its prompt)."""
        seconds = self._processor_seconds if processor_time else time.perf_counter
        prompt = {"prompt_string": f"a{self.marker}b", "multimodal_data": [base64.b64encode(media).decode()]}
        began = seconds()
        answer = self._ask("/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0})
        return seconds() - began, answer["tokens_evaluated"]

    def _processor_seconds(self) -> float:
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def here(model: str, projector: str, threads: int) -> Program:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "logitless", "serve", "-m", model, "--mmproj", projector]
    return Program([*words, "--port", str(port), "-t", str(threads), "-c", "2048"], f"http://127.0.0.1:{port}")


def there(model: str, projector: str, threads: int) -> Program:
    return Program([sys.executable, "-c", THERE, model, projector, str(threads)])


def random_wav(seed: int) -> bytes:
    """Ten seconds of noise."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(seed).integers(-9999, 9999, 160_000).astype("<i2").tobytes())
    return out.getvalue()


def random_png(side: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(out, "PNG")
    return out.getvalue()


def compare(options: argparse.Namespace) -> None:
    """Print a line for each shape of an encoder."""
    print(
        "| encoder | layers | image | tokens | logitless, s | llama.cpp, s | ratio | of each turn |\n"
        + "|---" * 8
        + "|"
    )
    for shape, side in IMAGES.items():
        if options.image not in ("all", shape):
            continue
        with tempfile.TemporaryDirectory() as folder:
            model, projector = f"{folder}/model.gguf", f"{folder}/projector.gguf"
            synthesize(model, "tiny", "F32")
            full = PROJECTOR_SHAPES[shape]
            n_layer = options.layers or full.n_layer
            synthesize_projector(projector, SHAPES["tiny"].n_embd, replace(full, n_layer=n_layer))
            seconds: list[tuple[float, float]] = []
            with here(model, projector, options.threads) as ours, there(model, projector, options.threads) as theirs:
                for turn in range(options.turns + 1):
                    media = random_png(side, turn) if side else random_wav(turn)
                    (a, n), (b, n_theirs) = (
                        p.read(media, processor_time=options.processor_time) for p in (ours, theirs)
                    )
                    if n != n_theirs:
                        sys.exit(f"bench-llama: {n} tokens here, {n_theirs} in llama.cpp")
                    if turn:  # the first makes plans and touches pages
                        seconds.append((a, b))
        ratios = [b / a for a, b in seconds]
        ours_s, theirs_s = (statistics.median(column) for column in zip(*seconds, strict=True))
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        speed = f"{ours_s:.2f} | {theirs_s:.2f} | {statistics.median(ratios):.2f}"
        print(
            f"| {shape} | {n_layer} | {f'{side} x {side}' if side else '10 s'} | {n} | {speed} | {each} |", flush=True
        )
