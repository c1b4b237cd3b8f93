"""Rollouts: answers sampled by a training run as requests of the scheduler.

They run on the weights that are being trained, which are not copied, in the time that training has
(engine/time_sharing.py): their steps have no rows of users, and they give up slots and KV blocks
for users. Answers to one prompt share its prefix."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from logitless.engine.errors import GaveWay, RequestError
from logitless.engine.requests import BATCH_PRIORITY, CompletionRequest, Failed, Finished, Token
from logitless.engine.sampling.params import SamplingParams
from logitless.engine.sequence import Sequence as Generation
from logitless.models.adapters.stacked_lora import Choice
from logitless.models.chat.tool_calls import Message, Parser, Style, ToolCall
from logitless.models.tokenizer import StreamDecoder, Tokenizer
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import Grade, Grader, Sample, graded
from logitless.training.policy.reinforcement import Answer, GradeAll
from logitless.training.step import Slice, Slices

if TYPE_CHECKING:
    from logitless.engine.runner.model_runner import ModelRunner
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.models.chat.template import ChatTemplate
    from logitless.models.model import Model
    from logitless.training.data.tokenize_rows import I32

N_THREADS = 8  # gradings at once
NOTHING_TO_DO = Slice(math.inf)  # users have all slots


class Rollouts:
    """Samples from a model whose weights change. A training.policy.reinforcement.Policy."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, model: Model, name: str) -> None:
        """`model`: its weights are variables of the runner's session. `name`: of the run."""
        self._scheduler, self._weight_sets, self._name = scheduler, runner.weight_sets, name
        self.handle = runner.weight_sets.lend(model)

    def close(self) -> None:
        """Forget the model; nothing samples from it any more."""
        self._weight_sets.recall(self.handle)

    def sample(
        self, prompts: Sequence[I32], seeds: Sequence[int], max_tokens: int, version: int
    ) -> Slices[list[Answer]]:
        """An answer to each prompt, in slices. TrainingError: one cannot be sampled."""
        requests = [
            self._request(prompt, seed, max_tokens, version) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        waiting, running = deque(range(len(requests))), dict[Generation, int]()
        tokens: list[list[tuple[int, float]]] = [[] for _ in requests]
        n_done = 0
        try:
            while n_done < len(requests):
                while waiting and self._has_room:
                    i = waiting.popleft()
                    tokens[i] = []
                    running[self._submit(requests[i])] = i
                began = time.perf_counter()
                events = self._scheduler.step_background()
                for seq, event in events:
                    i = running.get(seq, -1)
                    if i < 0:
                        continue
                    if isinstance(event, Token):
                        assert event.prob is not None
                        tokens[i].append((event.id, event.prob.value))
                    elif isinstance(event, Finished):
                        del running[seq]
                        n_done += 1
                    elif isinstance(event, Failed):
                        del running[seq]
                        if event.code != GaveWay.code:  # else another request has its slot now
                            raise TrainingError(f"an answer could not be sampled: {event.message}")
                        waiting.appendleft(i)
                yield Slice(time.perf_counter() - began) if running else NOTHING_TO_DO
        finally:
            for seq in running:
                self._scheduler.cancel(seq)
        return [
            Answer(np.array([id for id, _ in own], np.int32), np.array([x for _, x in own], np.float32))
            for own in tokens
        ]

    @property
    def _has_room(self) -> bool:
        scheduler = self._scheduler
        return sum(not slot.is_processing for slot in scheduler.slots) > len(scheduler.queue)

    def _submit(self, request: CompletionRequest) -> Generation:
        try:
            return self._scheduler.submit(request, self._name, choice=Choice(self.handle))
        except RequestError as error:
            raise TrainingError(f"an answer could not be sampled: {error.message}") from None

    def _request(self, prompt: I32, seed: int, max_tokens: int, version: int) -> CompletionRequest:
        sampling = SamplingParams(samplers=("temperature",), temperature=1.0, seed=seed, n_probs=1)
        return CompletionRequest(
            tuple(prompt.tolist()),
            sampling,
            n_predict=max_tokens,
            cache_salt=f"{self._name}/{version}",  # prefixes of other weights are none of these
            priority=BATCH_PRIORITY + 1,
            background=True,
        )


def grading(
    grader: Grader, tokenizer: Tokenizer, template: ChatTemplate | None = None, n_threads: int = N_THREADS
) -> GradeAll:
    """Grades answers by their texts, and by the calls in them of their row's tools as the `template`
    writes calls. `n_threads`: gradings at once."""
    calls = template.calls if template is not None else None
    markers = (
        [tokenizer.encode(text, add_special=False, parse_special=True) for text in calls.preserved] if calls else []
    )
    preserved = frozenset(ids[0] for ids in markers if len(ids) == 1)

    def sample(tokens: I32, item: Mapping[str, Any]) -> Sample:
        names = frozenset(_tools_of(item)) if calls else frozenset()
        decoder = StreamDecoder(tokenizer, preserved=preserved if names else frozenset())
        text = "".join(decoder.push(int(id)) for id in tokens if not tokenizer.is_eog(int(id))) + decoder.flush()
        if not names:
            return Sample(text)
        parser = Parser(Style(calls=calls, names=names))
        message = Message().add([*parser.push(text), *parser.finish()])
        return Sample(message.content, [_call_row(call) for call in message.calls])

    def grade(tokens: I32, item: Mapping[str, Any]) -> Grade:
        return graded(grader, sample(tokens, item), item)

    return lambda answers: _on_threads(grade, answers, n_threads)


def _tools_of(item: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tools of a row, whose prompt has been made with them."""
    for tool in item.get("tools") or ():
        yield str(tool.get("function", tool).get("name"))


def _call_row(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _on_threads(
    grade: Callable[[I32, Mapping[str, Any]], Grade], answers: Sequence[tuple[I32, Mapping[str, Any]]], n: int
) -> list[Grade]:
    """The grades, by daemon threads: the process may end meanwhile. After `n` gradings one after
    another whose time ran out, the grader is not asked again: the other answers have their fault."""
    found: list[Any] = [None] * len(answers)
    left: Iterator[tuple[int, tuple[I32, Mapping[str, Any]]]] = iter(enumerate(answers))
    lock = threading.Lock()
    n_timed_out, last = 0, Grade(0.0)

    def work() -> None:
        nonlocal n_timed_out, last
        while True:
            with lock:
                i, answer = next(left, (-1, None))
                hangs = n_timed_out >= n
            if answer is None:
                return
            try:
                found[i] = last if hangs else grade(*answer)
            except Exception as error:
                found[i] = error
                continue
            with lock:
                last = found[i]
                n_timed_out = n_timed_out + 1 if last.timed_out else 0

    threads = [threading.Thread(target=work, name="grader", daemon=True) for _ in range(min(n, len(answers)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if error := next((one for one in found if isinstance(one, Exception)), None):
        raise error
    return found
