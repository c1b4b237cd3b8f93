"""Values of flags: processors, names of HTTP, devices."""

from __future__ import annotations

import pytest

from logitless.engine.loading.values import cpu_mask, cpu_range, device_list, names_of_http, numbers, one_device


@pytest.mark.parametrize(("text", "cpus"), [("1", {0}), ("f0", {4, 5, 6, 7}), ("0x5", {0, 2}), ("8" + "0" * 20, {83})])
def test_a_mask_names_processors(text: str, cpus: set[int]) -> None:
    assert cpu_mask(text) == cpus


@pytest.mark.parametrize(("text", "cpus"), [("0-3", {0, 1, 2, 3}), ("2-2", {2}), ("-1", {0, 1})])
def test_a_range_names_processors(text: str, cpus: set[int]) -> None:
    assert cpu_range(text) == cpus


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (cpu_mask, "0"),
        (cpu_mask, ""),
        (cpu_mask, "g"),
        (cpu_range, "3-1"),
        (cpu_range, "-"),
        (cpu_range, "1"),
        (names_of_http, "GET, PO ST"),
        (names_of_http, "X-A\r\nX-B: 1"),
        (names_of_http, ""),
        (numbers, "1,x"),
        (one_device, "cpu,vulkan:0"),
        (device_list, "none,vulkan:0"),
        (device_list, "CUDA0"),
    ],
)
def test_wrong_values_are_refused(read: object, text: str) -> None:
    with pytest.raises(ValueError, match="is"):
        read(text)  # type: ignore[operator]


def test_none_is_the_cpu_alone() -> None:
    assert (device_list("none"), device_list("NONE"), one_device("none")) == ("cpu", "cpu", "cpu")
    assert device_list("vulkan:0,cpu") == "vulkan:0,cpu"
