"""Flags of which device has which part of a model, and what they mean together."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, Flag, addresses, device_list, whole

if TYPE_CHECKING:
    from logitless.engine.runner.placement import PlacementOptions


ALL = 2**31 - 1
EXPERTS = r"\.ffn_(gate|up|down)_exps\."  # weights of mixtures of experts


def layers(value: str) -> int | str:
    """A number of layers, or "auto"."""
    if value.lower() in ("auto", "-1"):
        return "auto"
    if value.lower() in ("all", "-2"):
        return ALL
    try:
        return whole(0)(value)
    except ValueError:
        raise ValueError("is not a number of layers, auto or all") from None


def n_layers(value: int | str) -> int | None:
    """What `PlacementOptions` calls it."""
    return value if isinstance(value, int) else None


def shares(value: str) -> tuple[float, ...]:
    """Numbers separated by `,` or `/`, at least one of them above 0."""
    try:
        found = tuple(float(part) for part in re.split("[,/]", value))
    except ValueError:
        found = ()
    if not found or not all(0 <= x < 1e30 for x in found) or not sum(found):
        raise ValueError("is not a list of numbers of at least 0, such as 3,1, that has one above 0")
    return found


def split_mode(value: str) -> str:
    """How a model is divided between devices."""
    if value.lower() in ("row", "tensor"):
        raise ValueError("is not supported: a layer is on one device; none and layer are")
    if value.lower() not in ("none", "layer"):
        raise ValueError("is not one of none, layer")
    return value.lower()


def overrides(value: str) -> list[tuple[str, str]]:
    """`PATTERN=DEVICE,...` as pairs."""
    found = []
    for rule in value.split(","):
        pattern, _, device = rule.partition("=")
        if not pattern or not device:
            raise ValueError(f"is not a list of PATTERN=DEVICE: {rule!r}")
        try:
            re.compile(pattern)
            found.append((pattern, device_list(device)))
        except re.error as error:
            raise ValueError(f"has a pattern that is none, {pattern!r}: {error}") from None
        except ValueError as error:
            raise ValueError(f"is not a list of PATTERN=DEVICE: {device!r} {error}") from None
    return found


PLACEMENT = (
    Flag(
        "--rpc",
        "devices of other machines, where `logitless rpc-server` runs; they come after --device's own, before the CPU",
        addresses,
        None,
        "HOST:PORT,...",
        env="LLAMA_ARG_RPC",
        many=True,
    ),
    Flag(
        "-ngl --gpu-layers --n-gpu-layers",
        "how many layers the devices of --device have, counted from the output, which is one; the CPU has the rest; "
        "auto: as many as fit into their memory; all",
        layers,
        "auto",
        "N",
        env="LLAMA_ARG_N_GPU_LAYERS",
    ),
    Flag(
        "-sm --split-mode",
        "none: the model is on one device; layer: its layers are divided between all of --device; without it the "
        "first has what fits, then the second",
        split_mode,
        None,
        "MODE",
        env="LLAMA_ARG_SPLIT_MODE",
    ),
    Flag(
        "-ts --tensor-split",
        "divide the layers between the devices in this proportion, such as 3,1 (by default: their memory's)",
        shares,
        None,
        "LIST",
        env="LLAMA_ARG_TENSOR_SPLIT",
    ),
    Flag(
        "-mg --main-gpu",
        "which of --device comes first, counted from 0; with --split-mode layer it changes nothing",
        whole(0, 255),
        0,
        env="LLAMA_ARG_MAIN_GPU",
    ),
    Flag(
        "-ot --override-tensor",
        "weights in whose names a pattern is found live on its device, and their ops run there; may be given again",
        overrides,
        None,
        "PATTERN=DEVICE,...",
        env="LLAMA_ARG_OVERRIDE_TENSOR",
        many=True,
    ),
    Flag(
        "-cmoe --cpu-moe",
        "the weights of experts live on the CPU: most of such a model, of which each token reads little",
        default=False,
        env="LLAMA_ARG_CPU_MOE",
    ),
    Flag(
        "-ncmoe --n-cpu-moe",
        "the same for the first N layers",
        whole(0),
        0,
        env="LLAMA_ARG_N_CPU_MOE",
    ),
)


def placement(options: SimpleNamespace) -> tuple[tuple[str, ...], PlacementOptions]:
    """The devices to open, in order of preference, and who has which layers."""
    from logitless.engine.runner.placement import PlacementOptions

    local = options.device.split(",")
    remote = [f"rpc:{address}" for address in options.rpc]
    at = local.index("cpu") if "cpu" in local else len(local)
    names = list(dict.fromkeys([*local[:at], *remote, *local[at:]]))
    others = [name for name in names if name != "cpu"]
    mode, split, main = options.split_mode, options.tensor_split, options.main_gpu
    if not others and options.gpu_layers not in ("auto", 0):
        print("logitless: warning: --gpu-layers: --device names the CPU only, which has all layers", file=sys.stderr)
    if main >= max(len(others), 1):
        raise CliError(f"--main-gpu {main}: {_beside_cpu(len(others))}, and they count from 0")
    if split and len(split) > max(len(others), 1):
        raise CliError(f"--tensor-split: {len(split)} numbers, and {_beside_cpu(len(others))}")
    if others and mode != "layer":
        first = others[main]
        names = [first] if mode == "none" else [first, *(n for n in names if n != first)] if main else names
    for pattern, device in options.override_tensor:
        if device != "cpu" and device not in names:
            raise CliError(f"--override-tensor {pattern}={device}: --device does not name {device}")
    divides = mode == "layer" or (mode is None and split is not None)
    return tuple(names), PlacementOptions(
        n_gpu_layers=n_layers(options.gpu_layers),
        split=divides and len(others) > 1,
        shares=split if divides and split else (),
        overrides=(*options.override_tensor, *_experts(options)),
    )


def _experts(options: SimpleNamespace) -> list[tuple[str, str]]:
    """`--cpu-moe` and `--n-cpu-moe` as overrides."""
    from logitless.models.hparams.hparams import MAX_LAYERS

    if options.cpu_moe:
        return [(EXPERTS, "cpu")]
    layers = "|".join(map(str, range(min(options.n_cpu_moe, MAX_LAYERS))))
    return [(rf"blk\.({layers}){EXPERTS}", "cpu")] if layers else []


def _beside_cpu(n: int) -> str:
    return f"--device names {n} device{'s' * (n != 1)} beside the CPU"
