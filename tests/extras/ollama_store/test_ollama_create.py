"""Models that Ollama's own client creates on a router of real servers: uploads, settings, an adapter of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from logitless.cli.main import main
from tests.helpers.paths import MODELS
from tests.integration.conftest import Server, ServerFactory
from tests.integration.test_clients import run
from tests.integration.test_ollama import CLIENTS

MODEL = MODELS / "stories260K-conv-Q8_0.gguf"
FEW: Any = {"num_predict": 6, "temperature": 0}
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K beside the checkout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(MODEL, folder / "base.gguf")
    return folder


@pytest.fixture(scope="module")
def server(serve_module: ServerFactory, folder: Path) -> Server:
    return serve_module(None, "--models-dir", str(folder), "-c", "1024", "-t", "1", "--embedding")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


def test_an_upload_its_settings_and_its_copy(server: Server, client: ollama.Client, folder: Path) -> None:
    digest = client.create_blob(MODEL)
    settings: Any = {
        "system": "Once",
        "template": "{{ .System }} {{ .Prompt }}",
        "parameters": {"temperature": 0, "num_predict": 5},
        "messages": [{"role": "user", "content": "upon"}, {"role": "assistant", "content": " a"}],
    }
    steps = [step.status for step in client.create("tale", files={"m.gguf": digest}, stream=True, **settings)]
    assert steps == [f"using existing layer {digest}", "writing manifest", "success"]
    client.copy("tale", "tale:copy")
    client.delete("tale")
    # The system message, the examples and the template are the prompt; the parameters are the defaults.
    answer = client.chat("tale:copy", [{"role": "user", "content": "time"}])
    assert answer.eval_count == 5
    told = server.post("/completion", {"model": "base", "prompt": "Once upon a time", "n_predict": 5, "temperature": 0})
    assert answer.message.content == told["content"]
    assert client.generate("tale:copy", "time").response == told["content"]
    said = [{"role": "user", "content": "time"}]
    chat = server.post("/v1/chat/completions", {"model": "tale:copy", "messages": said})
    assert chat["choices"][0]["message"]["content"] == told["content"]
    own = client.chat("tale:copy", [{"role": "system", "content": "Two dogs ran"}, *said])
    body = {"model": "base", "prompt": "Two dogs ran upon a time", "n_predict": 5, "temperature": 0}
    assert own.message.content == server.post("/completion", body)["content"]
    assert [model.model for model in client.list().models] == ["base:latest", "tale:copy"]
    assert not (folder / "tale").exists()
    client.delete("tale:copy")
    assert list((folder / ".blobs").iterdir()) == []


def test_an_adapter_of_our_finetune(server: Server, client: ollama.Client, folder: Path, tmp_path: Path) -> None:
    rows, adapter = tmp_path / "rows.jsonl", tmp_path / "adapter.gguf"
    rows.write_text(json.dumps({"prompt": "Once", "completion": " zoo" * 8}) + "\n")
    words = ["--file", str(rows), "--lora-out", str(adapter), "--epochs", "40", "--learning-rate", "0.02", "-t", "1"]
    assert main(["finetune", "-m", str(folder / "base.gguf"), *words]) == 0
    digest = client.create_blob(adapter)
    client.create("zoo", from_="base", adapters={"adapter.gguf": digest})
    trained, plain = (client.generate(name, "Once", raw=True, options=FEW).response for name in ("zoo", "base"))
    assert "zoo" in trained
    assert "zoo" not in plain
    with pytest.raises(ollama.ResponseError, match=r"'adapters': .*not a LoRA adapter"):
        client.create("bad", from_="base", adapters={"a": client.create_blob(MODEL)})


@pytest.mark.parametrize("module", ["langchain_ollama", "litellm"])
def test_other_clients(server: Server, client: ollama.Client, module: str, request: pytest.FixtureRequest) -> None:
    """A model with a tag, through LangChain and LiteLLM (--clients PYTHON)."""
    client.create("other:v1", from_="base", system="You are Mario.")
    assert run(request, module, "-c", CLIENTS.format(client=module), server.url, "other:v1").endswith("fine\n")


@pytest.mark.long
def test_weights_of_fewer_bits(server: Server, client: ollama.Client) -> None:
    digest = client.create_blob(MODELS / "stories260K-conv-F16.gguf")
    client.create("small", files={"f16.gguf": digest}, quantize="q4_0")
    assert client.show("small").details.quantization_level == "Q4_0"
    assert client.generate("small", "Once", raw=True, options=FEW).eval_count == 6
    with pytest.raises(ollama.ResponseError, match=r"'quantize': base.gguf: .* is quantized already \(q8_0\) \(status"):
        client.create("other", from_="base", quantize="q4_0")
