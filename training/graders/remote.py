"""Graders that ask others: a model for a score, an HTTP endpoint for a reward."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from logitless.training.graders.grade import (
    Complete,
    Grade,
    GradedSample,
    GradeFault,
    GraderError,
    Surroundings,
    check_template,
    filled,
)

SECONDS = 60.0  # that an endpoint may take
MOST_BYTES = 1 << 20  # of its answer
_SAMPLING = ("seed", "temperature", "top_p", "max_completions_tokens", "reasoning_effort")


@dataclass(frozen=True)
class ScoreModel:
    """A model's score of the answer, within `range`. It answers with JSON: {"result": number}."""

    name: str
    messages: Sequence[Mapping[str, str]]
    model: str
    range: tuple[float, float]
    sampling: Mapping[str, Any]
    complete: Complete
    kind: str = "score_model"

    @classmethod
    def parse(cls, name: str, spec: Mapping[str, Any], where: str, complete: Complete) -> ScoreModel:
        contents, model = spec.get("input"), spec.get("model")
        if isinstance(contents, str):
            contents = [{"role": "user", "content": contents}]
        if not isinstance(contents, list) or not contents:
            raise GraderError(f"{where}.input: must be a non-empty array of messages")
        if not isinstance(model, str):
            raise GraderError(f"{where}.model: must be a string")
        messages = [_message(message, f"{where}.input[{i}]") for i, message in enumerate(contents)]
        bounds = [0, 1] if spec.get("range") is None else spec["range"]
        if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_number, bounds)):
            raise GraderError(f"{where}.range: must be two numbers")
        if not bounds[0] < bounds[1]:
            raise GraderError(f"{where}.range: the first number must be less than the second")
        sampling = spec.get("sampling_params") or {}
        if not isinstance(sampling, Mapping) or (sampling.keys() - {*_SAMPLING}):
            raise GraderError(f"{where}.sampling_params: may have {', '.join(_SAMPLING)}")
        return cls(name, messages, model, (float(bounds[0]), float(bounds[1])), dict(sampling), complete)

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        messages = [{**m, "content": filled(m["content"], sample, item)} for m in self.messages]
        text, n_tokens = self.complete(self.model, messages, self.sampling)
        try:
            value = json.loads(text)["result"]
        except (ValueError, KeyError, TypeError):
            value = None
        if not _is_number(value):
            raise GradeFault(f'{self.model} did not answer {{"result": NUMBER}}', "model_grader_parse_error")
        low, high = self.range
        return Grade(min(max(float(value), low), high), tokens={self.model: n_tokens})


def _message(message: Any, where: str) -> Mapping[str, str]:
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system", "developer"):
        raise GraderError(f"{where}: must have the role user, assistant, system or developer")
    content = message.get("content")
    if isinstance(content, Mapping):
        content = [content]
    if isinstance(content, list):
        content = "".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    if not isinstance(content, str):
        raise GraderError(f"{where}.content: must be a text")
    return {"role": str(message["role"]), "content": check_template(content, f"{where}.content")}


@dataclass(frozen=True)
class Endpoint:
    """The reward that an HTTP server gives: POST {"sample", "item"}, answered with {"score": number}.
    It may answer the tools of a row, too (`max_tool_turns`)."""

    name: str
    url: str
    headers: Mapping[str, str]
    opener: urllib.request.OpenerDirector | None = None  # None: of any address
    kind: str = "endpoint"
    SECONDS: ClassVar[float] = SECONDS

    @classmethod
    def parse(cls, name: str, spec: Mapping[str, Any], where: str, around: Surroundings) -> Endpoint:
        url, headers = spec.get("url"), spec.get("headers") or {}
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise GraderError(f"{where}.url: must be an http:// or https:// address")
        if not isinstance(headers, Mapping) or not all(isinstance(v, str) for v in headers.values()):
            raise GraderError(f"{where}.headers: must be an object of strings")
        if around.is_refused(url):
            raise GraderError(f"{where}.url: is no public address; the server needs --allow-private-addresses")
        return cls(name, url, dict(headers), around.opener)

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        answer = post(self.url, {"sample": sample.row, "item": item}, self.headers, self.SECONDS, self.opener)
        score = answer.get("score") if isinstance(answer, Mapping) else None
        if not _is_number(score):
            raise GradeFault(f'{self.url} did not answer {{"score": NUMBER}}')
        return Grade(float(score))  # type: ignore[arg-type]

    def call_tool(self, call: Mapping[str, Any], item: Mapping[str, Any]) -> str:
        """The result of a tool that an answer calls: POST {"type": "function_call", "call_id", "name",
        "arguments", "item"}, answered with {"output": text or JSON}."""
        function = call["function"]
        body = {"type": "function_call", "call_id": call["id"], "item": item}
        body |= {"name": function["name"], "arguments": function["arguments"]}
        answer = post(self.url, body, self.headers, self.SECONDS, self.opener)
        output = answer.get("output") if isinstance(answer, Mapping) else None
        if output is None:
            raise GradeFault(f'{self.url} did not answer {{"output": TEXT}} to a call of {function["name"]}')
        return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def post(
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    seconds: float = SECONDS,
    opener: urllib.request.OpenerDirector | None = None,
) -> Any:
    """The JSON that a server answers to JSON. GradeFault: it does not, or not in time, or the opener
    refuses its address."""
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        until, raw = time.monotonic() + seconds, bytearray()
        with (opener or _OPENER).open(request, timeout=seconds) as reply:
            while piece := reply.read1(1 << 16):
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise GradeFault(f"{url} answers more than {MOST_BYTES} bytes")
                if time.monotonic() > until:
                    raise TimeoutError
        return json.loads(raw)
    except TimeoutError:
        raise GradeFault(f"{url} took more than {seconds:g} seconds", timed_out=True) from None
    except urllib.error.HTTPError as error:
        error.close()  # it is the reply, and holds the connection
        raise GradeFault(f"{url} answers {error.code}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise GradeFault(f"{url} took more than {seconds:g} seconds", timed_out=True) from None
        raise GradeFault(f"{url}: {' '.join(str(reason).split())}") from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A grader's address is the one that was given."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(NoRedirect)
RESULT = {  # a score model's answer
    "type": "json_schema",
    "json_schema": {
        "name": "score",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"result": {"type": "number"}},
            "required": ["result"],
            "additionalProperties": False,
        },
    },
}


def chat_body(model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request of a score model."""
    own = {"max_completions_tokens": "max_completion_tokens"}
    contents = {own.get(name, name): value for name, value in sampling.items() if value is not None}
    return {"model": model, "messages": list(messages), "response_format": RESULT, **contents}


def server_at(url: str, key: str = "") -> Complete:
    """Asks the models of an OpenAI-compatible server (`url` ends with /v1)."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def complete(model: str, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]) -> tuple[str, int]:
        try:
            answer = post(f"{url.rstrip('/')}/chat/completions", chat_body(model, messages, sampling), headers)
        except GradeFault as fault:
            raise GradeFault(str(fault), "model_grader_server_error", timed_out=fault.timed_out) from None
        try:
            text, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
            return str(text), int(usage.get("total_tokens") or 0)
        except (KeyError, IndexError, TypeError, ValueError):
            raise GradeFault(f"{url} answers no completion", "model_grader_server_error") from None

    return complete


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
