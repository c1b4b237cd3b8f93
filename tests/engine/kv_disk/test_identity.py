"""Identity of KV blocks on disk: each thing that changes their bits changes their address."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.engine.kv_cache.block_pool import BlockPool
from logitless.engine.kv_cache.prefix_cache import PrefixCache
from logitless.engine.kv_cache.slot_files import CacheKind
from logitless.engine.kv_disk import identity
from logitless.engine.kv_disk.disk_cache import DiskCache
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from logitless.models.gguf.file import file_version


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(identity, "_program", lambda: "one build")
    model, projector = tmp_path / "m.gguf", tmp_path / "p.gguf"
    model.write_bytes(bytes(5000))
    projector.write_bytes(bytes(500))
    return SimpleNamespace(
        session=SimpleNamespace(backends=[SimpleNamespace(name="cpu", identity="zen4")], hint_of=None),
        rerouted={},
        options=SimpleNamespace(projector_device="", placement=SimpleNamespace(divide=""), mmproj=str(projector)),
        cache_kind=CacheKind("sampled", "f16", "f16", 16, 4096),
        gguf=SimpleNamespace(files=[(model, file_version(model))]),
    )


def space(engine: Any, folder: Path) -> bytes:
    """The space of a process of its own."""
    spaces: list[bytes] = []

    def compute(cache: DiskCache) -> bytes:
        spaces.append(identity.space_of(engine)(cache))
        return spaces[0]

    cache = DiskCache(folder, 1 << 20, compute)
    cache.settle(30.0)
    cache.close(30.0)
    return spaces[0]


def change_byte(path: Path) -> None:
    """Change a byte that no sample has, and not the time."""
    status = path.stat()
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_each_difference_has_a_space_of_its_own(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, (model, _) = tmp_path / "cache", engine.gguf.files[0]
    changes: list[Callable[[], object]] = [
        lambda: change_byte(Path(engine.options.mmproj)),
        lambda: change_byte(model),
        lambda: setattr(engine, "cache_kind", replace(engine.cache_kind, type_v="q8_0")),
        lambda: setattr(engine, "cache_kind", replace(engine.cache_kind, model="other RoPE")),
        lambda: engine.session.backends.append(SimpleNamespace(name="vulkan", identity="a GPU")),
        lambda: setattr(engine.session.backends[0], "identity", "zen2"),
        lambda: setattr(engine.session, "hint_of", "layers 0-3"),
        lambda: engine.rerouted.update({"softmax": "wrong"}),
        lambda: setattr(engine.options, "projector_device", "cpu"),
        lambda: setattr(engine.options.placement, "divide", "row"),
        lambda: monkeypatch.setattr(identity, "_program", lambda: "another build"),
    ]
    spaces = [space(engine, folder)]
    for change in changes:
        change()
        engine.gguf.files = [(model, file_version(model))]
        spaces.append(space(engine, folder))
    assert len(set(spaces)) == len(spaces)
    assert space(engine, folder) == spaces[-1]


def test_a_copy_of_a_model_has_its_space_and_no_file_is_hashed_twice(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (model, _) = tmp_path / "cache", engine.gguf.files[0]
    of_model = space(engine, folder)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    engine.gguf.files = [(copy, file_version(copy))]
    assert space(engine, folder) == of_model
    monkeypatch.setattr(identity, "file_digest", None)
    assert space(engine, folder) == of_model
    for path in (folder / "files").iterdir():  # damaged: computed again
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    monkeypatch.undo()
    monkeypatch.setattr(identity, "_program", lambda: "one build")
    assert space(engine, folder) == of_model


def test_a_model_that_was_replaced_since_it_was_loaded_has_no_space(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compute = identity.space_of(engine)
    change_byte(engine.gguf.files[0][0])
    cache = DiskCache(tmp_path / "cache", 1 << 20, compute)
    cache.settle(30.0)
    cache.close(30.0)
    assert "m.gguf has changed since it was loaded; prompts stay in memory" in caplog.text
    assert b"x" not in cache


def test_a_device_without_an_identity_is_refused(engine: Any) -> None:
    engine.session.backends.append(SimpleNamespace(name="rpc:a:1", identity=""))
    with pytest.raises(ValueError, match="rpc:a:1 does not say which bits it computes"):
        identity.space_of(engine)


def test_the_program_is_hashed_with_all_of_its_kernels() -> None:
    assert len(identity._program()) == 64


def test_adapters_are_named_by_content_and_scale_and_finetunes_by_process() -> None:
    class Adapters:
        def __init__(self, digests: dict[int, str]) -> None:
            self.digests = digests

        def names(self, choice: AdapterChoice) -> tuple[tuple[str, float], ...]:
            return tuple((self.digests[handle], scale) for handle, scale in choice.mix)

    def keys(digests: dict[int, str]) -> dict[str, bytes]:
        prefixes = PrefixCache(BlockPool(1))
        prefixes.root_name = identity.root_names(Adapters(digests))  # type: ignore[arg-type]
        handles = {digest: handle for handle, digest in digests.items()}
        a, b = handles["a"], handles["b"]
        roots = {
            "a": prefixes.root_of(AdapterChoice(0, ((a, 0.5),))),
            "a at 1": prefixes.root_of(AdapterChoice(0, ((a, 1.0),))),
            "b": prefixes.root_of(AdapterChoice(0, ((b, 0.5),))),
            "a, b": prefixes.root_of(AdapterChoice(0, ((a, 0.5), (b, 0.5)))),
            "b, a": prefixes.root_of(AdapterChoice(0, ((b, 0.5), (a, 0.5)))),
            "salt": prefixes.root_of(BASE, "x/"),
            "a, salt": prefixes.root_of(AdapterChoice(0, ((a, 0.5),)), "x/"),
            "finetune": prefixes.root_of(AdapterChoice(1)),
            "run": prefixes.root_of(BASE, "y/", transient=True),
        }
        return {"base": prefixes.root_of(BASE).key} | {name: root.key for name, root in roots.items()}

    first, second = keys({1: "a", 2: "b"}), keys({2: "a", 1: "b"})  # loaded in another order
    assert len(set(first.values())) == len(first)
    assert {name for name in first if first[name] != second[name]} == {"finetune", "run"}
