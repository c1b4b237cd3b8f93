"""Slot files across processes: a saved slot continues on another server with the same bits."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import MODELS

STORY = "Once upon a time there was a little girl who lived in a house near the forest and she had a dog. "
REST = {"n_predict": 40, "seed": 3, "temperature": 1.0, "n_probs": 3, "return_tokens": True, "ignore_eos": True}


def refusal(server: Any, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, body)
    return caught.value.code, json.loads(caught.value.read())["error"]["message"]


@pytest.mark.parametrize(
    ("name", "type_k", "type_v"),
    [
        ("stories260K.gguf", "f16", "f16"),
        ("arch-gemma3-F32.gguf", "q8_0", "f32"),
        ("arch-phi3-F32.gguf", "q8_0", "q8_0"),
    ],
)
def test_restored_in_a_new_server(serve_here: Any, tmp_path: Path, name: str, type_k: str, type_v: str) -> None:
    model = MODELS / name
    if not model.exists():
        pytest.skip(f"no {name} beside the checkout")
    flags = ["-c", "512", "-np", "2", "-kvu", "--slot-save-path", str(tmp_path), "-ctk", type_k, "-ctv", type_v]
    first = serve_here(model, *flags)
    answer = first.post("/completion", {"prompt": STORY, "id_slot": 1, **REST})
    tokens = first.post("/tokenize", {"content": STORY, "add_special": True})["tokens"] + answer["tokens"]
    saved = first.post("/slots/1?action=save", {"filename": "one.bin"})
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "one.bin", len(tokens) - 1)
    assert saved["n_written"] == (tmp_path / "one.bin").stat().st_size
    expected = first.post("/completion", {"prompt": tokens, "id_slot": 0, "cache_prompt": False, **REST})
    first.stop()
    second = serve_here(model, *flags)
    assert refusal(second, "/slots/0?action=restore", {"filename": "two.bin"})[0] == 404
    restored = second.post("/slots/0?action=restore", {"filename": "one.bin"})
    assert (restored["n_restored"], restored["n_read"]) == (len(tokens) - 1, saved["n_written"])
    again = second.post("/completion", {"prompt": tokens, "id_slot": 0, **REST})
    assert again["timings"]["cache_n"] == len(tokens) - 1
    for key in ("content", "tokens", "completion_probabilities"):
        assert again[key] == expected[key]
    assert second.post("/slots/0?action=save", {"filename": "three.bin"})["n_saved"] == len(tokens) + 39


def test_other_models_and_types_are_refused(serve_here: Any, tmp_path: Path) -> None:
    model, other = MODELS / "stories260K.gguf", MODELS / "stories260K-conv-F16.gguf"
    if not model.exists():
        pytest.skip("no stories260K.gguf beside the checkout")
    flags = ["-c", "512", "--slot-save-path", str(tmp_path)]
    server = serve_here(model, *flags)
    server.post("/completion", {"prompt": STORY, "id_slot": 0, "n_predict": 1})
    server.post("/slots/0?action=save", {"filename": "a"})
    for path, extra, reason in (
        (other, [], "another model"),
        (model, ["-ctk", "f32", "-ctv", "f32"], "saved with type_k f16, this server has f32"),
    ):
        code, message = refusal(serve_here(path, *flags, *extra), "/slots/0?action=restore", {"filename": "a"})
        assert code == 400
        assert reason in message
