"""Layer placement from the options: the devices to open, and the layers and tensors of each."""

from __future__ import annotations

import logging

from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.runner.placement import PlacementOptions
from logitless.models.hparams.hparams import MAX_LAYERS

log = logging.getLogger("logitless.loading")
EXPERTS = r"\.ffn_(gate|up|down)_exps\."  # tensor names of expert weights


def placement(options: ModelOptions) -> tuple[tuple[str, ...], PlacementOptions]:
    """Devices to open, in order of preference, and the placement of layers on them."""
    local = options.device.split(",")
    remote = [f"rpc:{address}" for address in options.rpc]
    at = local.index("cpu") if "cpu" in local else len(local)
    names = list(dict.fromkeys([*local[:at], *remote, *local[at:]]))
    others = [name for name in names if name != "cpu"]
    mode, split, main = options.split_mode, options.tensor_split, options.main_gpu
    if not others and options.gpu_layers not in ("auto", 0):
        log.warning("--gpu-layers: --device names the CPU only, which has all layers")
    if main >= max(len(others), 1):
        raise OptionConflict(f"--main-gpu {main}: {_beside_cpu(len(others))}, and they count from 0")
    if split and len(split) > max(len(others), 1):
        raise OptionConflict(f"--tensor-split: {len(split)} numbers, and {_beside_cpu(len(others))}")
    if others and mode != "layer":
        first = others[main]
        names = [first] if mode == "none" else [first, *(n for n in names if n != first)] if main else names
    for pattern, device in options.override_tensor:
        if device != "cpu" and device not in names:
            raise OptionConflict(f"--override-tensor {pattern}={device}: --device does not name {device}")
    divides = mode == "layer" or (mode is None and split is not None)
    return tuple(names), PlacementOptions(
        n_gpu_layers=n_layers(options.gpu_layers),
        split=divides and len(others) > 1,
        shares=tuple(split) if divides and split else (),
        overrides=(*options.override_tensor, *_experts(options)),
    )


def n_layers(value: int | str) -> int | None:
    """The number of layers, None for "auto"."""
    return value if isinstance(value, int) else None


def _experts(options: ModelOptions) -> list[tuple[str, str]]:
    """`--cpu-moe` and `--n-cpu-moe` as tensor overrides."""
    if options.cpu_moe:
        return [(EXPERTS, "cpu")]
    layers = "|".join(map(str, range(min(options.n_cpu_moe, MAX_LAYERS))))
    return [(rf"blk\.({layers}){EXPERTS}", "cpu")] if layers else []


def _beside_cpu(n: int) -> str:
    return f"--device names {n} device{'s' * (n != 1)} beside the CPU"
