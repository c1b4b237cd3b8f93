"""Ollama's API of a real server: its own client, LangChain, LiteLLM, and Open WebUI's calls."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.helpers.paths import MODELS
from tests.helpers.vision_files import SPECS, picture, png, write_projector
from tests.integration.conftest import Server, ServerFactory

MODEL = MODELS / "stories260K.gguf"
NAME = "stories260K"
SAID: Any = [{"role": "user", "content": "Once upon a time"}]
FEW: Any = {"num_predict": 6, "temperature": 0}
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")


@pytest.fixture(scope="module")
def server(serve_here_module: ServerFactory, tmp_path_factory: pytest.TempPathFactory) -> Server:
    projector = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf", SPECS["mlp"])
    return serve_here_module(MODEL, "--mmproj", str(projector), "-c", "512", "--embedding")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as made:
        yield made


def test_answers_are_those_of_the_other_dialects(server: Server, client: ollama.Client) -> None:
    body = {"messages": SAID, "max_tokens": 6, "temperature": 0}
    openai = server.post("/v1/chat/completions", body)
    answer = client.chat(NAME, SAID, options=FEW)
    assert answer.message.content == openai["choices"][0]["message"]["content"]
    assert (answer.prompt_eval_count, answer.eval_count, answer.done_reason) == (
        openai["usage"]["prompt_tokens"],
        6,
        "length",
    )
    assert "".join(part.message.content or "" for part in client.chat(NAME, SAID, stream=True, options=FEW)) == (
        answer.message.content
    )
    assert client.generate(NAME, SAID[0]["content"], options=FEW).response == answer.message.content
    native = server.post("/completion", {"prompt": "Once upon a time", "n_predict": 6, "temperature": 0})
    raw = client.generate(NAME, "Once upon a time", raw=True, options=FEW)
    assert raw.response == native["content"]
    more = client.generate(NAME, " and", template="{{ .Prompt }}", context=raw.context, options=FEW)
    whole = server.post(
        "/completion", {"prompt": [*raw.context, *_ids(server, " and")], "n_predict": 6, "temperature": 0}
    )
    assert more.response == whole["content"]


def _ids(server: Server, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"content": text, "add_special": False})["tokens"]
    return tokens


def test_images(server: Server, client: ollama.Client) -> None:
    image = png(picture(40, 24))
    plain = client.chat(NAME, SAID, options=FEW)
    seen = client.chat(NAME, [{**SAID[0], "images": [image]}], options=FEW)
    assert (seen.prompt_eval_count or 0) > (plain.prompt_eval_count or 0)
    assert seen.message.content != plain.message.content
    told = client.generate(NAME, SAID[0]["content"], images=[image], options=FEW)
    assert told.response == seen.message.content
    raw = client.generate(NAME, "Once", images=[base64.b64encode(image).decode()], raw=True, options=FEW)
    assert raw.eval_count == 6
    with pytest.raises(ollama.ResponseError, match=r"field 'images\[1\]': the image is no image"):
        client.generate(NAME, "x", images=[image, b"hello"], options=FEW)
    assert "vision" in (client.show(NAME).capabilities or [])


def test_a_json_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    answer = client.chat(NAME, SAID, format=schema, options={"num_predict": 40})
    assert json.loads(answer.message.content or "")["n"] <= 9


def test_vectors(server: Server, client: ollama.Client) -> None:
    both = client.embed(NAME, ["a dog", "a cat"])
    openai = server.post("/v1/embeddings", {"input": ["a dog", "a cat"]})["data"]
    assert [list(vector) for vector in both.embeddings] == [item["embedding"] for item in openai]
    assert both.prompt_eval_count == len(_ids(server, "a dog")) + len(_ids(server, "a cat")) + 2  # BOS
    (one,) = client.embed(NAME, "a dog", dimensions=8).embeddings
    assert (len(one), sum(x * x for x in one)) == (8, pytest.approx(1))
    native = client.embeddings(NAME, "a dog").embedding
    scale = sum(x * x for x in native) ** 0.5
    assert [x / scale for x in native] == pytest.approx(both.embeddings[0], abs=1e-6)
    assert client.embed(NAME, []).embeddings == []
    assert len(client.embed(NAME, "word " * 3000).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="exceeds the context length"):
        client.embed(NAME, "word " * 3000, truncate=False)


CLIENTS = """
import asyncio, sys, warnings
url, name = sys.argv[1:]
if "{client}" == "langchain_ollama":
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
    chat = ChatOllama(model=name, base_url=url, temperature=0, num_predict=6, validate_model_on_init=True)
    whole = chat.invoke("Once upon a time")
    assert whole.content and whole.response_metadata["done_reason"] == "length", whole
    assert whole.usage_metadata["output_tokens"] == 6, whole
    assert "".join(part.content for part in chat.stream("Once upon a time")) == whole.content
    assert asyncio.run(chat.ainvoke("Once upon a time")).content == whole.content
    assert OllamaLLM(model=name, base_url=url, temperature=0, num_predict=6).invoke("Once upon a time")
    assert len(OllamaEmbeddings(model=name, base_url=url).embed_documents(["a", "b"])) == 2
else:
    import litellm
    said = [{{"role": "user", "content": "Once upon a time"}}]
    for kind in ("ollama", "ollama_chat"):
        asked = dict(model=f"{{kind}}/{{name}}", messages=said, api_base=url, max_tokens=6, temperature=0)
        whole = litellm.completion(**asked)
        assert whole.choices[0].message.content and whole.usage.completion_tokens == 6, whole
        text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True))
        assert text == whole.choices[0].message.content, text
        again = asyncio.run(litellm.acompletion(**asked))
        assert again.choices[0].message.content == text
    vectors = litellm.embedding(model=f"ollama/{{name}}", input=["a", "b"], api_base=url)
    assert len(vectors.data) == 2
print("fine")
"""


@pytest.mark.parametrize("client", ["langchain_ollama", "litellm"])
def test_other_clients(server: Server, client: str) -> None:
    """In a process of their own: they import for seconds."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"needs {client}: pip install -e .[clients]")
    words = [sys.executable, "-c", CLIENTS.format(client=client), server.url, NAME]
    told = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(words, env=told, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr[-3000:]
