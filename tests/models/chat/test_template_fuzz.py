"""Hostile chat templates: a text or an error of one line, in bounded time and memory."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.sandbox import MAX_SECONDS, SandboxedRenderer
from tests.helpers.fuzz import examples

VALUES = [
    *("messages", "messages[0]", "messages[0].content", "messages[-1]['role']", "bos_token", "tools", "x", "none"),
    *("1", "-1", "10**9", "2**64", "0.5", "'a'", "'a' * 10**9", "[0] * 10**8", "range(10**9)", "{}", "[]", "''"),
    *("''.__class__", "x.__init__.__globals__", "self", "self._TemplateReference__context", "namespace(a=1)"),
    *("cycler", "lipsum", "joiner()", "raise_exception('no')", "strftime_now('%Y')", "loop", "messages|map('upper')"),
]
FILTERS = [
    *(
        "upper",
        "trim",
        "length",
        "list",
        "join(', ')",
        "tojson",
        "tojson(indent=4)",
        "first",
        "last",
        "reverse",
        "sort",
    ),
    *("center(10**9)", "center(50)", "indent(10**6)", "replace('a', 'a' * 99999)", "batch(2)", "slice(3)", "sum"),
    *("attr('__class__')", "format(1, 2)", "wordwrap(1)", "string", "int", "items", "map(attribute='role')", "nothing"),
]
VALUE = st.builds(
    lambda value, filters: "|".join([value, *filters]),
    st.sampled_from(VALUES),
    st.lists(st.sampled_from(FILTERS), max_size=3),
)


def put(form: str, *parts: str) -> str:
    """The form with these parts in the place of its @."""
    head, *tails = form.split("@")
    return head + "".join(part + tail for part, tail in zip(parts, tails, strict=True))


OPERATOR = st.sampled_from(["~", "+", "*", "%", "in", "=="])
BROKEN = ["{% break %}", "{{", "{%", "{#", "#}", "%}", "{% include 'x' %}", "{% import 'os' as x %}", "text"]
LEAF = st.one_of(
    VALUE.map(lambda v: put("{{ @ }}", v)),
    st.builds(lambda *parts: put("{{ @ @ @ }}", *parts), VALUE, OPERATOR, VALUE),
    VALUE.map(lambda v: put("{% set x = @ %}", v)),
    st.sampled_from(BROKEN),
    st.text(max_size=4),
)
TEMPLATE = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.builds(lambda *parts: put("{% for m in @ %}@{% endfor %}", *parts), VALUE, inner),
        st.builds(lambda *parts: put("{% if @ %}@{% endif %}", *parts), VALUE, inner),
        inner.map(lambda body: put("{% macro f(x) %}@{{ f(x) }}{% endmacro %}{{ f(1) }}", body)),
        inner.map(lambda body: put("{% filter upper %}@{% endfilter %}", body)),
        inner.map(lambda body: put("{% generation %}@{% endgeneration %}", body)),
    ),
    max_leaves=5,
)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a" * 50}]


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(source=TEMPLATE)
def test_templates(source: str) -> None:
    began = time.monotonic()
    assert "\n" not in outcome(source)
    assert time.monotonic() - began < 20 * MAX_SECONDS


def outcome(source: str) -> str:
    """The error of a template, "" if it gives a text."""
    try:
        text = SandboxedRenderer(source)({"messages": MESSAGES, "bos_token": "<s>", "tools": None})
    except ChatTemplateError as error:
        return str(error)
    assert isinstance(text, str)
    return ""
