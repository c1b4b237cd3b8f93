"""What each layer is given of the tokens besides: an embedding of its own (Gemma 3n, Gemma 4: E2B and E4B)."""

from __future__ import annotations

from logitless.graph.ops.elementwise import add, gelu, mul, scaled
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.norm import rms_norm
from logitless.graph.ops.shape import reshape
from logitless.graph.ops.slicing import take_columns
from logitless.graph.tensor import Tensor
from logitless.models.hparams.hparams import Hparams
from logitless.models.weights.weights import Weights


def layer_inputs(w: Weights, h: Hparams, tokens: Tensor, x: Tensor) -> Tensor:
    """(T, n_layer · P), P: `n_embd_per_layer`. Half is a table's, half a projection of the embeddings x (T, n_embd)."""
    n = h.n_embd_per_layer
    own = scaled(get_rows(w["per_layer_token_embd"], tokens), n**0.5)
    projected = scaled(w.linear("per_layer_model_proj", x), h.n_embd**-0.5)
    normed = rms_norm(reshape(projected, shape=(-1, n)), w["per_layer_proj_norm"], eps=h.eps)
    return scaled(add(reshape(normed, shape=own.shape), own), 0.5**0.5)


def layer_input(b: Weights, h: Hparams, layer: int, inputs: Tensor, x: Tensor) -> Tensor:
    """(T, n_embd): what a layer makes of its input, gated by x (T, n_embd), to be added."""
    n = h.n_embd_per_layer
    own = take_columns(inputs, layer * n, n)
    return b.norm("post_norm", b.linear("proj", mul(gelu(b.linear("inp_gate", x)), own)), h)
