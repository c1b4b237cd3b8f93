"""Samples, grades and faults: the input and output of graders."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol
from urllib.request import OpenerDirector

from logitless.training.errors import TrainingError

# (model, messages, sampling parameters) → (its answer, tokens of the request and the answer)
Complete = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], tuple[str, int]]

_VARIABLE = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_PATH = re.compile(r"(?:sample|item)(?:\.[\w-]+|\[\d+\])*")
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")


class GraderError(TrainingError):
    """A grader that cannot be used: names its field."""


class GradeFault(Exception):
    """One answer could not be graded. `kind`: OpenAI's name of the error."""

    def __init__(self, message: str, kind: str = "other_error", *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.kind, self.timed_out = kind, timed_out


@dataclass(frozen=True)
class Surroundings:
    """The means that the operator gives graders. `complete`: asks a model, None: there is none."""

    allowed: frozenset[str] = frozenset()  # of `endpoint` and `python`
    complete: Complete | None = None
    opener: OpenerDirector | None = None  # of endpoints; None: of any address
    is_refused: Callable[[str], bool] = lambda url: False  # the opener refuses this address in any case


@dataclass(frozen=True)
class GradedSample:
    """A model's answer. `tools`: the calls in it, in the shape of OpenAI's messages."""

    text: str
    tools: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def row(self) -> dict[str, Any]:
        """The `sample` of templates and of `grade(sample, item)`."""
        try:
            parsed = json.loads(self.text)
        except ValueError:
            parsed = None
        return {"output_text": self.text, "output_json": parsed, "output_tools": list(self.tools)}


@dataclass
class Grade:
    """A reward, and how it came about. `parts`: rewards of a multi grader's own by name; `tokens`:
    of other models, by name; `errors`: OpenAI's names of faults, with details; `timed_out`: one is
    that time ran out."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """Why the reward does not count; "": it does."""
        return "; ".join(self.errors.values())


class Grader(Protocol):
    """Gives an answer a reward."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        """GradeFault: this answer cannot be graded."""


def graded(grader: Grader, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
    """The grade of an answer, whatever happens: with a fault, the reward is 0 and `errors` says why."""
    try:
        grade = grader.grade(sample, item)
    except GradeFault as fault:
        return Grade(0.0, errors={fault.kind: str(fault)}, timed_out=fault.timed_out)
    if not math.isfinite(grade.reward):
        return Grade(0.0, grade.parts, grade.tokens, {"other_error": f"the reward is {grade.reward}"})
    return grade


def check_template(text: str, where: str) -> str:
    """The template. GraderError: it names something else than `sample` and `item`."""
    for path in _VARIABLE.findall(text):
        if not _PATH.fullmatch(path):
            raise GraderError(f"{where}: {{{{ {path} }}}} is not like sample.output_text or item.NAME")
    return text


def filled(template: str, sample: GradedSample, item: Mapping[str, Any]) -> str:
    """The template with the values of its variables; objects as JSON. GradeFault: one is not there."""

    def value(match: re.Match[str]) -> str:
        path = match[1]
        grades: Any = sample.row if path.startswith("sample") else item
        for name, index in _STEP.findall(path):
            try:
                grades = grades[int(index) if index else name]
            except (KeyError, IndexError, TypeError):
                raise GradeFault(f"there is no {path}", "invalid_variable_error") from None
        return grades if isinstance(grades, str) else json.dumps(grades, ensure_ascii=False)

    return _VARIABLE.sub(value, template)
