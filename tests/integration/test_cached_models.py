"""`serve` without a model is a router over the downloaded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.helpers.hub_cache import HubCache

PROMPT = "Once upon a time"


def test_the_downloaded_models_are_served(
    serve: Any, connect: Any, shared_data: Path, hub_cache: HubCache, tmp_path: Path
) -> None:
    model = shared_data / "models" / "stories260K-conv-Q8_0.gguf"
    hub_cache("u/r", "m-Q8_0.gguf", model.read_bytes())
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "plain.gguf").symlink_to(model)
    router = serve(None, "--models-max", "1", "--api-key", "sesame", "--no-models-autoload", "-c", "256")
    assert "serving the 2 models of the caches" in "".join(router.log)
    client = connect(f"{router.url}/v1", "sesame", timeout=60)
    plain = client.with_options(base_url=router.url)

    def say(name: str, **more: Any) -> Any:
        return client.completions.create(model=name, prompt=PROMPT, max_tokens=4, temperature=0, **more)

    def loaded() -> list[str]:
        return [m.id for m in client.models.list().data if m.status["value"] == "loaded"]  # type: ignore[attr-defined]

    assert {m.id for m in client.models.list().data} == {"u/r:Q8_0", "plain"}
    with pytest.raises(openai.BadRequestError, match="model 'u/r' is not loaded"):
        say("u/r")
    with pytest.raises(openai.AuthenticationError):
        say("u/r", extra_headers={"Authorization": "Bearer wrong"})

    def load(name: str) -> None:
        plain.post("/models/load", body={"model": name}, cast_to=dict[str, Any])

    first = say("u/r", extra_query={"autoload": "true"})  # the repository's name is that of its default
    assert (first.model, loaded()) == ("u/r:Q8_0", ["u/r:Q8_0"])
    load("plain")
    assert say("plain").choices[0].text == first.choices[0].text
    assert loaded() == ["plain"]  # there is one place
    assert plain.get("/props", cast_to=dict[str, Any])["role"] == "router"
    with ollama.Client(router.url, headers={"Authorization": "Bearer sesame"}) as other:
        assert {m.model for m in other.list().models} == {"u/r:Q8_0", "plain:latest"}
        assert [m.model for m in other.ps().models] == ["plain:latest"]
        shown = other.show("hf.co/u/r:Q8_0")  # it is not loaded for this
        assert (shown.details and shown.details.quantization_level, loaded()) == ("Q8_0", ["plain"])
        few: Any = {"num_predict": 4, "temperature": 0}
        assert other.generate("plain:latest", PROMPT, raw=True, options=few).response == first.choices[0].text
        assert other.generate("plain", keep_alive=0).done_reason == "unload"
        assert [row["status"] for row in other.pull("u/r:Q8_0", stream=True)] == ["pulling manifest", "success"]
        assert other.delete("u/r:Q8_0").status == "success"
    assert [m.id for m in client.models.list().data] == ["plain"]
    assert router.stop() == 0
    demo = serve(None, "--demo")  # although there are models
    assert demo.get("/v1/models")["data"][0]["id"] == "shakespeare"
