"""Parser of graders: string_check, text_similarity, score_model, python, multi, endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from logitless.training.graders.formula import Formula
from logitless.training.graders.grade import (
    Grade,
    GradedSample,
    GradeFault,
    Grader,
    GraderError,
    Surroundings,
    check_template,
    filled,
)
from logitless.training.graders.remote import Endpoint, ScoreModel
from logitless.training.graders.sandbox import Python

MOST_GRADERS = 32  # of a multi grader
OPERATIONS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}
# rapidfuzz's, by our names; OpenAI's fuzzy_match is its ratio
METRICS = {
    "fuzzy_match": ("fuzz", "ratio", 100.0),
    "partial_ratio": ("fuzz", "partial_ratio", 100.0),
    "token_sort_ratio": ("fuzz", "token_sort_ratio", 100.0),
    "token_set_ratio": ("fuzz", "token_set_ratio", 100.0),
    "levenshtein": ("distance.Levenshtein", "normalized_similarity", 1.0),
    "jaro_winkler": ("distance.JaroWinkler", "normalized_similarity", 1.0),
}
MOST_COMPARED, MOST_PARTIAL = 1 << 35, 1 << 23  # characters × characters that take some seconds
_MISSING = ("bleu", "gleu", "meteor", "cosine", *(f"rouge_{n}" for n in (1, 2, 3, 4, 5, "l")))


@dataclass(frozen=True)
class StringCheck:
    """1 if a comparison of two texts holds, else 0."""

    name: str
    input: str
    reference: str
    operation: str
    kind: str = "string_check"

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        text, reference = filled(self.input, sample, item), filled(self.reference, sample, item)
        return Grade(float(OPERATIONS[self.operation](text, reference)))


@dataclass(frozen=True)
class TextSimilarity:
    """Similarity of two texts, between 0 and 1."""

    name: str
    input: str
    reference: str
    similarity: Callable[[str, str], float]
    most: int  # greatest product of the texts' lengths
    kind: str = "text_similarity"

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        text, reference = filled(self.input, sample, item), filled(self.reference, sample, item)
        if len(text) * len(reference) > self.most:
            raise GradeFault(
                f"{self.name}: texts of {len(text)} and {len(reference)} characters are too long to compare"
            )
        return Grade(self.similarity(text, reference))


@dataclass(frozen=True)
class Multi:
    """A formula of several graders' rewards."""

    name: str
    graders: Mapping[str, Grader]
    formula: Formula
    kind: str = "multi"

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        parts: dict[str, float] = {}
        tokens: dict[str, int] = {}
        for key, grader in self.graders.items():
            try:
                found = grader.grade(sample, item)
            except GradeFault as fault:
                raise GradeFault(f"{key}: {fault}", fault.kind, timed_out=fault.timed_out) from None
            parts[key] = found.reward
            for model, n in found.tokens.items():
                tokens[model] = tokens.get(model, 0) + n
        return Grade(self.formula(parts), parts, tokens)


def endpoint_of(grader: Grader) -> Endpoint | None:
    """The endpoint among a grader's parts, which may answer tools, too; None: it has none."""
    parts = [*grader.graders.values()] if isinstance(grader, Multi) else [grader]
    return next((part for part in parts if isinstance(part, Endpoint)), None)


def parse_grader(spec: Any, around: Surroundings | None = None, where: str = "grader") -> Grader:
    """The grader of a JSON object. GraderError names the field that is wrong, or the flag that is missing."""
    around = around or Surroundings()
    if not isinstance(spec, Mapping):
        raise GraderError(f"{where}: must be an object")
    fields = _Fields(spec, where)
    kind = fields.text("type", one_of=("string_check", "text_similarity", "score_model", "python", "multi", "endpoint"))
    if kind in ("endpoint", "python") and kind not in around.allowed:
        raise GraderError(f"{where}.type: {kind} graders are off: start with --allow-graders {kind}")
    name = fields.text("name", kind)
    match kind:
        case "string_check":
            operation = fields.text("operation", one_of=tuple(OPERATIONS))
            grader: Grader = StringCheck(name, fields.template("input"), fields.template("reference"), operation)
            fields.done("name", "input", "reference", "operation")
        case "text_similarity":
            metric = fields.text("evaluation_metric", "fuzzy_match")
            similarity, most = _metric(metric, where), MOST_PARTIAL if metric == "partial_ratio" else MOST_COMPARED
            grader = TextSimilarity(name, fields.template("input"), fields.template("reference"), similarity, most)
            fields.done("name", "input", "reference", "evaluation_metric", "pass_threshold")
        case "score_model":
            if around.complete is None:
                raise GraderError(f"{where}.type: no model can be asked here: start with --grader-url URL")
            grader = ScoreModel.parse(name, spec, where, around.complete)
            fields.done("name", "input", "model", "range", "sampling_params", "pass_threshold")
        case "python":
            grader = Python.parse(name, fields.text("source"), where)
            fields.done("name", "source", "image_tag", "pass_threshold")
        case "endpoint":
            grader = Endpoint.parse(name, spec, where, around)
            fields.done("name", "url", "headers", "pass_threshold")
        case _:
            grader = _multi(name, spec, around, where)
            fields.done("name", "graders", "calculate_output")
    return grader


def _multi(name: str, spec: Mapping[str, Any], around: Surroundings, where: str) -> Multi:
    named = spec.get("graders")
    if not isinstance(named, Mapping) or not named:
        raise GraderError(f"{where}.graders: must be an object with a grader by each name")
    if "type" in named and isinstance(named["type"], str):  # the client's types have one grader here
        named = {str(named.get("name") or named["type"]): named}
    if len(named) > MOST_GRADERS:
        raise GraderError(f"{where}.graders: has more than {MOST_GRADERS}")
    graders: dict[str, Grader] = {}
    for key, own in named.items():
        if isinstance(own, Mapping) and own.get("type") == "multi":
            raise GraderError(f"{where}.graders.{key}: a multi grader has none of its own kind")
        graders[key] = parse_grader(own, around, f"{where}.graders.{key}")
    text = _Fields(spec, where).text("calculate_output")
    return Multi(name, graders, Formula(text, frozenset(graders), f"{where}.calculate_output"))


def _metric(name: str, where: str) -> Callable[[str, str], float]:
    if name in _MISSING:
        raise GraderError(f"{where}.evaluation_metric: {name} is not there; {', '.join(METRICS)} are")
    if name not in METRICS:
        raise GraderError(f"{where}.evaluation_metric: must be one of {', '.join(METRICS)}")
    from importlib import import_module

    module, function, scale = METRICS[name]
    try:
        scorer, compare = getattr(import_module(f"rapidfuzz.{module}"), function), import_module("rapidfuzz.process")
    except ImportError:
        raise GraderError(f"{where}: text_similarity needs rapidfuzz: pip install 'logitless[graders]'") from None
    # a plain call of the scorer holds up all other threads
    return lambda text, reference: float(compare.cpdist([text], [reference], scorer=scorer, dtype=float)[0]) / scale


class _Fields:
    """Fields of a grader's object."""

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self._spec, self._where = spec, where

    def text(self, name: str, default: str | None = None, one_of: tuple[str, ...] = ()) -> str:
        value = self._spec.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise GraderError(f"{self._where}.{name}: must be a string")
        if one_of and value not in one_of:
            raise GraderError(f"{self._where}.{name}: must be one of {', '.join(one_of)}")
        return value

    def template(self, name: str) -> str:
        return check_template(self.text(name), f"{self._where}.{name}")

    def done(self, *known: str) -> None:
        """GraderError: there is a field beside these."""
        if other := sorted(self._spec.keys() - {"type", *known}):
            raise GraderError(f"{self._where}.{other[0]}: is not known")
