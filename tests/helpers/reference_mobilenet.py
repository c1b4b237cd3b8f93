"""MobileNet V5 and Gemma 3n's projector in float64, from a projector file: channels first, one image at a time.

Written after timm's MobileNetV5 and llama.cpp's formulas (GELU by tanh), with the file's tensors alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

Array = np.ndarray[Any, Any]
EPS = 1e-6
SIDE = 16  # of the result


class MobileNet:
    """The encoder of one file."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.t = {t.name: np.array(t.data, np.float64).reshape(t.shape[::-1].tolist()) for t in reader.tensors}
        self.mean, self.std = (
            np.array(reader.fields[f"clip.vision.image_{name}"].contents()) for name in ("mean", "std")
        )

    def rows(self, pixels: Array) -> Array:
        """Rows (256, width of the text model) of an image (side, side, 3) u8."""
        x = ((pixels / 255.0 - self.mean) / self.std).transpose(2, 0, 1)
        x = self._convolved(x, "v.conv_stem.conv", 2) + self.t["v.conv_stem.conv.bias"].reshape(-1, 1, 1)
        x = gelu(self._normed(x, "v.conv_stem.bn"))
        last = {}
        for stage in range(4):
            i = 0
            while any(name.startswith(f"v.blk.{stage}.{i}.") for name in self.t):
                y = self._block(x, f"v.blk.{stage}.{i}.", first=i == 0)
                x = x + y if x.shape == y.shape else y
                last[stage] = x
                i += 1
        factor = last[2].shape[1] // last[3].shape[1]
        x = np.concatenate([last[2], last[3].repeat(factor, 1).repeat(factor, 2)])
        x = gelu(self._normed(self._convolved(x, "v.msfa.ffn.pw_exp.conv"), "v.msfa.ffn.pw_exp.bn"))
        x = self._normed(self._convolved(x, "v.msfa.ffn.pw_proj.conv"), "v.msfa.ffn.pw_proj.bn")
        size = x.shape[1] // SIDE
        x = x.reshape(-1, SIDE, size, SIDE, size).mean((2, 4))
        x = self._normed(x, "v.msfa.norm").reshape(len(x), -1).T * math.sqrt(len(x))
        x = unit(x) * self.t["mm.soft_emb_norm.weight"]
        return unit(x @ self.t["mm.input_projection.weight"].T)

    def _block(self, x: Array, b: str, *, first: bool) -> Array:
        t = self.t
        if f"{b}conv_exp.weight" in t:
            y = gelu(self._normed(self._convolved(x, f"{b}conv_exp", 1 + first), f"{b}bn1"))
            return self._normed(self._convolved(y, f"{b}conv_pwl"), f"{b}bn2")
        if f"{b}attn.query.proj.weight" in t:
            return self._attention(x, b) * t[f"{b}layer_scale.gamma"].reshape(-1, 1, 1)
        middle = f"{b}dw_mid.conv.weight" in t
        if f"{b}dw_start.conv.weight" in t:
            x = self._normed(self._convolved(x, f"{b}dw_start.conv"), f"{b}dw_start.bn")
        x = gelu(self._normed(self._convolved(x, f"{b}pw_exp.conv"), f"{b}pw_exp.bn"))
        if middle:
            x = gelu(self._normed(self._convolved(x, f"{b}dw_mid.conv", 1 + first), f"{b}dw_mid.bn"))
        x = self._normed(self._convolved(x, f"{b}pw_proj.conv"), f"{b}pw_proj.bn")
        return x * t[f"{b}layer_scale.gamma"].reshape(-1, 1, 1)

    def _attention(self, x: Array, b: str) -> Array:
        normed, both = self._normed(x, f"{b}norm"), []
        for name in ("key", "value"):
            y = normed
            if f"{b}attn.{name}.down_conv.weight" in self.t:
                y = self._normed(self._convolved(y, f"{b}attn.{name}.down_conv", 2), f"{b}attn.{name}.norm")
            y = self._convolved(y, f"{b}attn.{name}.proj")
            both.append(y.reshape(len(y), -1))
        k, v = both
        q = self._convolved(normed, f"{b}attn.query.proj").reshape(-1, len(k), x.shape[1] * x.shape[2])
        scores = np.einsum("hdq,dk->hqk", q, k) / math.sqrt(len(k))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        heads = np.einsum("hqk,dk->hdq", p, v).reshape(-1, *x.shape[1:])
        return self._convolved(heads, f"{b}attn.output.proj")

    def _normed(self, x: Array, name: str) -> Array:
        y = x / np.sqrt((x * x).mean(0, keepdims=True) + EPS)
        return y * self.t[f"{name}.weight"].reshape(-1, 1, 1)

    def _convolved(self, x: Array, name: str, stride: int = 1) -> Array:
        """A convolution with as many zeros around as keep the side, or halve it; depthwise where the kernel has one
        input channel."""
        w = self.t[f"{name}.weight"]
        side, size = x.shape[1], w.shape[2]
        missing = size - 1 if stride == 1 else max(0, (-(-side // stride) - 1) * stride + size - side)
        around = missing // 2, missing - missing // 2
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), around, around)), (size, size), (1, 2))
        windows = windows[:, ::stride, ::stride]
        if w.shape[1] == 1 < size:
            return np.einsum("chwij,cij->chw", windows, w[:, 0])
        return np.tensordot(w, windows, ((1, 2, 3), (0, 3, 4)))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def unit(x: Array) -> Array:
    """RMS norm of rows."""
    return x / np.sqrt((x * x).mean(1, keepdims=True) + EPS)
