"""`scripts/bench-gaps`: gaps between streams' tokens while a long prompt or an image arrives.

Gaps are told as multiples of the stream's median before the prompt. What a client sees is not the server's alone: other
processes, the kernel and a virtual machine's host add to it (docs/experiments/scheduling.md). A gap beside a
prompt is meant to last as long as two without one. So the same is told of two tokens of the same stream, before the
prompt came and after its first token: what of these is beyond the bound is not the prompt's. With `--prompt 0` none
comes.

With `--image SIDE` a new image arrives in the place of the prompt. Then the time to the first token of further requests
with one image is compared with that of their texts alone.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import selectors
import statistics
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image

from scripts.bench_http import Stream, begin, connect, message, part, receive, request_of
from scripts.bench_llama_images import random_png

BOUND = 3.0
LEAST_ALONE = 30  # tokens of the stream before the prompt
SETTLED = 5  # gaps after the stream's begin and the prompt's end, which are neither's


@dataclass(frozen=True)
class Round:
    alone: float  # seconds, the median
    gaps: list[float]  # beside the prompt, in medians, sorted
    pairs: list[float]  # two gaps without it, in medians
    first: float  # seconds to the prompt's first token; without one to the stream's end


def measure(url: str, turn: int, options: argparse.Namespace) -> Round:
    if options.image:
        long = image_message(url, random_png(options.image, turn), "")
    else:
        long = message(url, turn, options.streams, options.prompt, 2) if options.prompt else b""
    streams = [begin(connect(url), message(url, turn, i, 16, options.gen)) for i in range(options.streams)]
    waiting = connect(url)  # already, so that this client reads what arrives
    sent, prompt = 0.0, Stream(waiting)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            receive(selector)
            if not sent and len(streams[0].times) > max(LEAST_ALONE, options.gen // 4):
                sent = time.perf_counter()
                if long:
                    prompt = begin(waiting, long)
                    selector.register(prompt.socket, selectors.EVENT_READ, prompt)
    for stream in [*streams, prompt] if long else streams:
        stream.n_tokens()
    waiting.close()
    first = prompt.times[0] if long else streams[0].times[-1]
    alone, beside, pairs = [], [], []
    for stream in streams:
        gaps = [(b, b - a) for a, b in pairwise(stream.times)]
        before = [gap for end, gap in gaps if end < sent][SETTLED:]
        after = [gap for end, gap in gaps if end > first][SETTLED:]
        alone += before
        beside += [gap for end, gap in gaps if sent < end <= first]
        pairs += [a + b for part in (before, after) for a, b in zip(part[::2], part[1::2], strict=False)]
    median = statistics.median(alone)
    return Round(median, sorted(gap / median for gap in beside), [pair / median for pair in pairs], first - sent)


def image_message(url: str, png: bytes, text: str) -> bytes:
    """A request for two tokens after an image and a text; without bytes of an image after the text."""
    prompt: object = text
    if png:
        with urllib.request.urlopen(f"{url}/props") as answer:
            marker = json.load(answer)["media_marker"]
        prompt = {"prompt_string": marker + text, "multimodal_data": [base64.b64encode(png).decode()]}
    return request_of(url, {"prompt": prompt, "n_predict": 2, "temperature": 0})


def first_token(url: str, request: bytes) -> float:
    """Seconds to the first token of a request."""
    began, stream = time.perf_counter(), begin(connect(url), request)
    with selectors.DefaultSelector() as selector:
        selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            receive(selector)
    stream.n_tokens()
    return stream.times[0] - began


def photograph(side: int) -> bytes:
    """A JPEG file with the detail of a photograph: 2 bits a pixel."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (side // 16, side // 16, 3)).astype(np.uint8))
    grain = random.normal(0, 6, (side, side, 3))
    pixels = np.clip(np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)) + grain, 0, 255)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG", quality=88)
    return out.getvalue()


def compare_first_tokens(url: str, options: argparse.Namespace) -> None:
    """Print how long the first token of a text takes, alone and after an image that was there before."""
    for kind, file in (("JPEG", photograph(options.image)), ("PNG", random_png(options.image, options.turns))):
        seconds: list[list[float]] = []
        for turn in range(-1, 2 * options.turns):
            text = f" {kind} {turn}" + " the house of many people" * 20
            requests = image_message(url, file, text), image_message(url, b"", text)
            found = [first_token(url, request) for request in requests]
            if turn >= 0:  # the first encodes the image
                seconds.append(found)
        behind, alone = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
        ratio = statistics.median(a / b for a, b in seconds)
        size = f"{kind} of {len(file) / 1e6:.1f} MB"
        print(f"first token behind a known {size} {behind:.0f} ms, alone {alone:.0f} ms: {ratio:.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="gaps of streams beside a long prompt or an image")
    parser.add_argument("url", help="http://host:port of a server that runs; no other one should, busy or not")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the long prompt; 0: none comes")
    parser.add_argument("--image", type=int, default=0, metavar="SIDE", help="an image of so many pixels instead")
    parser.add_argument("--streams", type=int, default=1, help="whose gaps count")
    parser.add_argument("--gen", type=int, default=300, help="tokens of the stream; it should outlast the prompt")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.6, help="seconds between turns, as users make them")
    options = parser.parse_args()
    if options.gen < 2 * LEAST_ALONE:
        parser.error(f"--gen: at least {2 * LEAST_ALONE}, for the stream's own pace")
    titles = "alone, ms", "gaps", "median, x", "p95, x", "p99, x", "greatest, x", f"beyond {BOUND:g} x"
    print("|", " | ".join([*titles, "first token, s", f"two alone beyond {BOUND:g} x"]), "|")
    print("|---" * 9 + "|")
    for turn in range(options.turns):
        time.sleep(options.pause)
        found = measure(options.url, turn, options)
        shares = " | ".join(f"{part(found.gaps, share):.2f}" for share in (0.5, 0.95, 0.99, 1.0))
        beyond, control = (sum(gap > BOUND for gap in gaps) for gaps in (found.gaps, found.pairs))
        row = f"{1e3 * found.alone:.2f} | {len(found.gaps)} | {shares} | {beyond} | {found.first:.2f}"
        print(f"| {row} | {control} of {len(found.pairs)} |", flush=True)
    print()
    if options.image:
        compare_first_tokens(options.url, options)


if __name__ == "__main__":
    main()
