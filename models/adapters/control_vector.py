"""Control vectors: a vector added to the residual stream after each layer (Zou et al., 2023), in llama.cpp's format.

A file has f32 tensors `direction.N`, the vector of layer N; the first layer, 0, has none."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from logitless.graph.execution.session import Session
from logitless.models.errors import ModelFileError, shown
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams
from logitless.models.model import Model

Directions = Mapping[int, npt.NDArray[np.float32]]
_NAME = re.compile(r"direction\.(\d{1,5})")
log = logging.getLogger("logitless.loading")


def read_directions(files: Sequence[tuple[str, float]], h: Hparams, layers: tuple[int, int] = (0, 0)) -> Directions:
    """The vectors (n_embd,) by layer: the sum over the files, each times its scale. `layers`: the first and the last
    that get theirs; 0: of all. ModelFileError names the tensor that does not fit the model."""
    vectors: dict[int, npt.NDArray[np.float32]] = {}
    for path, factor in files:
        for layer, vector in _directions(path, h).items():
            vectors[layer] = vectors.get(layer, np.float32(0)) + vector * np.float32(factor)
    first, last = layers[0] or 1, layers[1] or h.n_layer
    return {layer: vector for layer, vector in sorted(vectors.items()) if first <= layer <= last}


def _directions(path: str, h: Hparams) -> Directions:
    vectors, beyond = {}, []
    with GGUFFile.open(path) as gguf:
        if h.architecture.norm.post_residual:
            raise ModelFileError(path, f"control vectors are of models that write, {h.arch} makes embeddings")
        for name, info in gguf.tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            if not (layer := int(match[1])):
                raise ModelFileError(path, f"tensor {shown(name)}: the first layer has no vector")
            if (info.dtype, info.shape) != ("f32", (h.n_embd,)):
                raise ModelFileError(
                    path, f"tensor {shown(name)} has {info.dtype} of shape {info.shape}, expected f32 {(h.n_embd,)}"
                )
            vector = np.array(gguf.bytes_of(name).view(np.float32))
            if not np.isfinite(vector).all():
                raise ModelFileError(path, f"tensor {shown(name)} holds a number that is not finite")
            if layer < h.n_layer:
                vectors[layer] = vector
            else:
                beyond.append(name)
    if not vectors:
        why = "has vectors of other layers only" if beyond else "is no control vector: it has no tensor direction.N"
        raise ModelFileError(path, why)
    if beyond:
        log.warning("%s: %s is ignored: the model has %d layers", path, shown(beyond[0]), h.n_layer)
    return vectors


def steered(session: Session, model: Model, directions: Directions) -> Model:
    """The model with these vectors, as constants of the session beside their layers' weights."""
    if not directions:
        return model
    tensors = {i: session.constant(f"blk.{i}.control_vector", vector) for i, vector in directions.items()}
    return replace(model, weights=replace(model.weights, directions=tensors))


def digest(directions: Directions) -> str:
    """Hex digest of all vectors; "" where there are none."""
    if not directions:
        return ""
    hashed = blake2b(digest_size=16)
    for layer, vector in directions.items():
        hashed.update(f"{layer} ".encode() + vector.tobytes())
    return hashed.hexdigest()
