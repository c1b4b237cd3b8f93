"""Layer placement: llama-server's flags, and devices' memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from logitless.cli.flags.flags import UsageError, parse
from logitless.cli.flags.options import PLACE
from logitless.cli.setup.model import model_options
from logitless.engine.loading.options import OptionConflict, OptionError
from logitless.engine.loading.placement import placement
from logitless.engine.runner.placement import ANYWHERE, PlacedDevice, PlacementOptions, chosen, fit, room, usable
from logitless.graph.ops.gather import get_rows
from logitless.graph.ops.linear import linear
from logitless.graph.tensor import feed, variable
from logitless.models.weights.placement import EXPERTS, Places, places, proportional
from tests.helpers.numpy_backend import NumpyBackend

N_LAYER = 6
GPU, OTHER, CPU = 0, 1, 2
TWO = [PlacedDevice(0, "opencl:0", 1.0), PlacedDevice(1, "vulkan:0", 3.0), PlacedDevice(2, "cpu", 0.0)]


def slots(options: PlacementOptions, fits: Callable[[Places | None], bool] = lambda _: True) -> tuple[int, ...]:
    found = chosen(options, TWO, N_LAYER, fits)
    assert found is not None
    assert found.first == found.slots[0]
    return found.slots


@pytest.mark.parametrize(
    ("n", "shares", "counts"),
    [
        (8, (1, 1), [4, 4]),
        (8, (3, 1), [6, 2]),
        (7, (1, 1), [4, 3]),  # slot 3 of 7 is at 0.43, before the middle
        (31, (0, 5), [0, 31]),
        (5, (1, 2, 1), [2, 2, 1]),  # 0, 0.2 | 0.4, 0.6 | 0.8
        (0, (1, 1), [0, 0]),
    ],
)
def test_a_split_is_the_first_slots_share_by_share(n: int, shares: tuple[float, ...], counts: list[int]) -> None:
    """llama.cpp: a slot goes to the first device whose share, with those before, ends behind the slot's own part."""
    assert proportional(n, shares) == counts


def test_layers_are_counted_from_the_output() -> None:
    assert slots(PlacementOptions(1)) == (CPU,) * 6 + (GPU,)
    assert slots(PlacementOptions(3)) == (CPU,) * 4 + (GPU,) * 3
    assert slots(PlacementOptions(7)) == slots(PlacementOptions(99)) == (GPU,) * 7
    assert slots(PlacementOptions(0)) == (CPU,) * 7


def test_a_split_is_of_the_layers_that_are_not_the_cpus() -> None:
    assert slots(PlacementOptions(4, split=True)) == (CPU,) * 3 + (GPU,) + (OTHER,) * 3
    assert slots(PlacementOptions(split=True), lambda p: p is not None and p.slots.count(OTHER) < 4) == (
        CPU,
        CPU,
        GPU,
        GPU,
        OTHER,
        OTHER,
        OTHER,
    )


def test_devices_are_filled_in_order() -> None:
    def fits(p: Places | None) -> bool:
        return p is not None and p.slots.count(GPU) <= 2 and p.slots.count(OTHER) <= 3

    assert slots(ANYWHERE, fits) == (CPU, CPU, GPU, GPU, OTHER, OTHER, OTHER)
    assert slots(ANYWHERE, lambda p: p is not None and p.slots.count(GPU) <= 4) == (GPU,) * 4 + (OTHER,) * 3
    assert slots(ANYWHERE, lambda p: p is not None and not {GPU, OTHER} & set(p.slots)) == (CPU,) * 7
    assert chosen(ANYWHERE, TWO, N_LAYER, lambda _: True) is None  # nothing needs to be said


def test_the_vision_encoder_is_on_the_first_device_or_the_cpu() -> None:
    for n in (None, 0, 3):
        found = chosen(PlacementOptions(n), TWO, N_LAYER, lambda p: p is not None)
        assert found is not None
        assert found.encoder == GPU
        found = chosen(PlacementOptions(n), TWO, N_LAYER, lambda _: True, encoder_device="cpu")
        assert found is not None
        assert (found.encoder, found.slots.count(CPU)) == (CPU, 7 - (n if n is not None else 7))
    assert chosen(ANYWHERE, TWO[2:], N_LAYER, lambda _: True, encoder_device="cpu") is None  # there is no other


def test_the_cpu_first_or_alone_has_everything() -> None:
    for devices in ([PlacedDevice(0, "cpu", 0.0)], [PlacedDevice(0, "cpu", 0.0), PlacedDevice(1, "opencl:0", 1.0)]):
        assert chosen(ANYWHERE, devices, N_LAYER, lambda _: False) is None
    assert chosen(PlacementOptions(5), devices[:1], N_LAYER, lambda _: True) is None
    found = chosen(PlacementOptions(overrides=(("ffn", "opencl:0"),)), devices, N_LAYER, lambda _: True)
    assert found is not None
    assert (set(found.slots), found.overrides[0][1]) == ({0}, 1)


def test_layers_of_lost_device_go_to_others() -> None:
    options = PlacementOptions(None, split=True, shares=(3, 1), overrides=(("ffn", "opencl:0"),))
    backends = [NumpyBackend("vulkan:0"), NumpyBackend("cpu")]
    left = options.devices(("opencl:0", "vulkan:0"), ("vulkan:0", "cpu"), backends)
    assert [d.share for d in left] == [1, 0]
    found = chosen(options, left, N_LAYER, lambda _: True)
    assert found == places(N_LAYER, [7], [0], 1)


def test_shares_are_the_devices_memory_where_none_are_given() -> None:
    backends = [NumpyBackend("opencl:0"), NumpyBackend("vulkan:0"), NumpyBackend("cpu")]
    backends[0].memory_bytes = 1 << 30
    backends[1].memory_bytes = 3 << 30
    found = ANYWHERE.devices(("opencl:0", "vulkan:0"), ("opencl:0", "vulkan:0", "cpu"), backends)
    assert proportional(4, [d.share for d in found[:2]]) == [1, 3]


def test_a_weight_lives_where_its_layer_does() -> None:
    p = replace(places(2, [2], [7], 9), encoder=5)  # of layer 0, layer 1, output
    x, ids, matrix = feed("x", (1, 4)), feed("ids", (1,), "i32"), variable("token_embd.weight", (5, 4), constant=True)
    assert p(get_rows(matrix, ids), matrix) == (9, 9)
    assert p(linear(x, matrix), matrix) == (7, 7)  # the same matrix as the output's
    for name, at in {
        "blk.0.attn_q.weight": 9,
        "blk.1.ffn_down.bias": 7,
        "k.0": 9,
        "v.1": 7,
        "conv.1": 7,
        "recurrent.0": 9,
        "output_norm.weight": 7,
        "output.weight": 7,
        "sampler_state": 7,
        "rope.frequency": 9,
        "weights.3.blk.1.attn_output.weight": 7,
        "lora.2.blk.1.attn_q.weight.a": 7,
        "adamw.m.blk.0.attn_q.weight": 9,
        "v.blk.17.attn_q.weight": 5,
        "mm.2.bias": 5,
        "vision.pixel.scale": 5,
    }.items():
        s = variable(name, (4,))
        assert p(feed("node", ()), s) == (at, at), name


def test_an_override_moves_weights_and_not_their_layer() -> None:
    rules = ((re.compile(r"ffn_(up|down)"), 3), (re.compile("^blk.1"), 4))
    p = Places(0, (0, 0, 0), rules)
    node = feed("node", ())
    assert p(node, variable("blk.1.ffn_up.weight", (4,))) == (3, 0)
    assert p(node, variable("lora.2.blk.1.attn_q.weight.b", (4,))) == (4, 0)
    assert p(node, variable("k.1", (4,))) == (0, 0)


def test_experts_on_the_host_are_cached_where_their_whole_layer_s_are() -> None:
    """And on no device that has them, nor the CPU's layers, nor a layer of which some are elsewhere."""
    rules = ((re.compile(r"blk\.3\.ffn_up_exps"), GPU), (re.compile(EXPERTS), CPU))
    kinds = ("gate", "up", "down")
    experts = {i: [f"blk.{i}.ffn_{kind}_exps.weight" for kind in kinds] for i in range(N_LAYER)}
    p = Places(GPU, (CPU, GPU, GPU, GPU, OTHER, GPU, GPU), rules).with_cache(experts, CPU)
    assert p.cached == {1, 2, 4, 5}
    node = feed("node", ())
    for name, at in {
        "blk.1.ffn_up_exps.weight": GPU,
        "blk.1.ffn_up_exps.bias": GPU,
        "lora.2.blk.1.ffn_up_exps.weight.a": GPU,
        "blk.4.ffn_down_exps.weight": OTHER,
        "blk.0.ffn_up_exps.weight": CPU,
        "blk.3.ffn_down_exps.weight": CPU,
        "weights.1.blk.1.ffn_up_exps.weight": CPU,  # a fine-tune's own
    }.items():
        assert p(node, variable(name, (4,)))[0] == at, name


def test_cache_without_rules_for_experts_puts_all_on_the_host_where_the_model_does_not_fit() -> None:
    options = PlacementOptions(expert_cache=1 << 20)
    assert options.with_experts(lambda: True) == ANYWHERE
    rules = ((EXPERTS, "cpu"),)
    assert options.with_experts(lambda: False) == replace(options, overrides=rules)
    layers = replace(options, n_gpu_layers=99)
    assert layers.with_experts(lambda: True) == replace(layers, overrides=rules)
    for given in (replace(options, overrides=((r"blk\.0\.ffn_up_exps", "cpu"),)), ANYWHERE):
        assert given.with_experts(lambda: False) == given


def flags(*words: str) -> tuple[tuple[str, ...], PlacementOptions]:
    return placement(model_options(parse(PLACE.flags, words, {})))


def test_flags() -> None:
    pair = ("--device", "opencl,vulkan:1")
    assert flags("--device", "cpu") == (("cpu",), ANYWHERE)
    assert flags(*pair, "-ngl", "4") == (("opencl:0", "vulkan:1"), PlacementOptions(4))
    assert flags(*pair, "-ngl", "all")[1].n_gpu_layers == 2**31 - 1
    assert flags(*pair, "-ngl", "-1")[1] == flags(*pair, "-ngl", "auto")[1] == ANYWHERE
    assert flags(*pair, "-ts", "3,1")[1] == PlacementOptions(split=True, shares=(3, 1))
    assert flags(*pair, "-sm", "layer")[1] == PlacementOptions(split=True)
    assert flags(*pair, "-mg", "1")[0] == ("vulkan:1", "opencl:0")
    assert flags(*pair, "-mg", "1", "-sm", "none", "-ts", "3,1") == (("vulkan:1",), ANYWHERE)
    assert flags(*pair, "-ot", "a=CPU,b=vulkan:1", "-ot", "c=cpu")[1].overrides == (
        ("a", "cpu"),
        ("b", "vulkan:1"),
        ("c", "cpu"),
    )


@pytest.mark.parametrize(
    ("words", "on_cpu"),
    [("--cpu-moe", {0, 1, 2, 10, 11}), ("-ncmoe 2", {0, 1}), ("-ncmoe 11", {0, 1, 2, 10}), ("", set())],
)
def test_experts_on_the_cpu(words: str, on_cpu: set[int]) -> None:
    rules = flags("--device", "vulkan:0", "-ot", "output=vulkan:0", *words.split())[1].overrides
    assert rules[0] == ("output", "vulkan:0")
    for layer in (0, 1, 2, 10, 11):
        for name in ("gate", "up", "down"):
            first = [d for pattern, d in rules if re.search(pattern, f"blk.{layer}.ffn_{name}_exps.weight")]
            assert first == ["cpu"] * (layer in on_cpu)
            assert not any(re.search(p, f"blk.{layer}.ffn_{name}.weight") for p, _ in rules)


def test_layers_for_devices_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """llama-server without a GPU says so and goes on."""
    assert flags("--device", "cpu", "-ngl", "99", "-ts", "1", "-mg", "0")[0] == ("cpu",)
    assert "--gpu-layers: no device is used beside the CPU" in caplog.text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-ngl some", "-ngl: 'some' is not a number of layers, auto or all"),
        ("-ngl -3", "-ngl: '-3' is not a number of layers, auto or all"),
        ("-ts 1,nan", "-ts: '1,nan' is not a list of numbers of at least 0"),
        ("-ts 0,0", "-ts: '0,0' is not a list of numbers of at least 0"),
        ("-ts 1,2,3", "--tensor-split: 3 numbers, and --device names 2 devices beside the CPU"),
        ("-sm x", "-sm: 'x' is not one of none, layer, row, tensor"),
        ("-mg 2", "--main-gpu 2: --device names 2 devices beside the CPU"),
        ("-ot ffn", "-ot: 'ffn' is not a list of PATTERN=DEVICE: 'ffn'"),
        ("-ot (=cpu", "-ot: '(=cpu' has a pattern that is none, '(': missing )"),
        ("-ot a=cuda:0", "-ot: 'a=cuda:0' is not a list of PATTERN=DEVICE: 'cuda:0' is not a list of cpu"),
        ("-ot a=opencl:7", "--override-tensor a=opencl:7: --device does not name opencl:7"),
    ],
)
def test_wrong_flags(words: str, line: str) -> None:
    with pytest.raises((UsageError, OptionError), match="^" + re.escape(line)):
        flags("--device", "opencl:0,vulkan:0", *words.split())


def test_memory_is_the_devices_own() -> None:
    from logitless.graph.execution.session import DeviceBytes

    device, host = NumpyBackend("opencl:0"), NumpyBackend("cpu")
    device.memory_bytes = 1000
    for total, fits in ((900, True), (901, False)):
        sizes = [DeviceBytes("opencl:0", total - 30, 10, 10, 10), DeviceBytes("cpu", 10**15, 0, 0, 0)]
        assert fit(sizes, [device, host]) is fits


def test_the_cache_is_beside_its_layers() -> None:
    assert flags("-nkvo", "--device", "cpu")[0] == flags("-nkvo", "--device", "none")[0] == ("cpu",)
    with pytest.raises(OptionConflict, match=r"^--no-kv-offload: .* --gpu-layers N"):
        flags("-nkvo", "--device", "vulkan:0")


@pytest.mark.parametrize("where", [("--rpc", "h:1"), ("--device", "vulkan:0,rpc:h:1")])
def test_experts_are_not_cached_on_devices_of_other_machines(where: tuple[str, str]) -> None:
    with pytest.raises(OptionConflict, match=r"^--moe-cache-mib: only devices of this machine .*, rpc:h:1 does not; "):
        flags("--moe-cache-mib", "64", *where)


@pytest.mark.parametrize(
    ("spare", "index", "free"), [((), 0, 100), ((300,), 2, 300), ((300, 20), 0, 300), ((300, 20), 1, 20), ((0,), 0, 0)]
)
def test_a_target_of_memory_stays_free(spare: tuple[int, ...], index: int, free: int) -> None:
    assert usable(1000 << 20, spare, index) == (1000 - free) << 20


@pytest.mark.parametrize(("free", "has"), [(1000, 900), (700, 650), (20, -30)])
def test_room_is_what_is_free_less_a_margin(free: int, has: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = NumpyBackend("vulkan:0")
    device.memory_bytes = 1000
    monkeypatch.setattr(device, "free_bytes", lambda: free)
    assert room(device, (), 0) == has
