"""Structured output through the real port: every field for it, in a batch, with drafts and lazy triggers."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.commands import command

PROMPT = "Once upon a time"
ANSWER = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Lily", "Tim"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(serve_here_module: Any) -> Any:
    return serve_here_module(None, "--demo", "-c", "2048", "-np", "8", "-kvu", "--metrics")


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def answer_of(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert value["name"] in ("Lily", "Tim")
    assert 0 <= value["age"] <= 99
    assert all(isinstance(tag, bool) for tag in value["tags"])


def test_a_schema_of_openai(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}
    messages = [{"role": "user", "content": PROMPT}]
    for seed in range(3):
        chat = client.chat.completions.create(
            model="any", messages=messages, max_tokens=200, seed=seed, response_format=form
        )
        answer_of(chat.choices[0].message.content)
        assert chat.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="any", messages=messages, max_tokens=200, seed=0, response_format=form, stream=True
    )
    answer_of("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": 'root ::= ("ab" | [0-9]){3} "!"'}, r"(ab|\d){3}!"),
        ({"grammar": 'root ::= "(" root ")" | "x"', "temperature": 0}, r"\(*x\)*"),
        ({"grammar": 'root ::= "é" "😀"{2}'}, "é😀😀"),
        (
            {"json_schema": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}},
            r"\[\s*1\s*,\s*1\s*\]",
        ),
        ({"json_schema": {"type": "string", "pattern": "^[a-c]{4}$"}, "top_k": 1}, '"[a-c]{4}"'),
        ({"response_format": {"type": "regex", "regex": "[a-f0-9]{8}(-x)?"}}, "[a-f0-9]{8}(-x)?"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}}, "yes|no"),
        ({"response_format": {"type": "json_schema", "schema": {"type": "null"}}}, "null"),
        ({"response_format": {"type": "text"}, "grammar": 'root ::= "a"', "mirostat": 2}, "a"),
        ({"grammar": 'root ::= "a" "b"', "samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.5}, "ab"),
        ({"grammar": "root ::= [x-z]{5}", "xtc_probability": 1, "xtc_threshold": 0.01}, "[xyz]{5}"),
        ({"grammar": "root ::= [x-z]{5}", "repeat_penalty": 1.5, "ignore_eos": True}, "[xyz]{5}"),
    ],
)
def test_every_way_to_ask(server: Any, fields: dict[str, Any], pattern: str) -> None:
    for path in ("/completion", "/v1/completions"):
        body = {"prompt": PROMPT, "max_tokens": 200, "seed": 7, **fields}
        reply = server.post(path, body)
        text = reply["content"] if path == "/completion" else reply["choices"][0]["text"]
        assert re.fullmatch(pattern, text), text
        if path == "/completion":
            assert reply["stop_type"] == "eos"  # the end of the grammar ends the request


def test_json_object_is_an_object(server: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "response_format": {"type": "json_object"}}
    assert server.post("/v1/completions", body)["choices"][0]["text"].startswith("{")


def test_company_changes_nothing(server: Any) -> None:
    """Constrained and free requests together give what each gives alone, and read back no more than others: four bytes
    a token, and four more where a row had to wait for its mask."""
    forms: list[dict[str, Any]] = [
        {},
        {"grammar": "root ::= [a-z ]{30,40}"},
        {"n_probs": 3},
        {"json_schema": ANSWER},
        {"grammar": 'root ::= "(" root ")" | [0-9]', "temperature": 1.5, "mirostat": 1},
        {"temperature": 0},
        {
            "grammar": "root ::= .{20}",
            "grammar_lazy": True,
            "grammar_triggers": [{"type": "pattern", "value": "[aeiou]"}],
        },
        {"response_format": {"type": "regex", "regex": "(ab?c){8}"}, "n_probs": 2, "post_sampling_probs": True},
    ]
    bodies = [
        {"prompt": PROMPT, "n_predict": 40, "seed": 50 + i, "return_tokens": True, "cache_prompt": False, **form}
        for i, form in enumerate(forms)
    ]
    kept = ("content", "tokens", "stop_type", "completion_probabilities")

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        reply = server.post("/completion", body)
        return {key: reply.get(key) for key in kept}

    def counters() -> tuple[float, float]:
        values = dict(line.rsplit(" ", 1) for line in server.get("/metrics").splitlines() if line[0] != "#")
        return float(values["logitless:bytes_read_total"]), float(values["llamacpp:tokens_predicted_total"])

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(ask, bodies)) == alone
        before = counters()
        list(pool.map(ask, [body for body in bodies if "n_probs" not in body]))
        n_bytes, n_tokens = (after - start for after, start in zip(counters(), before, strict=True))
        assert 4 * n_tokens <= n_bytes <= 8 * n_tokens


def test_probabilities_before_sampling_know_no_grammar(server: Any) -> None:
    body = {"prompt": PROMPT, "n_predict": 1, "temperature": 0, "n_probs": 5}
    free = server.post("/completion", body)["completion_probabilities"][0]
    bound = server.post("/completion", {**body, "grammar": 'root ::= "~"'})
    assert bound["content"] == "~"
    assert bound["completion_probabilities"][0]["top_logprobs"] == free["top_logprobs"]
    after = server.post("/completion", {**body, "grammar": 'root ::= "~"', "post_sampling_probs": True})
    assert after["completion_probabilities"][0]["prob"] == 1.0


def test_drafts_change_nothing(server: Any) -> None:
    """Right, wrong and forbidden guesses under a grammar, which may also begin in the middle of a draft."""
    body = {"prompt": PROMPT, "n_predict": 60, "seed": 11, "return_tokens": True}
    lazy_e = {
        "grammar": "root ::= .{3} [0-9]{4}",
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": "e"}],
    }
    for bound in ({"json_schema": ANSWER}, lazy_e, {"grammar": "root ::= [a-z ]{9} [0-9]+", "temperature": 2}):
        plain = server.post("/completion", {**body, **bound})
        right = plain["tokens"]
        for draft in (right, [*right[:5], right[5] ^ 1, *right[6:]], [right[0]] * 20):
            drafted = server.post("/completion", {**body, **bound, "draft_tokens": draft})
            assert drafted["tokens"] == right
            assert drafted["timings"]["draft_n"] > 0
        drafted = server.post("/completion", {**body, **bound, "draft_tokens": right})
        assert drafted["timings"]["draft_n_accepted"] > 0  # how many depends on which masks came in time


def test_trigger_begins_lazy_grammar(server: Any) -> None:
    """Free until the trigger, and from it on only what the grammar allows; without one, free to the end."""
    body = {"prompt": PROMPT, "n_predict": 60, "seed": 5, "return_tokens": True}
    free = server.post("/completion", body)
    text, tokens = free["content"], free["tokens"]
    word = text[12:15]
    at = text.index(word)
    pieces = [d["piece"] for d in server.post("/tokenize", {"content": text, "with_pieces": True})["tokens"]]
    assert len(pieces) > 10
    bound = {"grammar": f"root ::= {json.dumps(word)} [0-9]{{6}}", "grammar_lazy": True}
    for trigger in (
        {"type": "word", "value": word},
        {"type": 1, "value": word},
        {"type": "pattern", "value": re.escape(word)},
        {"type": "pattern", "value": f"[^\x01]*?({re.escape(word)})"},
        {"type": 3, "value": f"(?s:.*?)({re.escape(word)})(?s:.*)"},
    ):
        told = server.post("/completion", {**body, **bound, "grammar_triggers": [trigger]})
        assert told["content"][: at + len(word)] == text[: at + len(word)], trigger
        assert re.fullmatch(r"\d{6}", told["content"][at + len(word) :]), (trigger, told["content"])
        assert told["generation_settings"]["grammar_lazy"] is True
        assert told["generation_settings"]["grammar_triggers"] == [trigger]
    token = tokens[8]
    first = tokens.index(token)
    bound["grammar"] = f"root ::= {json.dumps(piece_of(server, token))} [0-9]{{6}}"
    told = server.post("/completion", {**body, **bound, "grammar_triggers": [{"type": "token", "token": token}]})
    assert told["tokens"][: first + 1] == tokens[: first + 1]
    assert re.search(r"\d{6}$", told["content"])
    never = {"grammar_triggers": [{"type": "word", "value": "\x01\x02"}], "preserved_tokens": ["<s>", "no token"]}
    assert server.post("/completion", {**body, **bound, **never})["content"] == text


def piece_of(server: Any, token: int) -> str:
    return server.post("/detokenize", {"tokens": [token]})["content"]


def test_flags_give_a_default(serve_here: Any, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["x", "y"]}')
    server = serve_here(None, "--demo", "-c", "256", "-np", "1", "-jf", str(tmp_path / "schema.json"))
    body = {"prompt": PROMPT, "n_predict": 20, "seed": 1}
    assert server.post("/completion", body)["content"] in ('"x"', '"y"')
    assert server.post("/completion", {**body, "grammar": 'root ::= "ab"'})["content"] == "ab"
    assert server.post("/completion", {**body, "grammar": ""})["content"] not in ('"x"', '"y"')


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grammar", 'root ::= "a'], "--grammar: line 1, column 10: a literal without its end"),
        (["-j", '{"type": "x"}'], "--json-schema: in the schema at /: Invalid type: x"),
        (["--grammar", 'root ::= "a"', "-j", "{}"], "--json-schema: cannot be given together with --grammar"),
    ],
)
def test_wrong_flags_are_told_in_one_line(flags: list[str], message: str) -> None:
    ended = command("serve", "--port", "0", *flags)
    assert ended.returncode == 2
    assert message in ended.stderr.decode().splitlines()[-1]
