"""Layer placement from the options: the devices to open, and the layers and tensors of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from logitless.engine.loading.options import ModelOptions, OptionConflict
from logitless.engine.runner.placement import PlacementOptions
from logitless.models.hparams.keys import MAX_LAYERS
from logitless.models.weights.placement import EXPERTS

log = logging.getLogger("logitless.loading")
DENSE = r"\.ffn_(gate|up|down)\."  # tensor names of dense feed-forward blocks


def placement(options: ModelOptions) -> tuple[tuple[str, ...], PlacementOptions]:
    """Devices to open, in order of preference, and the placement of layers on them."""
    local = options.device.split(",")
    remote = [f"rpc:{address}" for address in options.rpc]
    at = local.index("cpu") if "cpu" in local else len(local)
    names = list(dict.fromkeys([*local[:at], *remote, *local[at:]]))
    others = [name for name in names if name != "cpu"]
    if options.moe_cache_mib and (far := [name for name in names if name.startswith("rpc:")]):
        raise OptionConflict(
            f"--moe-cache-mib: only devices of this machine cache experts, {far[0]} does not; without it, --cpu-moe "
            "leaves experts to the CPU"
        )
    mode, split, main = options.split_mode, options.tensor_split, options.main_gpu
    if not others and options.gpu_layers not in ("auto", 0):
        log.warning("--gpu-layers: no device is used beside the CPU, which has all layers")
    if not others and (main or split):
        log.warning("--main-gpu, --tensor-split: no device is used beside the CPU, which has all layers")
        main, split = 0, None
    if main >= max(len(others), 1):
        raise OptionConflict(f"--main-gpu {main}: {_beside_cpu(len(others))}, and they count from 0")
    if split and len(split) > max(len(others), 1):
        raise OptionConflict(f"--tensor-split: {len(split)} numbers, and {_beside_cpu(len(others))}")
    if others and mode != "layer":
        first = others[main]
        names = [first] if mode == "none" else [first, *(n for n in names if n != first)] if main else names
    if others and not options.kv_offload:
        raise OptionConflict(
            "--no-kv-offload: the KV cache of a layer is on its device; --gpu-layers N leaves the first ones on the CPU"
        )
    check_rules("--override-tensor", options.override_tensor, names)
    if options.mmproj_device not in (None, "cpu", *names):
        raise OptionConflict(f"--mmproj-device {options.mmproj_device}: --device does not name it")
    divides = mode == "layer" or (mode is None and split is not None)
    return tuple(names), PlacementOptions(
        n_gpu_layers=n_layers(options.gpu_layers),
        split=divides and len(others) > 1,
        divide=mode if mode in ("row", "tensor") else "",
        shares=tuple(split) if split and mode != "none" else (),
        spare=options.fit_target,
        expert_cache=options.moe_cache_mib << 20,
        overrides=(
            *options.override_tensor,
            *on_cpu(EXPERTS, MAX_LAYERS if options.cpu_moe else options.n_cpu_moe),
            *on_cpu(DENSE, options.n_cpu_ffn),
        ),
    )


def draft_placement(options: ModelOptions, devices: tuple[str, ...]) -> PlacementOptions:
    """Placement of the draft model's layers on its devices."""
    check_rules("--override-tensor-draft", options.override_tensor_draft, devices)
    experts = on_cpu(EXPERTS, MAX_LAYERS if options.cpu_moe_draft else options.n_cpu_moe_draft)
    return PlacementOptions(
        n_layers(options.gpu_layers_draft),
        overrides=(*options.override_tensor_draft, *experts),
        spare=options.fit_target,
    )


def check_rules(flag: str, rules: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    """OptionConflict: a rule puts weights on a device that is not opened."""
    for pattern, device in rules:
        if device != "cpu" and device not in names:
            where = "--device" if flag == "--override-tensor" else "--device-draft"
            raise OptionConflict(f"{flag} {pattern}={device}: {where} does not name {device}")


def n_layers(value: int | str) -> int | None:
    """The number of layers, None for "auto"."""
    return value if isinstance(value, int) else None


def on_cpu(names: str, n: int) -> list[tuple[str, str]]:
    """Weights of these names in the first n layers, as tensor overrides."""
    if n >= MAX_LAYERS:
        return [(names, "cpu")]
    layers = "|".join(map(str, range(n)))
    return [(rf"blk\.({layers}){names}", "cpu")] if layers else []


def _beside_cpu(n: int) -> str:
    return f"--device names {n} device{'s' * (n != 1)} beside the CPU"
