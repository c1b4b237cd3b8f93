"""Sampled answers of reinforcement learning: their texts and calls of tools, graded and answered.

A turn of an answer ends with the vocabulary's end of generation. The answer's text is its last
turn's; its calls are those of all turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.deltas import Message, ToolCall
from logitless.models.chat.tool_calls.parser import Parser, Style
from logitless.models.tokenizer import StreamDecoder, Tokenizer
from logitless.training.data.tokenize_rows import I32
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import Grade, GradedSample, GradeFault, Grader, graded
from logitless.training.graders.parse import endpoint_of
from logitless.training.graders.remote import Endpoint
from logitless.training.policy.reinforcement import Answered, AskTools, GradeAll, ToolTurn

N_THREADS = 8  # gradings, or answers of tools, at once


class _Timed(Protocol):
    @property
    def timed_out(self) -> bool: ...


T = TypeVar("T", bound=_Timed)


class AnswerReader:
    """Reads answers' tokens: the text, and the calls of their row's tools as the `template` writes calls."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._calls = template.calls if template is not None else None
        texts = self._calls.preserved if self._calls else ()
        markers = [tokenizer.encode(text, add_special=False, parse_special=True) for text in texts]
        self._preserved = frozenset(ids[0] for ids in markers if len(ids) == 1)

    def sample(self, tokens: I32, item: Mapping[str, Any]) -> GradedSample:
        """The answer as graders see it."""
        messages = [self.message(turn, item) for turn in self._turns(tokens)] or [Message()]
        return GradedSample(messages[-1].content, [call_row(call) for message in messages for call in message.calls])

    def last_turn(self, tokens: I32) -> I32:
        turns = self._turns(tokens)
        return turns[-1] if turns else tokens

    def _turns(self, tokens: I32) -> list[I32]:
        ends = [i + 1 for i, id in enumerate(tokens) if self.tokenizer.is_eog(int(id))]
        return [turn for turn in np.split(tokens, ends) if len(turn)]

    def message(self, turn: I32, item: Mapping[str, Any]) -> Message:
        """The text and the calls of one turn."""
        words, names = self.tokenizer, frozenset(_tools_of(item) if self._calls else ())
        decoder = StreamDecoder(words, preserved=self._preserved if names else frozenset())
        text = "".join(decoder.push(int(id)) for id in turn if not words.is_eog(int(id))) + decoder.flush()
        if self._calls is None or not names:
            return Message(content=text)
        parser = Parser(Style(calls=self._calls, names=names))
        message = Message().add([*parser.push(text), *parser.finish()])
        for i, call in enumerate(message.calls):
            if call.id not in text:  # the parser's is random
                call.id = f"{self._calls.id_prefix}{i:0{self._calls.id_letters}d}"
        return message


def grading(grader: Grader, reader: AnswerReader, n_threads: int = N_THREADS) -> GradeAll:
    """Grades answers. `n_threads`: gradings at once."""

    def grade(tokens: I32, item: Mapping[str, Any]) -> Grade:
        return graded(grader, reader.sample(tokens, item), item)

    return lambda answers: _on_threads(grade, answers, n_threads)


def tools_of(grader: Grader, max_tool_turns: int, reader: AnswerReader) -> AskTools | None:
    """Has the calls at answers' ends answered by the grader's endpoint; None: nothing does.
    TrainingError: there is no endpoint, or the chat template knows no tools."""
    if not max_tool_turns:
        return None
    endpoint = endpoint_of(grader)
    if endpoint is None:
        raise TrainingError("max_tool_turns: needs a grader of type endpoint, which answers the tools")
    if reader.template is None or reader.template.calls is None:
        raise TrainingError("max_tool_turns: the model's chat template knows no tools")
    turn = partial(_tool_turn, endpoint, reader, reader.template)
    return lambda answers: _on_threads(turn, answers, N_THREADS)


def _tool_turn(
    endpoint: Endpoint, reader: AnswerReader, template: ChatTemplate, tokens: I32, item: Mapping[str, Any]
) -> ToolTurn:
    words, last = reader.tokenizer, reader.last_turn(tokens)
    if not len(last) or not words.is_eog(int(last[-1])):
        return ToolTurn()  # it has no more room
    message = reader.message(last, item)
    if not message.calls:
        return ToolTurn()
    calls = [call_row(call) for call in message.calls]
    try:
        outputs = [endpoint.call_tool(call, item) for call in calls]
        end = words.piece(int(last[-1])).decode("utf-8", "replace")
        text = results_text(template, message.content, calls, outputs, item.get("tools"), end)
    except GradeFault as fault:
        return ToolTurn(problem=str(fault), timed_out=fault.timed_out)
    except ChatTemplateError as error:
        return ToolTurn(problem=" ".join(str(error).split()))
    return ToolTurn(np.array(words.encode(text, add_special=False, parse_special=True), np.int32))


def results_text(
    template: ChatTemplate,
    content: str,
    calls: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
    tools: Any,
    end: str,
) -> str:
    """Text after a turn that ended with the token `end`: tools' results, and the next turn's begin.

    It is the part of a rendered conversation behind the last such token before the results; without
    one, the part that the same conversation has not without the results."""
    begun: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
    ]

    def rendered(outputs: Sequence[str]) -> str:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": output}
            for call, output in zip(calls, outputs, strict=True)
        ]
        return template.render([*begun, *results], add_generation_prompt=True, tools=tools)

    whole = rendered(outputs)
    before = _shared(rendered(["0"] * len(calls)), rendered(["1"] * len(calls)))
    at = whole.rfind(end, 0, before) if end else -1
    if at >= 0:
        return whole[at + len(end) :]
    return whole[_shared(whole, template.render(begun, add_generation_prompt=False, tools=tools)) :]


def _shared(a: str, b: str) -> int:
    """Characters of the texts' common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def call_row(call: ToolCall) -> dict[str, Any]:
    """A call in the shape of OpenAI's messages."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tools_of(item: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tools of a row, whose prompt has been made with them."""
    for tool in item.get("tools") or ():
        yield str(tool.get("function", tool).get("name"))


def _on_threads(work: Callable[[I32, Mapping[str, Any]], T], answers: Answered, n: int) -> list[T]:
    """The results, by daemon threads: the process may end meanwhile. After `n` of them one after
    another whose time ran out, nothing is asked again: the other answers have their fault."""
    grades: list[Any] = [None] * len(answers)
    remaining: Iterator[tuple[int, tuple[I32, Mapping[str, Any]]]] = iter(enumerate(answers))
    lock = threading.Lock()
    n_timed_out = 0
    last: T | None = None

    def serve() -> None:
        nonlocal n_timed_out, last
        while True:
            with lock:
                i, answer = next(remaining, (-1, None))
                hangs = n_timed_out >= n
            if answer is None:
                return
            try:
                result: Any = last if hangs else work(*answer)
            except Exception as error:
                grades[i] = error
                continue
            grades[i] = result
            with lock:
                last = result
                n_timed_out = n_timed_out + 1 if result.timed_out else 0

    threads = [threading.Thread(target=serve, name="grader", daemon=True) for _ in range(min(n, len(answers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if error := next((one for one in grades if isinstance(one, Exception)), None):
        raise error
    return grades
