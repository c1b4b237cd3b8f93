"""Downloaded models of this machine, in each of the cache folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logitless.cli.hub import cached, model_source
from tests.helpers.hub_cache import HubCache, add_to_hub_cache


def test_every_cache_is_looked_into(tmp_path: Path, hub_cache: HubCache) -> None:
    assert cached.models() == {}
    hub_cache("u/r", "m-Q4_0.gguf")
    hub_cache("u/r", "m-Q4_K_M.gguf")
    hub_cache("u/r", "mmproj-F16.gguf")
    hub_cache("u/r", "mtp-m-Q4_0.gguf")
    hub_cache("u/big", "sub/b-BF16-00001-of-00002.gguf")
    hub_cache("u/big", "sub/b-BF16-00002-of-00002.gguf")
    hub_cache("u/half", "b-BF16-00001-of-00002.gguf")
    hub_cache("u/torch", "model.safetensors")
    llama = tmp_path / "llama"
    add_to_hub_cache(llama, "v/s", "s-Q8_0.gguf")
    add_to_hub_cache(llama, "u/r", "m-Q4_0.gguf")  # huggingface-hub's counts
    for name in ("w_t_t-q5_0.gguf", "w_t_mmproj.gguf", "p-00001-of-00002.gguf", "p-00002-of-00002.gguf", "n.txt"):
        (llama / name).touch()
    note = model_source._cache_path("http://h/x.gguf")
    note.parent.mkdir(parents=True)
    note.touch()
    note.with_name("x.gguf.json").write_text(json.dumps({"url": "http://h/x.gguf"}))
    result = {name: (path.relative_to(tmp_path).parts[0], alias) for name, (path, alias) in cached.models().items()}
    assert result == {
        "u/r:Q4_0": ("hub", ""),
        "u/r:Q4_K_M": ("hub", "u/r"),
        "u/big:BF16": ("hub", "u/big"),
        "v/s:Q8_0": ("llama", "v/s"),
        "http://h/x.gguf": ("llama", ""),
        "w_t_t-q5_0": ("llama", ""),
        "p": ("llama", ""),
    }
    for name in ("p", "w_t_t-q5_0", "u/r:Q4_0", "v/s:Q8_0", "http://h/x.gguf"):
        cached.remove(name)
    assert list(cached.models()) == ["u/big:BF16", "u/r:Q4_K_M"]
    assert sorted(path.name for path in llama.glob("*.*")) == ["n.txt", "w_t_mmproj.gguf"]


@pytest.mark.parametrize("commit", ["", "../../../own", "..", "\udcff"])
def test_a_cache_that_is_damaged_leads_nowhere_else(tmp_path: Path, hub_cache: HubCache, commit: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "m-Q8_0.gguf").touch()
    hub_cache("u/r", "m-Q8_0.gguf")
    ref = tmp_path / "hub" / "models--u--r" / "refs" / "main"
    ref.write_bytes(commit.encode("utf-8", "surrogateescape"))
    assert cached.models() == {}
    ref.unlink()
    assert cached.models() == {}


def test_folders_that_are_none(tmp_path: Path, hub_cache: HubCache) -> None:
    (tmp_path / "hub").touch()
    (tmp_path / "llama").touch()
    assert cached.models() == {}
