"""Warm-up: compiles a model's kernels before the first request.

`begin` starts with the kernels that every model needs, slowest first. `prepare` continues with
those of a model's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from logitless.backends.cpu.compiler import jit
from logitless.backends.cpu.fusion.packing import packed
from logitless.backends.cpu.kernels.matmul.layout import tiles
from logitless.backends.cpu.lowering.cache_bypass import exceed_l3, nontemporal_variant
from logitless.backends.cpu.lowering.linear import PLAIN_TILE_ROWS
from logitless.backends.cpu.lowering.registry import LOWERINGS
from logitless.backends.host import isa
from logitless.graph.ops.sampling.samplers import LAYOUT
from logitless.graph.tensor import Tensor

GENERAL = (f"sample:{LAYOUT}", "step", "worker", "rms_norm", "rope_angles", "copy_pages", f"log_probs:{LAYOUT}")


def begin() -> None:
    """Start compiling the general kernels that the cache lacks; return at once."""
    jit.prefetch(GENERAL)


# Kernels of a training step of any architecture, slowest first. Serving alone compiles none.
TRAINING = (
    "causal_attention_back",
    "range_attention",
    *(f"gemm:{layouts}" for layouts in ("tiles:n", "tiles:k", "k:k", "m:n", "m:k")),
    *(
        "pack_tiles:m",
        "pack_tiles:k",
        "skinny_gemm:n",
        "skinny_gemm:k",
        "skinny_split_k",
        "cross_entropy_back",
        "cross_entropy",
        "rms_norm",
        "rms_norm_plain",
        "rms_norm_back",
        "sum_to",
    ),
    *("adamw_step", "sgd_step", "square_sums", "norm_of_sums", "clear", "add_rows", "add_rows_to"),
    *(f"{kind}:{name}" for kind in ("binary", "broadcast") for name in ("add", "mul")),
    *("broadcast:copy", "get_rows:rows", "rope_angles", "rope:interleaved", "rope:halves"),
    *(f"map:{name}" for name in ("clip_factor", "scale", "softcap", "silu", "gelu", "silu_back", "gelu_back")),
    *("map:glu:silu", "map:glu:gelu"),
)


def begin_training(frozen: Iterable[str] = ()) -> None:
    """Start compiling the kernels that training needs and the cache lacks; return at once.

    `frozen`: dtypes of the weights that are not trained."""
    back = (f"gemm:{layout}:k:{dtype}" for dtype in dict.fromkeys(frozen) for layout in ("tiles", "m"))
    jit.prefetch((*TRAINING, *back))


def prepare(nodes: Iterable[Tensor]) -> None:
    """Load every kernel that a graph with these nodes runs, for any number of rows."""
    nodes = list(nodes)
    if names := [name for t in nodes for name in _kernels(t)]:
        if exceed_l3(nodes):
            names += [nontemporal_variant(name) for name in names]
        jit.load((*GENERAL, *names))


def _linears(dtype: str, *how: str) -> Iterator[str]:
    """GEMM kernels with weights of a dtype, for any number of rows."""
    return (":".join(["linear", dtype, f"{rows}x{groups}", *how]) for rows, groups in tiles(dtype, isa()))


def _kernels(t: Tensor) -> Iterator[str]:
    yield from (f"pack:{s.dtype}" for s in t.src if packed(s))
    rule = LOWERINGS.get(t.op)
    for task in (rule(t, lambda _: 0) if rule else None) or ():
        family, *params = task.kernel.split(":")
        if family == "linear":
            if params[2:] == ["add"]:
                yield from (task.kernel, "binary:add")
            yield from _linears(params[0], *(how for how in params[2:] if how == "bf16"))
        elif family == "gemm" and params[1] == "n" and len(params) > 2:
            yield from (task.kernel, "round_act:k" if params[3:] else "pack_act")
            yield from _linears(*params[2:])
        elif family == "linear_glu":
            both = f"linear_glu:{params[0]}:{params[1]}"
            yield from (both, f"{both}:1", f"glu_act:{params[1]}:32", *_linears(params[0]))
        elif family == "glu_act" and t.src[0].op == "linear_q8" and t.attrs["group"] == 32:
            yield from (task.kernel, f"linear_glu:{t.src[0].src[1].dtype}:{params[0]}:1")
        elif family == "attention":
            sizes = ":".join(params[2:4])
            yield f"attention_join:{':'.join(params[2:])}"
            if params[4:] == ["act"]:  # a prefill
                yield from (f"attention:{':'.join(params[:4])}", f"attention_join:{sizes}", "quantize_act:32")
            yield task.kernel
        elif family == "rms_norm_act":
            yield from (task.kernel, "rms_norm", f"quantize_act:{params[0]}")
        elif family == "linear_rows":
            yield from (f"linear_rows:{rows}" for rows in (1, PLAIN_TILE_ROWS))
        else:
            yield task.kernel
