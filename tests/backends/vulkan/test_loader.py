"""Vulkan's loader: its name on each system, drivers on another API, the order of devices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.backends.errors import DeviceError
from logitless.backends.vulkan import api, device, instance
from logitless.graph.backend import Backend


@pytest.mark.parametrize(
    ("system", "names"),
    [
        ("linux", ["libvulkan.so.1", "libvulkan.so"]),
        ("freebsd14", ["libvulkan.so.1", "libvulkan.so"]),
        ("win32", ["vulkan-1.dll"]),
        ("darwin", ["libvulkan.1.dylib", "libMoltenVK.dylib", "/opt/homebrew/lib/libvulkan.1.dylib"]),
    ],
)
def test_loader_has_the_names_of_the_system(system: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def dlopen(name: str) -> object:
        tried.append(name)
        if len(tried) < len(names):
            raise OSError(name)
        return "the loader"

    ffi = SimpleNamespace(dlopen=dlopen)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(api.runpy, "run_path", lambda path: {"ffi": ffi})
    assert api.binding.__wrapped__() == (ffi, "the loader")
    assert tried == names


def test_missing_loader_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def dlopen(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr(api.runpy, "run_path", lambda path: {"ffi": SimpleNamespace(dlopen=dlopen)})
    with pytest.raises(DeviceError, match=r"^Vulkan: no loader \(vulkan-1\.dll\): install a GPU driver with Vulkan$"):
        api.binding.__wrapped__()


class Loader:
    """The real loader, which lists further extensions, and what it was called with."""

    def __init__(self, lib: Any, *extensions: str) -> None:
        self._lib, self._extensions = lib, extensions
        self.flags, self.enabled = 0, [""]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def vkEnumerateInstanceExtensionProperties(self, layer: Any, count: Any, array: Any) -> int:
        count[0] = len(self._extensions)
        for i, name in enumerate(self._extensions if array else ()):
            array[i].extensionName = name.encode()
        return 0

    def vkCreateInstance(self, info: Any, allocator: Any, out: Any) -> int:
        return self._create(info)

    def vkCreateDevice(self, handle: Any, info: Any, allocator: Any, out: Any) -> int:
        return self._create(info)

    def _create(self, info: Any) -> int:
        ffi, _ = api.binding()
        names = [ffi.string(info.ppEnabledExtensionNames[i]).decode() for i in range(info.enabledExtensionCount)]
        self.flags, self.enabled = info.flags, names
        return -3  # VK_ERROR_INITIALIZATION_FAILED


@pytest.mark.parametrize("portable", [True, False])
def test_drivers_on_another_api_are_listed_and_enabled(
    portable: bool, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MoltenVK's."""
    open_device("vulkan:0")
    ffi, lib = api.binding()
    loader = Loader(lib, *[instance.PORTABILITY_ENUMERATION] * portable)
    info = instance.all_devices()[0]
    for module in (instance, device):
        monkeypatch.setattr(module, "binding", lambda: (ffi, loader))
    with pytest.raises(OSError, match="vkCreateInstance failed"):
        instance.Instance()
    assert (loader.flags, loader.enabled) == ((1, [instance.PORTABILITY_ENUMERATION]) if portable else (0, []))
    extensions = info.extensions - {instance.COOPERATIVE_MATRIX}
    subset = {instance.PORTABILITY_SUBSET} if portable else set()
    with pytest.raises(OSError, match="opening"):
        device.Device(instance.replace(info, extensions=extensions | subset))
    assert loader.enabled == sorted(subset)


def test_discrete_gpus_come_before_others(
    open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_device("vulkan:0")
    info = instance.all_devices()[0]
    kinds = ["cpu", "integrated", "discrete", "discrete", "other"]
    monkeypatch.setattr(instance, "listed", lambda *_: range(len(kinds)))
    monkeypatch.setattr(
        instance.Instance, "_describe", lambda self, i, handle: instance.replace(info, kind=kinds[i], name=f"card {i}")
    )
    found = info.instance.devices()
    assert [(d.index, d.kind, d.name) for d in found] == [
        (0, "discrete", "card 2"),
        (1, "discrete", "card 3"),
        (2, "integrated", "card 1"),
        (3, "other", "card 4"),
        (4, "cpu", "card 0"),
    ]


@pytest.mark.parametrize(
    ("families", "taken"),
    [([7], 0), ([1, 7, 6, 4], 2), ([2, 6], 0)],
    ids=["one", "beside graphics", "two without graphics"],
)
def test_queue_without_graphics_is_taken(
    families: list[int], taken: int, open_device: Callable[[str], Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_device("vulkan:0")
    info = instance.all_devices()[0]
    plain = instance.listed

    def listed(call: Any, ctype: str, *before: Any, struct: str = "") -> list[Any]:
        if ctype == "VkQueueFamilyProperties":
            return [SimpleNamespace(queueFlags=flags) for flags in families]
        return plain(call, ctype, *before, struct=struct)

    monkeypatch.setattr(instance, "listed", listed)
    assert info.instance._describe(0, info.handle).queue_family == taken
