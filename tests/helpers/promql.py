"""PromQL evaluation on two scrapes: the functions that the dashboard uses, compared with Prometheus by hand.

`scripts` of the comparison: docs/experiments/operations.md.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = dict[str, Vector]  # series by metric name
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, given: value == given,
    "!=": lambda value, given: value != given,
    "=~": lambda value, given: re.fullmatch(given, value) is not None,
    "!~": lambda value, given: re.fullmatch(given, value) is None,
}


def scrape(text: str, **more: str) -> Scrape:
    """The series of a page of metrics, with the labels that Prometheus adds."""
    series: Scrape = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name][frozenset({**sample.labels, **more}.items())] = sample.value
    return series


def parsed(query: str) -> Any:
    """The query's tree, with Grafana's variables replaced: every job and replica, a rate over a minute."""
    query = query.replace("$__rate_interval", "1m")
    return promql_parser.parse(re.sub(r'"\$\w+"', '".*"', query))


def selectors(tree: Any) -> Iterator[Any]:
    """The vector selectors of a query."""
    if isinstance(tree, promql_parser.VectorSelector):
        yield tree
    elif isinstance(tree, promql_parser.MatrixSelector):
        yield tree.vector_selector
    else:
        for child in _children(tree):
            yield from selectors(child)


def grouping(tree: Any) -> set[str]:
    """The labels that a query groups by."""
    own = set(tree.modifier.labels) if isinstance(tree, promql_parser.AggregateExpr) and tree.modifier else set()
    return own.union(*map(grouping, _children(tree)))


def _children(tree: Any) -> list[Any]:
    if isinstance(tree, promql_parser.Call):
        return list(tree.args)
    if isinstance(tree, promql_parser.BinaryExpr):
        return [tree.lhs, tree.rhs]
    return [tree.expr] if isinstance(tree, promql_parser.AggregateExpr | promql_parser.ParenExpr) else []


def evaluate(tree: Any, before: Scrape, after: Scrape, seconds: float) -> Vector:
    """The query's value at the second scrape, `seconds` after the first. NotImplementedError: it has
    what no panel uses."""
    if isinstance(tree, promql_parser.ParenExpr):
        return evaluate(tree.expr, before, after, seconds)
    if isinstance(tree, promql_parser.VectorSelector):
        return _select(tree, after)
    if isinstance(tree, promql_parser.AggregateExpr) and str(tree.op) == "sum":
        kept = set(tree.modifier.labels) if tree.modifier else set()
        sums: Vector = defaultdict(float)
        for labels, value in evaluate(tree.expr, before, after, seconds).items():
            sums[frozenset(pair for pair in labels if pair[0] in kept)] += value
        return dict(sums)
    if isinstance(tree, promql_parser.Call) and tree.func.name == "rate":
        first, last = (_select(tree.args[0].vector_selector, series) for series in (before, after))
        return {labels: (value - first[labels]) / seconds for labels, value in last.items() if labels in first}
    if isinstance(tree, promql_parser.Call) and tree.func.name == "histogram_quantile":
        return _quantiles(tree.args[0].val, evaluate(tree.args[1], before, after, seconds))
    if isinstance(tree, promql_parser.BinaryExpr):
        left, right = (evaluate(side, before, after, seconds) for side in (tree.lhs, tree.rhs))
        return {labels: _OPERATORS[str(tree.op)](left[labels], right[labels]) for labels in left.keys() & right.keys()}
    raise NotImplementedError(str(tree))


_OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a / b if b else math.nan,
}


def _select(tree: Any, series: Scrape) -> Vector:
    chosen: Vector = {}
    for labels, value in series.get(tree.name, {}).items():
        held = dict(labels)
        if all(_MATCHES[_operator(m)](held.get(m.name, ""), m.value) for m in tree.matchers.matchers):
            chosen[labels] = value
    return chosen


def _operator(matcher: Any) -> str:
    names = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    return names[str(matcher.op).rpartition(".")[2]]


def _quantiles(q: float, buckets: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in buckets.items():
        bound = next(float(value) for name, value in labels if name == "le")
        groups[frozenset(pair for pair in labels if pair[0] != "le")].append((bound, value))
    return {labels: _quantile(q, sorted(group)) for labels, group in groups.items()}


def _quantile(q: float, buckets: list[tuple[float, float]]) -> float:
    """Linear between the bounds of the bucket with the q-th observation, as Prometheus does it."""
    total = buckets[-1][1]
    if not total:
        return math.nan
    rank, low, below = q * total, 0.0, 0.0
    for bound, n in buckets:
        if n >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (n - below)
        low, below = bound, n
    raise AssertionError("the last bucket has all")
