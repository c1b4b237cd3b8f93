"""Dequantise GGUF tensors to float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logitless.models.gguf.file import TensorInfo

F32 = npt.NDArray[np.float32]


def dequantized(info: TensorInfo, raw: npt.NDArray[np.uint8]) -> F32:
    """A tensor's numbers as f32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if info.dtype == "f32":
        return raw.view(np.float32).reshape(info.shape)
    rows = raw.reshape(*info.shape[:-1], -1)
    return np.array(dequantize(rows, GGMLQuantizationType[info.dtype.upper()]), np.float32).reshape(info.shape)
