"""Projectors: patch vectors of the encoder → rows of the text model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.ops.attention.encoder_attention import mean_rows
from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scale, silu, sub
from logitless.graph.ops.norm import layer_norm, rms_norm
from logitless.graph.ops.pointwise import sigmoid
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.architectures.architecture import Activation
from logitless.models.vision.ldp import ldp, ldp_feeds, ldp_v2
from logitless.models.vision.params import VisionParams
from logitless.models.vision.patches import Array
from logitless.models.vision.projectors import Head
from logitless.models.vision.weights import MATRICES
from logitless.models.weights.weights import Weights

NORM_EPS = 1e-5  # of projectors whose norm is torch's default


def project(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    """Rows of the text model from patch vectors x (T, n_embd)."""
    return _HEADS[p.projector.head](p, w, x)


def project_feeds(p: VisionParams, places: Array, n: int) -> dict[str, Array]:
    """Inputs of `project` for n tiles whose patches have these (row, column) places."""
    head, feeds = p.projector.head, {}
    if head in (Head.POOL_NORM, Head.POOL_STANDARDIZE, Head.LDP_V2):
        feeds["patch.first"] = np.arange(0, n * len(places), p.merge**2, dtype=np.int32)
        feeds["patch.pooled"] = np.full(n * len(places) // p.merge**2, p.merge**2, np.int32)
    return feeds | (ldp_feeds(p, places, n) if head in (Head.LDP, Head.LDP_V2) else {})


def normed(p: VisionParams, w: Weights, name: str, x: Tensor, eps: float = 0.0) -> Tensor:
    """Norm of x (T, n); x itself where the file has none of that name."""
    if name not in w:
        return x
    if not p.projector.rms_norm:
        return w.layer_norm(name, x, eps or p.eps)
    y, bias = rms_norm(x, w[name], eps=eps or p.eps), w.bias(name)
    return y if bias is None else add(y, bias)


def activated(p: VisionParams, x: Tensor) -> Tensor:
    """The activation of the encoder's MLPs."""
    if p.activation is None:  # GELU's approximation by a sigmoid, CLIP's
        return mul(x, sigmoid(scale(x, factor=1.702)))
    return gelu(x) if p.activation is Activation.GELU else silu(x)


def _mlp(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    first, second = MATRICES[p.projector.head]
    return w.linear(second, gelu(w.linear(first, x)))


def _merged(p: VisionParams, x: Tensor) -> Tensor:
    return reshape(x, shape=(x.shape[0] // p.merge**2, x.shape[1] * p.merge**2))


def _elements_first(p: VisionParams, x: Tensor) -> Tensor:
    """Merged patches, element by element: as convolutions read them."""
    x = transpose(reshape(x, shape=(-1, p.merge**2, p.n_embd)), axes=(0, 2, 1))
    return reshape(x, shape=(x.shape[0], p.merge**2 * p.n_embd))


def _pooled(p: VisionParams, x: Tensor) -> Tensor:
    """The mean of merged patches."""
    n = x.shape[0] // p.merge**2
    first, count = (feed(f"patch.{name}", (n,), "i32") for name in ("first", "pooled"))
    return mean_rows(x, first, count)


def _pool_norm(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    return w.linear("mm.input_projection", rms_norm(_pooled(p, x), w["mm.soft_emb_norm"], eps=p.eps))


def _pool_standardize(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    x = scale(_pooled(p, x), factor=p.n_embd**0.5)
    shift, factor = w.tensors.get("v.std_bias"), w.tensors.get("v.std_scale")
    if shift is not None and factor is not None:
        x = mul(sub(x, shift), factor)
    return w.linear("mm.input_projection", rms_norm(x, const(1.0), eps=p.eps))


def _norm_merge_mlp(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    return _mlp(p, w, _merged(p, normed(p, w, "mm.input_norm", x, NORM_EPS)))


def _adapter(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    return w.linear("mm.model.fc", gelu(_mlp(p, w, _merged(p, x))))


def _patch_merger(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    if "mm.patch_merger" in w:
        x = normed(p, w, "mm.input_norm", x)
        x = w.linear("mm.patch_merger", _elements_first(p, x))
    return _mlp(p, w, x)


def _convolutions(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    x = _mlp(p, w, _elements_first(p, rms_norm(x, w["mm.pre_norm"], eps=p.eps)))
    return rms_norm(w.linear("mm.model.fc", x), w["mm.post_norm"], eps=p.eps)


def _gated_merger(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    x = w.linear("mm.model.fc", w.linear("mm.patch_merger", _elements_first(p, x)))
    bias = w.bias("mm.post_norm")
    bias = const(0.0) if bias is None else bias
    return _gated_mlp(w, gelu(layer_norm(x, w["mm.post_norm"], bias, eps=NORM_EPS)))


def _expert(p: VisionParams, w: Weights, x: Tensor) -> Tensor:
    return _gated_mlp(w, gelu(normed(p, w, "mm.post_fc_norm", w.linear("mm.model.fc", x), NORM_EPS)))


def _gated_mlp(w: Weights, x: Tensor) -> Tensor:
    return w.linear("mm.down", mul(silu(w.linear("mm.gate", x)), w.linear("mm.up", x)))


def extra_rows(p: VisionParams, w: Weights) -> Tensor:
    """Rows (n, n_embd_text) that are not of patches: the end of a line, then the begin and the end
    of an image, where the projector has those; of CogVLM these two alone; with SAM the end of a line
    and of an overview."""
    if p.sam:
        line, view = (_row(w, f"v.{name}") for name in ("image_newline", "view_seperator"))
        return add(pad_rows(line, before=0, after=1), pad_rows(view, before=1, after=0))
    if p.projector.enclosed:
        return add(pad_rows(_row(w, "v.boi"), before=0, after=1), pad_rows(_row(w, "v.eoi"), before=1, after=0))
    if not p.projector.framed:
        return _row(w, "v.token_embd.img_break")
    line = w.linear("mm.model.fc", _row(w, "v.image_newline"))
    rows = pad_rows(line, before=0, after=2)
    for i, name in enumerate(("mm.image_begin", "mm.image_end")):
        rows = add(rows, pad_rows(_row(w, name), before=1 + i, after=1 - i))
    return rms_norm(rows, w["mm.post_norm"], eps=p.eps)


def _row(w: Weights, name: str) -> Tensor:
    return broadcast_to(w.tensors[name], shape=(1, *w.tensors[name].shape))


_HEADS: dict[Head, Callable[[VisionParams, Weights, Tensor], Tensor]] = {
    Head.MLP: _mlp,
    Head.JANUS: lambda p, w, x: w.linear("mm.1", activated(p, w.linear("mm.0", x))),
    Head.LDP: ldp,
    Head.LDP_V2: ldp_v2,
    Head.POOL_NORM: _pool_norm,
    Head.NORM_LINEAR: lambda p, w, x: w.linear("mm.input_projection", rms_norm(x, const(1.0), eps=p.eps)),
    Head.POOL_STANDARDIZE: _pool_standardize,
    Head.MERGE_LINEAR: lambda p, w, x: w.linear("mm.model.fc", _merged(p, x)),
    Head.MERGE_MLP: lambda p, w, x: _mlp(p, w, normed(p, w, "mm.input_norm", _merged(p, x), NORM_EPS)),
    Head.NORM_MERGE_MLP: _norm_merge_mlp,
    Head.MERGE_NORM_MLP: lambda p, w, x: _mlp(p, w, normed(p, w, "mm.model.mlp.0", _merged(p, x), NORM_EPS)),
    Head.CONVOLUTIONS: _convolutions,
    Head.ADAPTER: _adapter,
    Head.EXPERT: _expert,
    Head.GATED_MERGER: _gated_merger,
    Head.MERGER: lambda p, w, x: _mlp(p, w, _merged(p, x)),
    Head.PATCH_MERGER: _patch_merger,
}
