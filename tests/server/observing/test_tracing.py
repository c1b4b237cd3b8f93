"""Traces at a collector: spans of a request and its phases, their attributes, and the environment variables."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from logitless.engine.loading.options import OptionConflict
from logitless.server.observing import tracing
from tests.helpers.chat_fakes import HERMES_LIKE, chatting, says
from tests.helpers.http_fakes import running
from tests.helpers.otlp import collecting

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SERVER = 2  # a span's kind
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}


@pytest.mark.parametrize("stream", [False, True])
async def test_phases_of_a_chat_with_tools(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "oracle")
    async with collecting(monkeypatch) as collector, chatting(HERMES_LIKE, alias="tiny") as server:
        says(server, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        body = {**CHAT, "tools": [TOOL], "tool_choice": "required", "stream": stream, "temperature": 0.5}
        url = f"{server.url}/v1/chat/completions"
        async with server.http.post(url, json=body, headers=HEADERS) as reply:
            assert reply.status == 200
            assert b'"f"' in await reply.read()
            id = reply.headers["X-Request-Id"]
    assert {span["trace"] for span in collector.spans} == {TRACE}
    assert collector.resources[0]["service.name"] == "oracle"
    top, chat = collector.named("POST /v1/chat/completions"), collector.named("chat tiny")
    assert (top["parent"], top["kind"], top["state"]) == (SPAN, SERVER, "vendor=1")
    assert (top["http.route"], top["http.response.status_code"]) == ("/v1/chat/completions", 200)
    assert top["logitless.request.id"] == id
    assert chat["parent"] == top["id"]
    assert chat["gen_ai.operation.name"] == "chat"
    assert chat["gen_ai.request.temperature"] == pytest.approx(0.5)
    assert chat["gen_ai.request.max_tokens"] == 200
    assert chat["gen_ai.request.stream"] == stream
    assert chat["gen_ai.response.finish_reasons"] == ["stop"]
    assert chat["gen_ai.usage.input_tokens"] > 0
    assert chat["gen_ai.usage.output_tokens"] > 0
    of_server = [collector.named(name) for name in ("grammar", "parse")]
    of_chat = [collector.named(name) for name in ("queue", "prefill", "decode", "tool parse")]
    assert {span["parent"] for span in of_server} == {top["id"]}
    assert {span["parent"] for span in of_chat} == {chat["id"]}
    for span in collector.spans:
        assert top["start"] <= span["start"] <= span["end"] <= top["end"], span["name"]
    queue, prefill, decode, _ = of_chat
    assert queue["end"] == prefill["start"] <= prefill["end"] == decode["start"] <= decode["end"]
    assert not any(span["failed"] for span in collector.spans)


@pytest.mark.parametrize("host", ["aiohttp", "hypercorn"])  # the tests' uvicorn is forced to exit without an end
async def test_each_host_has_traces(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Without a client's trace it is a new one. Probes have none."""
    async with collecting(monkeypatch) as collector, running(http_host=host, alias="tiny") as server:
        await server.post("/v1/completions", {"prompt": "say:hi", "n": 2})
        await server.get("/health")
        await server.post("/v1/completions", {"prompt": "step-boom"})
        await server.post("/v1/completions", {"prompt": 1.5})
    tops = [span for span in collector.spans if span["kind"] == SERVER]
    assert [(span["http.response.status_code"], span["failed"]) for span in tops] == [
        (200, False),
        (500, True),
        (400, False),
    ]
    assert len({span["trace"] for span in tops}) == 3
    assert {span["parent"] for span in tops} == {""}
    assert sum(span["name"] == "decode" for span in collector.spans) == 2
    assert collector.resources[0]["service.name"] == "logitless"


async def test_the_sampler_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with collecting(monkeypatch) as collector, running() as server:
        assert (await server.post("/v1/completions", {"prompt": "say:hi"}))[0] == 200
    assert collector.spans == []


async def test_a_collector_that_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PATIENCE", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # its thread ends soon after the server
    async with running() as server:
        assert (await server.post("/v1/completions", {"prompt": "say:hi"}))[0] == 200


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin: must be otlp, console or none"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: must be http/protobuf",
        ),
    ],
)
def test_settings_that_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionConflict, match=f"^{line}$"):
        tracing.start()


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    line = r"^OTEL_EXPORTER_OTLP_ENDPOINT is set, and traces need pip install 'logitless\[otel\]'$"
    with pytest.raises(OptionConflict, match=line):
        tracing.start()


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}, {}])
def test_nothing_is_made_unless_traces_are_asked_for(monkeypatch: pytest.MonkeyPatch, off: dict[str, str]) -> None:
    if off:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    assert tracing.start() is None


def test_nothing_is_imported_without_the_variables() -> None:
    code = (
        "import json, sys\n"
        "from logitless.server.observing import tracing\n"
        "tracing.start()\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
