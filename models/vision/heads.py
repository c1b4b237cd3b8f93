"""Projectors: patch vectors of the encoder → rows of the text model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from logitless.graph.ops.attention.encoder_attention import mean_rows
from logitless.graph.ops.elementwise import add, broadcast_to, gelu, mul, scale, silu, sub
from logitless.graph.ops.linear import linear
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.pointwise import sigmoid
from logitless.graph.ops.shape import pad_rows, reshape
from logitless.graph.ops.slicing import transpose
from logitless.graph.tensor import Tensor, const, feed
from logitless.models.architectures.architecture import Activation
from logitless.models.media.projector_weights import ProjectorWeights
from logitless.models.vision.ldp import ldp, ldp_feeds, ldp_v2
from logitless.models.vision.params import VisionParams
from logitless.models.vision.patches import Array
from logitless.models.vision.projectors import Head

NORM_EPS = 1e-5  # of projectors whose norm is torch's default
BLOCK_NORMS = ("ln1", "ln2")  # that each layer has


def project(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    """Rows of the text model from patch vectors x (T, n_embd)."""
    return _HEADS[p.projector.head](p, w, x)


def project_feeds(p: VisionParams, places: Array, n: int) -> dict[str, Array]:
    """Inputs of `project` for n tiles whose patches have these (row, column) places."""
    head, feeds = p.projector.head, {}
    if head in (Head.POOL_NORM, Head.POOL_STANDARDIZE, Head.LDP_V2):
        feeds["patch.first"] = np.arange(0, n * len(places), p.merge**2, dtype=np.int32)
        feeds["patch.pooled"] = np.full(n * len(places) // p.merge**2, p.merge**2, np.int32)
    return feeds | (ldp_feeds(p, places, n) if head in (Head.LDP, Head.LDP_V2) else {})


def normed(
    p: VisionParams, w: ProjectorWeights, name: str, x: Tensor, eps: float = 0.0, *, required: bool = False
) -> Tensor:
    """Norm of x (T, n); x itself where the file need not have one of that name, and has none."""
    if not required and name not in (*BLOCK_NORMS, *p.projector.norms) and name not in w:
        return x
    if not p.projector.rms_norm:
        return w.layer_norm(name, x, eps or p.eps, needs_bias=False)
    y, bias = w.rms_norm(name, x, eps or p.eps), w.optional(f"{name}.bias", x.shape[-1])
    return y if bias is None else add(y, bias)


def activated(p: VisionParams, x: Tensor) -> Tensor:
    """The activation of the encoder's MLPs."""
    if p.activation is None:  # GELU's approximation by a sigmoid, CLIP's
        return mul(x, sigmoid(scale(x, factor=1.702)))
    return gelu(x) if p.activation is Activation.GELU else silu(x)


def _mlp(w: ProjectorWeights, x: Tensor, first: str = "mm.0", second: str = "mm.2", n_out: int = 0) -> Tensor:
    """Two matrices with GELU between them, the second of the text model's width unless `n_out` says another."""
    return w.linear(second, gelu(w.linear(first, x)), n_out or w.n_text)


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


def _pool_norm(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = w.rms_norm("mm.soft_emb_norm", _pooled(p, x), p.eps)
    return linear(x, w.transposed("mm.input_projection.weight", w.n_text, p.n_embd))


def _pool_standardize(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = scale(_pooled(p, x), factor=p.n_embd**0.5)
    shift, factor = (w.optional(f"v.std_{name}", p.n_embd) for name in ("bias", "scale"))
    if shift is not None and factor is not None:
        x = mul(sub(x, shift), factor)
    return _norm_linear(p, w, x)


def _norm_linear(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    return w.linear("mm.input_projection", rms_norm(x, const(1.0), eps=p.eps), w.n_text)


def _norm_merge_mlp(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    return _mlp(w, _merged(p, normed(p, w, "mm.input_norm", x, NORM_EPS, required=True)), "mm.1")


def _merge_norm_mlp(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = normed(p, w, "mm.model.mlp.0", _merged(p, x), NORM_EPS, required=True)
    return _mlp(w, x, "mm.model.mlp.1", "mm.model.mlp.3")


def _adapter(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    second = "mm.model.mlp.2"
    x = _mlp(w, _merged(p, x), "mm.model.mlp.1", second, w.shape(f"{second}.weight")[0])
    return w.linear("mm.model.fc", gelu(x), w.n_text)


def _patch_merger(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    if "mm.patch_merger" in w:
        x = normed(p, w, "mm.input_norm", x, required=True)
        x = w.linear("mm.patch_merger", _elements_first(p, x), p.n_embd)
    return _mlp(w, x, "mm.1")


def _convolutions(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = _elements_first(p, w.rms_norm("mm.pre_norm", x, p.eps))
    x = w.linear("mm.2", gelu(w.linear("mm.0", x, 0, (p.merge, p.merge))), 0, (1, 1))
    return w.rms_norm("mm.post_norm", w.linear("mm.model.fc", x, w.n_text), p.eps)


def _gated_merger(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = w.linear("mm.patch_merger", _elements_first(p, x), w.n_text, (p.merge, p.merge))
    x = w.layer_norm("mm.post_norm", w.linear("mm.model.fc", x, w.n_text), NORM_EPS, needs_bias=False)
    return _gated_mlp(w, gelu(x))


def _expert(p: VisionParams, w: ProjectorWeights, x: Tensor) -> Tensor:
    x = normed(p, w, "mm.post_fc_norm", w.linear("mm.model.fc", x), NORM_EPS, required=True)
    return _gated_mlp(w, gelu(x))


def _gated_mlp(w: ProjectorWeights, x: Tensor) -> Tensor:
    up = w.linear("mm.up", x)
    return w.linear("mm.down", mul(silu(w.linear("mm.gate", x, up.shape[1])), up), w.n_text)


def extra_rows(p: VisionParams, w: ProjectorWeights) -> list[Tensor]:
    """Rows (n, n_text) that are not of patches, if images have some: the end of a line, then the begin and the end
    of an image, where the projector has those; of CogVLM these two alone; with SAM the end of a line
    and of an overview."""
    if p.sam or p.projector.enclosed:
        names = ("v.image_newline", "v.view_seperator") if p.sam else ("v.boi", "v.eoi")
        first, last = (as_row(w.read(name, w.n_text)) for name in names)
        return [add(pad_rows(first, before=0, after=1), pad_rows(last, before=1, after=0))]
    if p.breaks:
        return [as_row(w.read("v.token_embd.img_break", w.n_text))]
    if not p.projector.framed:
        return []
    line = w.read("v.image_newline", w.shape("mm.2.weight")[0])
    rows = pad_rows(w.linear("mm.model.fc", as_row(line), w.n_text), before=0, after=2)
    for i, name in enumerate(("mm.image_begin", "mm.image_end")):
        rows = add(rows, pad_rows(as_row(w.read(name, w.n_text)), before=1 + i, after=1 - i))
    return [w.rms_norm("mm.post_norm", rows, p.eps)]


def as_row(x: Tensor) -> Tensor:
    """The vector x (n,) as a row (1, n)."""
    return broadcast_to(x, shape=(1, *x.shape))


_HEADS: dict[Head, Callable[[VisionParams, ProjectorWeights, Tensor], Tensor]] = {
    Head.MLP: lambda p, w, x: _mlp(w, x),
    Head.JANUS: lambda p, w, x: w.linear("mm.1", activated(p, w.linear("mm.0", x)), w.n_text),
    Head.LDP: ldp,
    Head.LDP_V2: ldp_v2,
    Head.POOL_NORM: _pool_norm,
    Head.NORM_LINEAR: _norm_linear,
    Head.POOL_STANDARDIZE: _pool_standardize,
    Head.MERGE_LINEAR: lambda p, w, x: w.linear("mm.model.fc", _merged(p, x), w.n_text),
    Head.MERGE_MLP: lambda p, w, x: _mlp(w, normed(p, w, "mm.input_norm", _merged(p, x), NORM_EPS), "mm.1"),
    Head.NORM_MERGE_MLP: _norm_merge_mlp,
    Head.MERGE_NORM_MLP: _merge_norm_mlp,
    Head.CONVOLUTIONS: _convolutions,
    Head.ADAPTER: _adapter,
    Head.EXPERT: _expert,
    Head.GATED_MERGER: _gated_merger,
    Head.MERGER: lambda p, w, x: _mlp(w, _merged(p, x)),
    Head.PATCH_MERGER: _patch_merger,
}
