"""Random requests: each gets an answer or a refusal, never a 500, and the server lives on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.server.routes import all_routes
from tests.helpers.fuzz import examples

MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PLAUSIBLE: dict[str, list[Any]] = {
    "prompt": ["hi", [1, 2], ["a", "b"], ["a", 5], {"prompt_string": "x"}, "", [[1], [2]]],
    "input": ["hi", ["a", "b"], [1, 2], [MESSAGE], [{"type": "message", **MESSAGE}]],
    "content": ["hi", ["a"], [1, 2], ""],
    "messages": [
        [MESSAGE],
        [MESSAGE, {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ],
    "query": ["hi"],
    "documents": [["a", "b"]],
    "texts": [["a"]],
    "tokens": [[1, 2], []],
    "input_prefix": ["a"],
    "input_suffix": ["b"],
    "input_extra": [[{"filename": "x", "text": "y"}]],
    "system": ["s", [{"type": "text", "text": "a"}]],
    "instructions": ["x"],
    "max_output_tokens": [3],
    "n_predict": [0, 1, 3],
    "max_tokens": [0, 2, 3],
    "stream": [True, False],
    "n": [1, 2],
    "temperature": [0, 0.7, 5],
    "top_k": [0, 1, 40],
    "top_p": [0.1, 1],
    "min_p": [0.5],
    "typical_p": [0.4],
    "seed": [1, -1, 2**40],
    "mirostat": [0, 1, 2],
    "logit_bias": [{"1": 1}, [[1, False]], [["a", -1]]],
    "n_probs": [0, 3],
    "logprobs": [True, 2],
    "top_logprobs": [2],
    "post_sampling_probs": [True],
    "stop": ["a", ["x", "y"]],
    "samplers": [["top_k"], "kt"],
    "id_slot": [0, 1, -1],
    "grammar": ['root ::= "a"', "root ::= root", "root ::= [", "root ::= [^a]*"],
    "json_schema": [{}, {"type": "integer"}, {"type": "x"}],
    "response_format": [
        {"type": "json_object"},
        {"type": "regex", "regex": "a+"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
    ],
    "grammar_lazy": [True],
    "grammar_triggers": [[{"type": "word", "value": "a"}], [{"type": 2, "value": "(a+)+b"}]],
    "preserved_tokens": [["<s>"]],
    "tools": [[TOOL], []],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [True],
    "chat_template_kwargs": [{"x": 1}],
    "reasoning_format": ["none", "auto"],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "echo": [True],
    "best_of": [2],
    "suffix": [""],
    "ignore_eos": [True],
    "cache_prompt": [False],
    "xtc_probability": [0.5],
    "dry_multiplier": [0.8],
    "dry_sequence_breakers": [["\n"]],
    "repeat_penalty": [1.3],
    "adaptive_target": [0.5],
    "response_fields": [["content", "timings/prompt_n"]],
    "return_tokens": [True],
    "timings_per_token": [True],
    "stream_options": [{"include_usage": True}],
    "lora": [[{"id": 0, "scale": 1}], []],
    "encoding_format": ["base64", "float"],
    "pooling": ["mean"],
    "embd_normalize": [2],
    "top_n": [1],
    "t_max_predict_ms": [1],
    "with_pieces": [True],
    "add_special": [True],
    "parse_special": [False],
    "prediction": [{"type": "content", "content": "abc"}],
    "draft_tokens": [[1, 2]],
    "speculative.type": ["ngram-simple"],
    "speculative.n_max": [3],
    "previous_response_id": ["x"],
    "text": [{"format": {"type": "text"}}],
    "thinking": [{"type": "enabled"}],
    "metadata": [{"a": "b"}],
    "model": ["shakespeare", "shakespeare:latest"],
    "options": [
        {"num_predict": 2},
        {"num_ctx": 9, "num_predict": 2},
        {"temperature": 0, "stop": ["a"], "num_predict": 1},
    ],
    "images": [["aGk="], []],
    "think": [True, False, "low"],
    "format": ["json", {"type": "integer"}, ""],
    "keep_alive": [0, -1, "5m", "-1m", 1.5],
    "template": ["{{ .Prompt }}", "{{ if .System }}{{ .System }}{{ end }}", "{{ .X }}"],
    "context": [[1, 2], [], [10**9]],
    "raw": [True, False],
    "truncate": [True, False],
    "user": ["me"],
    "filename": ["a.bin", "../a", "/etc/passwd", "a\0b"],
    "training_file": ["file-1"],
}
ODD = (
    "",
    "\0",
    "é😀",
    "a" * 3000,
    "{{ 1 }}",
    "{% for i in range(9) %}x{% endfor %}",
    "../../etc/passwd",
    "%s%n",
    "\x1b[31m\n",
)
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 0.5, 1e308, -1e308, 1e-320, 2**31, -(2**63), 2**64, 10**40]),
    st.integers(-3, 300),
    st.sampled_from(ODD),
    st.text(max_size=6),
)
ANY = st.recursive(
    LEAF, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=6
)
NAMES = sorted(PLAUSIBLE)
POSTS = sorted(path.replace("{id}", "0") for route in all_routes() if route.method == "post" for path in route.paths)
NEEDED = (
    "model",
    "prompt",
    "messages",
    "input",
    "content",
    "tokens",
    "query",
    "documents",
    "input_prefix",
    "input_suffix",
    "max_tokens",
)


@st.composite
def bodies(draw: Any) -> Any:
    """Mostly a sensible request with a few fields that are not."""
    if draw(st.integers(0, 19)) == 0:
        return draw(ANY)
    body = {name: draw(st.sampled_from(PLAUSIBLE[name])) for name in NEEDED if draw(st.integers(0, 9))}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=4)):
        body[name] = draw(st.one_of(st.sampled_from(PLAUSIBLE[name]), ANY))
    if draw(st.integers(0, 5)) == 0:  # one level deeper
        inner = [key for key, value in body.items() if isinstance(value, dict) and value]
        if inner:
            key = draw(st.sampled_from(inner))
            body[key] = {**body[key], draw(st.sampled_from(sorted(body[key]))): draw(ANY)}
    return body


class Client:
    """Requests over one connection, as bytes in and out."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        try:
            self.connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            response = self.connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError):
            self.connection.close()
            raise


@pytest.fixture(scope="module")
def served(serve_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder, data = tmp_path_factory.mktemp("slots"), tmp_path_factory.mktemp("data")
    flags = ("-c", "128", "-np", "2", "-kvu", "--metrics", "--props", "--embeddings", "--slot-save-path", str(folder))
    flags += ("--data-dir", str(data))
    server = serve_module(None, "--demo", *flags)
    client = Client(server.url)
    yield server, client
    client.connection.close()


def judge(status: int, raw: bytes) -> None:
    text = raw.decode("utf-8")
    assert "Traceback" not in text
    assert status in (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 501, 503), (status, text)
    if status != 200 and status != 405:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
        assert "\n" not in message
    elif text.startswith("data: ") or "\ndata: " in text:
        for line in text.splitlines():
            if line.startswith("data: {"):
                assert json.loads(line[6:]).get("error", {}).get("code") != 500, line


@settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(POSTS), body=bodies())
def test_bodies(served: Any, path: str, body: Any) -> None:
    _, client = served
    judge(*client.ask("POST", path, json.dumps(body).encode("utf-8", "surrogatepass")))


PIECES = [
    b"--b\r\n",
    b"--b--\r\n",
    b"\r\n",
    b"\r\n\r\n",
    b'Content-Disposition: form-data; name="purpose"',
    b'Content-Disposition: form-data; name="file"; filename="a.jsonl"',
    b'Content-Disposition: form-data; name="file"; filename="../a"',
    b"Content-Disposition: form-data; name=",
    b"Content-Disposition: ",
    b"Content-Transfer-Encoding: base64",
    b"Content-Encoding: gzip",
    b"Content-Type: multipart/mixed; boundary=c",
    b"Content-Length: 9999",
    b"fine-tune",
    b'{"text": "hello"}\n',
    b'{"messages": [{"role": "user"}]}\n',
    b"\0",
    b"\xff\xfe",
    b"--c\r\n",
]
PURPOSE = b"\r\n".join([PIECES[0][:-2], PIECES[4], b"", b"fine-tune", b""])


@settings(max_examples=examples(80), suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(
        ["multipart/form-data; boundary=b"] * 6 + ["multipart/form-data", "multipart/mixed; boundary="]
    ),
    begun=st.sampled_from([b"", PURPOSE]),
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=12),
)
def test_uploads(served: Any, kind: str, begun: bytes, pieces: list[bytes]) -> None:
    _, client = served
    judge(*client.ask("POST", "/v1/files", begun + b"".join(pieces), **{"Content-Type": kind}))


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "POST"]),
    path=st.sampled_from([*(path for route in all_routes() for path in route.paths), "/v1/files", "/v1/nothing", "/"]),
    extra=st.sampled_from(
        [
            "",
            "?action=save",
            "?fail_on_no_slot=1",
            "/../../etc/passwd",
            "/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
            "/%00",
            "/%0a",
            "?limit=x",
            "//",
        ]
    ),
)
def test_paths(served: Any, method: str, path: str, extra: str) -> None:
    _, client = served
    status, text = client.ask(method, path.replace("{id}", "0").replace("{id:.+}", "x") + extra)
    assert b"root:" not in text
    assert status < 500 or status in (501, 503), (method, path, extra, text)


def test_the_server_is_well_and_has_said_nothing_bad(served: Any) -> None:
    server, client = served
    status, text = client.ask("POST", "/completion", b'{"prompt": "a", "n_predict": 3, "temperature": 0}')
    assert status == 200, text
    server.process.terminate()
    err = server.ended()
    assert "Traceback" not in err
    assert " failed:" not in err, err[-3000:]
    assert server.process.returncode == 0
