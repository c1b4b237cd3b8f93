"""Tools in rollouts: calls at an answer's end, answered by an endpoint, and written as the template does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logitless.engine.finetuning.sampled_answers import AnswerReader, results_text, tools_of
from logitless.models import tokenizer
from logitless.models.chat.template import ChatTemplate
from logitless.models.tokenizer import Tokenizer
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import Surroundings
from logitless.training.graders.parse import parse_grader
from logitless.training.policy.reinforcement import ToolTurn
from logitless.training.scratch import byte_vocabulary

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
ROW = {"tools": TOOLS, "answer": 5}
AFTER = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"  # Qwen's format


@pytest.fixture(scope="module")
def template(shared_data: Path) -> ChatTemplate:
    source = (shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    return ChatTemplate(source, bos_token="", eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer.from_metadata({name: key.value for name, key in byte_vocabulary()[0].items()}, path="bytes")


@pytest.fixture
def serve() -> Iterator[Callable[[Any, int], tuple[str, list[dict[str, Any]]]]]:
    """An endpoint that answers all with this: its address, and the bodies that came."""
    servers: list[HTTPServer] = []

    def start(answer: Any, status: int = 200) -> tuple[str, list[dict[str, Any]]]:
        came: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", came

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def asked(url: str, words: Tokenizer, template: ChatTemplate, text: str, *, ends: bool = True) -> ToolTurn:
    grader = parse_grader({"type": "endpoint", "url": url}, Surroundings(frozenset({"endpoint"})))
    ask = tools_of(grader, 1, AnswerReader(words, template))
    assert ask is not None
    assert words.eos_id is not None
    ids = [*words.encode(text, add_special=False), *([words.eos_id] if ends else [])]
    (turn,) = ask([(np.array(ids, np.int32), ROW)])
    return turn


def test_a_call_is_answered_by_the_endpoint(serve: Any, words: Tokenizer, template: ChatTemplate) -> None:
    url, came = serve({"output": {"sum": 5}})
    turn = asked(url, words, template, f"I add. {CALL}")
    assert turn.tokens is not None
    text = words.pieces(turn.tokens.tolist()).decode()
    assert text.endswith(AFTER.replace("5", '{"sum": 5}'))
    (body,) = came
    assert (body["type"], body["name"], body["item"]) == ("function_call", "add", ROW)
    assert json.loads(body["arguments"]) == {"a": 2, "b": 3}
    again = asked(url, words, template, f"I add. {CALL}")
    assert came[1] == body  # its id is not random
    assert again.tokens is not None
    assert again.tokens.tolist() == turn.tokens.tolist()


def test_answers_without_a_whole_call_end(serve: Any, words: Tokenizer, template: ChatTemplate) -> None:
    url, came = serve({"output": "5"})
    assert asked(url, words, template, "It is five.") == ToolTurn()
    assert asked(url, words, template, CALL, ends=False) == ToolTurn()  # cut by its length
    assert came == []


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [({"score": 1}, 200, 'did not answer {"output": TEXT} to a call of add'), ({}, 500, "answers 500")],
)
def test_a_call_without_a_result_is_a_problem(
    serve: Any, words: Tokenizer, template: ChatTemplate, answer: Any, status: int, problem: str
) -> None:
    url, _ = serve(answer, status)
    turn = asked(url, words, template, CALL)
    assert turn.tokens is None
    assert turn.problem == f"{url} {problem}"


def test_turns_without_an_endpoint_or_tools_are_refused(words: Tokenizer, template: ChatTemplate) -> None:
    check = parse_grader(
        {"type": "string_check", "input": "{{sample.output_text}}", "reference": "x", "operation": "eq"}
    )
    with pytest.raises(TrainingError, match=r"^max_tool_turns: needs a grader of type endpoint"):
        tools_of(check, 1, AnswerReader(words, template))
    assert tools_of(check, 0, AnswerReader(words, template)) is None
    endpoint = parse_grader({"type": "endpoint", "url": "http://x"}, Surroundings(frozenset({"endpoint"})))
    with pytest.raises(TrainingError, match=r"^max_tool_turns: the model's chat template knows no tools$"):
        tools_of(endpoint, 1, AnswerReader(words, None))


FORMATS = [  # of the templates' own documentation
    ("Qwen-Qwen3-0.6B", "<|im_end|>", AFTER),
    (
        "meta-llama-Llama-3.2-3B-Instruct",
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
]


@pytest.mark.parametrize(("name", "end", "after"), FORMATS, ids=[name for name, *_ in FORMATS])
def test_results_go_on_from_the_token_that_ended_the_turn(name: str, end: str, after: str, shared_data: Path) -> None:
    """In a whole conversation the same text follows the turn's end."""
    source = (shared_data / "templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source, bos_token="", eos_token=end)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}]
    text = results_text(template, "", calls, ["5"], TOOLS, end)
    assert text == after
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "5"},
    ]
    assert template.render(messages, tools=TOOLS).endswith(f"{end}{text}")


def test_graders_see_the_last_turn_and_all_calls(words: Tokenizer, template: ChatTemplate) -> None:
    assert words.eos_id is not None
    turns = [words.encode(text, add_special=False) for text in (CALL, "It is 5.")]
    ids = [*turns[0], words.eos_id, *turns[1], words.eos_id]
    sample = AnswerReader(words, template).sample(np.array(ids, np.int32), ROW)
    assert sample.text == "It is 5."
    assert [call["function"]["name"] for call in sample.tools] == ["add"]
