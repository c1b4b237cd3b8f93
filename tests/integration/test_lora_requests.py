"""LoRA of requests through the real port: mixed in a batch, apart in the cache, set by /lora-adapters."""

from __future__ import annotations

import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.models.adapters.lora import Adapter, Pair, read_adapter, write_adapter
from logitless.models.adapters.merge import merge
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.models.weights.weights import check_weights
from tests.integration.conftest import Server, ServerFactory

PROMPT = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def adapters(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("lora") / f"{i}.gguf" for i in range(2)]
    with GGUFFile.open(shared_data / "models" / "stories260K.gguf") as base:
        h = hparams_of(base)
        for i, path in enumerate(paths):
            rng = np.random.default_rng(i)
            pairs = {
                name: Pair(
                    rng.normal(size=(4, part.shape[1])).astype(np.float32) / 8,
                    rng.normal(size=(part.shape[0], 4)).astype(np.float32) / 8,
                )
                for name, part in check_weights(base, h).items()
                if name.startswith("blk.") and len(part.shape) == 2
            }
            write_adapter(path, Adapter(pairs), base, h)
    return paths


def text(server: Server, **fields: Any) -> str:
    body = {"prompt": PROMPT, "n_predict": 24, "temperature": 0, "n_probs": 1, **fields}
    reply = server.post("/completion", body)
    return str([(p["id"], p["logprob"]) for p in reply["completion_probabilities"]])


def test_every_request_has_its_own(serve_here: ServerFactory, shared_data: Path, adapters: list[Path]) -> None:
    model = shared_data / "models" / "stories260K.gguf"
    plain = text(serve_here(model, "-c", "512", "-t", "1"))
    flags = ("-c", "512", "-t", "1", "--lora", str(adapters[0]), "--lora-scaled", f"{adapters[1]}:0.5")
    server = serve_here(model, *flags, "--lora-init-without-apply")
    assert [(a["id"], a["path"], a["scale"]) for a in server.get("/lora-adapters")] == [
        (i, str(path), 0.0) for i, path in enumerate(adapters)
    ]
    wanted: list[Any] = [
        None,
        [],
        [{"id": 0, "scale": 1}],
        [{"id": 1}],
        [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2}],
    ]
    alone = [text(server, lora=w) for w in wanted]
    assert alone[:2] == [plain, plain]
    assert len(set(alone[1:])) == 4
    with ThreadPoolExecutor(8) as pool:  # twice, so that prefixes of all five are in the cache by then
        together = list(pool.map(lambda w: text(server, lora=w), wanted * 2))
    assert together == alone * 2
    server.post("/lora-adapters", [{"id": 0, "scale": 1}])  # type: ignore[arg-type]
    assert [a["scale"] for a in server.get("/lora-adapters")] == [1.0, 0.0]
    assert [text(server), text(server, lora=[])] == [alone[2], plain]
    applied = serve_here(model, *flags)
    assert [a["scale"] for a in applied.get("/lora-adapters")] == [1.0, 0.5]
    both = text(applied)
    assert both == text(server, lora=[{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}])
    assert both != plain

    def refusal(path: str, body: Any) -> str:
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post(path, body)
        assert refused.value.code == 400
        return refused.value.read().decode()

    for lora, told in (
        ([{"id": 2, "scale": 1}], "there is no adapter 2; the server has 2"),
        ([{"id": -1}], "there is no adapter -1"),
        ([{"id": 0}, {"id": 0}], "adapter 0 is listed twice"),
        ([{"id": 0, "scale": 1e30}], "must be between"),
        ([{"id": 0, "scale": "1"}], "expected a number"),
        ([7], "expected an object"),
        ({"id": 0}, "expected an array"),
    ):
        assert told in refusal("/completion", {"prompt": PROMPT, "n_predict": 1, "lora": lora})
        assert told in refusal("/lora-adapters", lora) or not isinstance(lora, list)


def test_vectors_have_adapters_too(
    serve_here: ServerFactory, shared_data: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """By a request's `lora` and by the server's scales, those of the merged model."""
    model, merged = shared_data / "models" / "stories260K.gguf", tmp_path / "merged.gguf"
    with GGUFFile.open(model) as base:
        h = hparams_of(base)
        merge(merged, base, h, [(read_adapter(adapters[0], base, h), 0.5)])

    def vectors(server: Server, **fields: Any) -> list[Any]:
        openai = server.post("/v1/embeddings", {"input": [PROMPT, "cat"], **fields})["data"]
        native = server.post("/embedding", {"input": PROMPT, **fields})
        return [*(item["embedding"] for item in openai), native[0]["embedding"][0]]

    flags = ("-c", "512", "-t", "1", "--pooling", "mean")
    wanted = vectors(serve_here(merged, *flags))
    server = serve_here(model, *flags, "--lora-scaled", f"{adapters[0]}:0.5")
    scaled = vectors(server)
    np.testing.assert_allclose(scaled, wanted, atol=1e-5)
    server.post("/lora-adapters", [])  # type: ignore[arg-type]
    plain = vectors(server)
    assert np.abs(np.array(plain) - wanted).max() > 1e-2
    assert vectors(server, lora=[{"id": 0, "scale": 0.5}]) == scaled
    assert vectors(server, lora=[], model="some-name") == plain
    with pytest.raises(urllib.error.HTTPError) as refused:
        vectors(server, lora=[{"id": 7}])
    assert refused.value.code == 400
    assert "there is no adapter 7" in refused.value.read().decode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        vectors(server, model="ft:nope")
    assert refused.value.code == 404
    assert "the model 'ft:nope' does not exist" in refused.value.read().decode()


def test_a_slot_of_adapters_in_a_file(
    serve_here: ServerFactory, shared_data: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """Restored in a new process to the same bits; refused where an adapter is missing, or added in another order."""
    model = shared_data / "models" / "stories260K.gguf"
    flags = ("-c", "512", "-t", "1", "-np", "2", "-kvu", "--slot-save-path", str(tmp_path), "--lora-init-without-apply")
    a, b = ("--lora", str(adapters[0])), ("--lora", str(adapters[1]))
    first = serve_here(model, *flags, *a, *b)
    mixes: dict[str, Any] = {"both": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2}], "one": [{"id": 1, "scale": 0.3}]}
    wanted, saved = {}, {}
    for name, mix in mixes.items():
        wanted[name] = text(first, lora=mix, id_slot=1)
        saved[name] = first.post("/slots/1?action=save", {"filename": name})["n_saved"]
    first.stop()
    swapped = serve_here(model, *flags, *b, *a)
    before = swapped.post("/completion", {"prompt": PROMPT, "n_predict": 4, "id_slot": 0})
    for server, reason in ((swapped, "loaded in another order"), (serve_here(model, *flags, *a), "is not loaded here")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/slots/0?action=restore", {"filename": "both"})
        assert refused.value.code == 400
        assert reason in refused.value.read().decode()
    again = swapped.post("/completion", {"prompt": PROMPT, "n_predict": 4, "id_slot": 0})
    assert again["timings"]["cache_n"] == before["tokens_evaluated"] - 1  # the slot is as it was
    third = serve_here(model, *flags, *a, *b)
    for server, name, mix in ((third, "both", mixes["both"]), (swapped, "one", [{"id": 0, "scale": 0.3}])):
        assert server.post("/slots/0?action=restore", {"filename": name})["n_restored"] == saved[name]
        body = {"prompt": PROMPT, "n_predict": 24, "temperature": 0, "n_probs": 1, "id_slot": 0, "lora": mix}
        reply = server.post("/completion", body)
        assert reply["timings"]["cache_n"] == reply["tokens_evaluated"] - 1
        assert str([(p["id"], p["logprob"]) for p in reply["completion_probabilities"]]) == wanted[name]
