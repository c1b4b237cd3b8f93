"""Other people's clients of OpenAI's API on a real server: LiteLLM, openai-agents, Haystack, lm-eval, guidellm.

Each runs in a process of its own, of this interpreter or of those that `--clients PYTHON` names: their packages need
versions that exclude each other. tests/integration/test_ollama.py has the clients of Ollama's API.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import MODELS
from tests.integration.conftest import Server, ServerFactory

MODEL = MODELS / "stories260K.gguf"
NAME = "stories260K"
pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no stories260K.gguf beside the checkout")

LITELLM = """
import litellm
said = [{"role": "user", "content": "Once upon a time"}]
for kind, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
    asked = dict(model=f"{kind}/{name}", api_base=base, api_key="none", messages=said, max_tokens=6, temperature=0)
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 6, whole
    text = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True))
    assert text == whole.choices[0].message.content, text
asked = dict(model=f"openai/{name}", api_base=f"{url}/v1", api_key="none")
answer = litellm.responses(input="Once upon a time", max_output_tokens=6, temperature=0, **asked)
told = answer.output[0].content[0].text  # LiteLLM asks for 16 tokens at least
assert told.startswith(text), answer
assert len(litellm.embedding(input=["a", "b"], **asked).data) == 2
"""
AGENTS = """
import asyncio
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIConversationsSession, OpenAIResponsesModel
from agents import Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
set_tracing_disabled(True)

@function_tool
def weather(city: str) -> str:
    "Tells the weather."
    return "sunny"

async def main():
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=name, openai_client=client)
        settings = ModelSettings(max_tokens=400, temperature=0, extra_body={"stop": ["."]})
        agent = Agent(name="a", model=model, model_settings=settings)
        whole = (await Runner.run(agent, "Once upon a time")).final_output
        streamed = Runner.run_streamed(agent, "Once upon a time")
        assert [event async for event in streamed.stream_events()]
        assert whole and streamed.final_output == whole, (whole, streamed.final_output)
        settings = ModelSettings(max_tokens=400, tool_choice="required")
        agent = Agent(name="a", model=model, model_settings=settings, tools=[weather],
                      tool_use_behavior="stop_on_first_tool")
        assert (await Runner.run(agent, "Weather in Rome?", max_turns=2)).final_output == "sunny"
    session = OpenAIConversationsSession(openai_client=client)
    settings = ModelSettings(max_tokens=400, temperature=0, extra_body={"stop": ["."]})
    agent = Agent(name="a", model=model, model_settings=settings)
    for text in ("Once", "More"):
        await Runner.run(agent, text, session=session)
    assert len(await session.get_items()) == 4
    await session.clear_session()

asyncio.run(main())
"""
HAYSTACK = """
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
key, parts = Secret.from_token("none"), []
asked = dict(api_key=key, model=name, api_base_url=f"{url}/v1", generation_kwargs={"max_tokens": 6, "temperature": 0})
said = [ChatMessage.from_user("Once upon a time")]
whole = OpenAIChatGenerator(**asked).run(said)["replies"][0]
assert whole.text and whole.meta["usage"]["completion_tokens"] == 6, whole
OpenAIChatGenerator(**asked, streaming_callback=parts.append).run(said)
assert "".join(part.content for part in parts) == whole.text
assert OpenAITextEmbedder(api_key=key, model=name, api_base_url=f"{url}/v1").run("a")["embedding"]
"""
PROGRAMS = {"litellm": LITELLM, "agents": AGENTS, "haystack": HAYSTACK}
QUIET = {
    "OPENAI_API_KEY": "none",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
}
TASK = """
task: beginnings
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def server(serve_here_module: ServerFactory) -> Server:
    return serve_here_module(MODEL, "-c", "512", "--embedding", "--chat-template", "chatml")


def run(request: pytest.FixtureRequest, module: str, *words: str) -> str:
    """Output of an interpreter that has the module; skips without one."""
    for python in (sys.executable, *request.config.getoption("--clients")):
        find = f"import sys, importlib.util as u; sys.exit(u.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", find], check=False, capture_output=True).returncode:
            continue
        told = {**os.environ, **QUIET}
        done = subprocess.run([python, *words], env=told, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
        return done.stdout
    pytest.skip(f"no interpreter has {module} (--clients PYTHON)")


@pytest.mark.parametrize("client", PROGRAMS)
def test_client_gets_its_answers(client: str, server: Server, request: pytest.FixtureRequest) -> None:
    program = f"url, name = {server.url!r}, {NAME!r}\n{PROGRAMS[client]}\nprint('fine')"
    assert run(request, client, "-c", program).endswith("fine\n")


def test_lm_eval_with_its_remote_tokenizer(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A text that the model has learned is likelier than one that it has not."""
    rows = [{"q": "Once upon a time", "c": [", there was a little girl", f" green ideas sleep {i}"]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK.replace("ROWS", str(tmp_path / "rows.jsonl")))
    address = f"model={NAME},base_url={server.url}/v1/completions,tokenizer_backend=remote,max_length=512"
    words = ["--model", "local-completions", "--model_args", address, "--include_path", str(tmp_path)]
    out = run(request, "lm_eval", "-m", "lm_eval", *words, "--tasks", "beginnings")
    (line,) = [line for line in out.splitlines() if "acc" in line and "|" in line]
    assert [cell.strip() for cell in line.split("|")][7] == "1"


def test_guidellm_measures_the_server(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    data, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    data.write_text("".join(json.dumps({"prompt": f"Once upon a time {i}"}) + "\n" for i in range(8)))
    words = ["--backend", f"kind=openai_http,target={server.url},model={NAME},request_format=/v1/completions"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    words += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}", "--disable-console"]
    run(request, "guidellm", "-m", "guidellm", "run", *words)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == 6
