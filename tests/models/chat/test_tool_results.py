"""Tool results in prompts: their order, and Gemma 4's form inside the calling turn."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.gemma import GEMMA4
from logitless.models.chat.tool_calls.generic import as_text
from logitless.models.chat.tool_calls.parser import Parser, Style
from logitless.models.chat.tool_results import FIELD, in_call_order, one_by_one, within_turns

# What the public templates write of calls and results, without tools, media and thoughts.
_FORM = """
{%- macro written(a) -%}
  {%- if a is string -%}<|"|>{{ a }}<|"|>
  {%- elif a is boolean -%}{{ 'true' if a else 'false' }}
  {%- elif a is mapping -%}
    { {%- for k, v in a | dictsort %}{{ k }}:{{ written(v) }}{{ ',' if not loop.last }}{% endfor -%} }
  {%- elif a is sequence -%}[{% for v in a %}{{ written(v) }}{{ ',' if not loop.last }}{% endfor %}]
  {%- else -%}{{ a }}{%- endif -%}
{%- endmacro -%}
{%- macro result(name, r) -%}
  <|tool_response>response:{{ name }}{{ written(r) if r is mapping else '{value:' + written(r) + '}' }}<tool_response|>
{%- endmacro -%}
{%- macro calls(m) -%}
  {%- for c in m.tool_calls -%}
    {{ '<|tool_call>call:' + c.function.name + '{' }}
    {%- if c.function.arguments is mapping -%}
      {%- for k, v in c.function.arguments | dictsort %}{{ k }}:{{ written(v) }}{{ ',' if not loop.last }}{% endfor -%}
    {%- else -%}{{ c.function.arguments }}{%- endif -%}
    {{ '}<tool_call|>' }}
  {%- endfor -%}
{%- endmacro -%}
"""
FIRST = (
    _FORM
    + """
{%- set ns = namespace(open=false) -%}
{%- for m in messages -%}
  {%- set role = 'model' if m.role == 'assistant' else m.role -%}
  {%- if not (ns.open and m.tool_calls) %}{{ '<|turn>' + role + '\n' }}{% endif -%}
  {%- if m.tool_calls %}{{ calls(m) }}{% endif -%}
  {%- for r in m.tool_responses or [] %}{{ result(r.name, r.response) }}{% endfor -%}
  {{- m.content | trim -}}
  {%- set ns.open = m.tool_responses and not m.content -%}
  {%- if not ns.open %}{{ '<turn|>\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open %}{{ '<|turn>model\n' }}{% endif -%}
"""
)
LATER = (
    _FORM
    + """
{%- for m in messages if m.role != 'tool' -%}
  {{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
  {%- if m.tool_responses %}{{ m.tool_responses }}
  {%- elif m.tool_calls -%}
    {{ calls(m) }}
    {%- for r in messages if r.role == 'tool' -%}
      {%- for c in m.tool_calls if c.id == r.tool_call_id %}{{ result(c.function.name, r.content) }}{% endfor -%}
    {%- endfor -%}
  {%- endif -%}
  {{- m.content | trim }}{{ '<turn|>\n' }}
{%- endfor -%}
"""
)

USER = {"role": "user", "content": "Hi"}


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def called(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(id: str | None, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({"tool_call_id": id} if id else {}), **more}


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return (
        ChatTemplate(source, bos_token="", eos_token="")
        .render([USER, *messages])
        .removeprefix("<|turn>user\nHi<turn|>\n")
    )


ADD = call("1", "add", {"b": [2, {"x": True}], "a": "one"})
ADDED = '<|turn>model\n<|tool_call>call:add{a:<|"|>one<|"|>,b:[2,{x:true}]}<tool_call|>'


def test_template_with_tool_results_has_its_caps() -> None:
    for source in (FIRST, LATER):
        template = ChatTemplate(source, bos_token="", eos_token="")
        assert template.calls is GEMMA4
        for cap in ("tool_calls", "parallel_tool_calls", "object_arguments"):
            assert template.caps[f"supports_{cap}"]


def test_the_turn_stays_open_behind_results() -> None:
    assert rendered(FIRST, called(ADD), result("1", "sunny")) == (
        ADDED + '<|tool_response>response:add{value:<|"|>sunny<|"|>}<tool_response|>'
    )
    assert rendered(FIRST, called(ADD)) == ADDED + "<turn|>\n<|turn>model\n"


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ('{"b": 1, "a": "x"}', '{a:<|"|>x<|"|>,b:1}'),
        ("[1, false]", "{value:[1,false]}"),
        ("18", "{value:18}"),
        ("null", '{value:<|"|>null<|"|>}'),
        ("", '{value:<|"|><|"|>}'),
        (None, '{value:<|"|><|"|>}'),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], '{value:<|"|>a\nb<|"|>}'),
        ("[" * 100_000, '{value:<|"|>' + "[" * 100_000 + '<|"|>}'),
    ],
)
def test_results_are_the_values_that_they_spell(content: Any, written: str) -> None:
    text = rendered(FIRST, called(ADD), result("1", content))
    assert text == f"{ADDED}<|tool_response>response:add{written}<tool_response|>"


def test_several_calls_and_what_is_said_before_and_after() -> None:
    now = call("2", "now", {})
    turn = [
        called(ADD, now, content="I look."),
        result("2", "9"),
        result("1", "3"),
        {"role": "assistant", "content": "So."},
    ]
    assert rendered(FIRST, *turn, USER) == (
        f"<|turn>model\nI look.<turn|>\n{ADDED}<|tool_call>call:now{{}}<tool_call|>"
        "<|tool_response>response:add{value:3}<tool_response|><|tool_response>response:now{value:9}<tool_response|>"
        "So.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )
    again = rendered(FIRST, called(ADD), result("1", "3"), called(now), result("2", "9"))
    assert again == (
        ADDED + "<|tool_response>response:add{value:3}<tool_response|><|tool_call>call:now{}<tool_call|>"
        "<|tool_response>response:now{value:9}<tool_response|>"
    )


def test_results_without_ids() -> None:
    calls = called(ADD, call("2", "now", {}))
    text = rendered(FIRST, calls, result(None, "1"), result(None, "2"), result(None, "3"), result(None, "4", name="f"))
    assert [part.partition("{")[0] for part in text.split("response:")[1:]] == ["add", "now", "unknown", "f"]


def test_templates_that_look_for_results_themselves_keep_them() -> None:
    assert rendered(LATER, called(ADD), result("1", "3")) == (
        ADDED + '<|tool_response>response:add{value:<|"|>3<|"|>}<tool_response|><turn|>\n'
    )


def test_the_prompts_calls_read_as_calls() -> None:
    parser = Parser(Style(GEMMA4, frozenset({"add"})))
    text = rendered(FIRST, called(ADD)).removeprefix("<|turn>model\n").partition("<turn|>")[0]
    (read,) = Message().add(parser.push(text)).add(parser.finish()).calls
    assert json.loads(read.arguments) == {"a": "one", "b": [2, {"x": True}]}


class Counted(str):
    """An id that counts comparisons."""

    n = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.n += 1
        return str.__eq__(self, other)


def test_results_find_their_calls_in_linear_time() -> None:
    n = 300
    ids = [f"call{i}" for i in range(n)]
    calling = called(*(call(Counted(id), "f" + id, {}) for id in ids))
    (turn,) = within_turns([calling, *(result(Counted(id), "r" + id) for id in reversed(ids))])
    assert turn[FIELD] == [{"name": "f" + id, "response": "r" + id} for id in reversed(ids)]
    assert Counted.n < 20 * n


def test_results_in_a_row_are_one_turn_in_linear_time() -> None:
    n = 100_000
    began = time.process_time()
    turns = as_text([USER, *[result("1", "r")] * n, USER, result("2", "s")])
    assert time.process_time() - began < 3  # a text that grows by each takes 5 s
    one = '{"tool_response": {"tool_call_id": "%s", "content": "%s"}}'
    assert [turn["content"] for turn in turns] == ["Hi", "\n".join([one % ("1", "r")] * n), "Hi", one % ("2", "s")]


# -- order


def calling(*ids: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"type": "function", "function": function} | ({} if id is None else {"id": id}) for id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([calling("a", "b", "c"), result("c", "C"), result("a", "A"), result("b", "B")], "ABC"),
        ([calling("a", "b"), result("a", "A"), result("b", "B")], "AB"),
        ([calling("a"), calling("b"), result("b", "B"), result("a", "A")], "AB"),  # a message for each call
        ([calling("x", "x"), result("x", "1"), result("x", "2")], "12"),  # ids that are not unique
        ([calling("a", "b"), result("b", "B"), result("a", "1"), result("a", "2")], "12B"),  # a call answered twice
        ([calling("a", "b", "c"), result("c", "C"), result("z", "?"), result("a", "A")], "A?C"),
        ([calling(None, None), result(None, "1"), result(None, "2")], "12"),
        ([calling("a", "b"), result(None, "1"), result("a", "A")], "A1"),
        ([result("b", "2"), result("a", "1")], "21"),  # no calls at all
    ],
)
def test_results_out_of_order_are_sorted_by_their_calls(turns: list[Any], expected: str) -> None:
    ordered = in_call_order([{"role": "user", "content": "u"}, *turns, {"role": "user", "content": "v"}])
    assert "".join(turn["content"] for turn in ordered) == f"u{expected}v"


def test_runs_of_results_are_sorted_each_by_itself() -> None:
    turns = [
        calling("a", "b"),
        result("b", "B"),
        result("a", "A"),
        calling("b", "a"),
        result("a", "A"),
        result("b", "B"),
    ]
    assert "".join(turn["content"] for turn in in_call_order(turns)) == "ABBA"


def test_a_template_without_ids_shows_results_in_the_order_of_calls() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    source += "<{{ m.content }}>{% endfor %}{% if tools %}{{ tools[0].function.name }}{% endif %}"
    template = ChatTemplate(source, bos_token="", eos_token="")
    turns = [{"role": "user", "content": "u"}, calling("a", "b"), result("b", "B"), result("a", "A")]
    assert template.render(turns).index("<A>") < template.render(turns).index("<B>")


_TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.tool_calls %}(CALLS){% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_CALL = "<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>"
_REFUSES_TWO = _TURNS.replace(
    "(CALLS)", "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + _CALL
)
_WRITES_FIRST = _TURNS.replace("(CALLS)", _CALL)


@pytest.mark.parametrize("source", [_REFUSES_TWO, _WRITES_FIRST])
def test_templates_of_one_call_a_message_get_each_with_its_result(source: str) -> None:
    """Llama 3's template refuses two, gpt-oss's and GigaChat 3's write the first alone."""
    first, second = call("1", "add", {"a": 1}), call("2", "now", {})
    turn = called(first, second, content="I look.", reasoning_content="Hm.")
    template = ChatTemplate(source, bos_token="", eos_token="")
    text = template.render(
        [USER, turn, result("2", "two"), result("1", "one"), {"role": "assistant", "content": "So."}]
    )
    written = [f'<assistant><tool_call>{{"name": "{name}"' for name in ("add", "now")]
    places = [text.index(part) for part in (written[0], "<tool>one", written[1], "<tool>two", "<assistant>So.")]
    assert places == sorted(places)
    assert text.count("<tool_call>") == 2
    pending = template.render([USER, turn])
    assert pending.count("<tool_call>") == 2
    assert one_by_one([turn, result("2", "two")])[0]["reasoning_content"] == "Hm."
    assert [
        message["role"] for message in one_by_one([turn, result("9", "x"), result("9", "y"), result("9", "z")])
    ] == [*("assistant", "tool", "assistant", "tool", "tool")]


def test_templates_of_several_calls_get_them_in_one_message() -> None:
    each = "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = ChatTemplate(_TURNS.replace("(CALLS)", each), bos_token="", eos_token="")
    text = template.render([USER, called(call("1", "add", {"a": 1}), call("2", "now", {})), result("1", "one")])
    assert text.count("<assistant>") == 1


_STRICT_IDS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "<{{ m.tool_call_id }}>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("ids", [("call_aB3dE6gH9jK2", "toolu_01"), ("", None), ("a1b2c3d4e", "call_x"), ("x", "x")])
def test_templates_that_refuse_ids_get_their_own_form(ids: tuple[Any, Any]) -> None:
    """Mistral Nemo's wants nine letters; a conversation that began with another vendor has others."""
    template = ChatTemplate(_STRICT_IDS, bos_token="", eos_token="")
    calls = [call("", name, {}) | {"id": id} for name, id in zip(("add", "now"), ids, strict=True)]
    results = [result("", text) | {"tool_call_id": id} for text, id in zip(("one", "two"), ids, strict=True)]
    for messages in (
        [USER, called(*calls), *results],
        [USER, called(*calls), *results, USER, called(*calls), *results],
    ):
        text = template.render(messages)
        assert template.render(messages) == text  # the same prompt at each turn
        written = re.findall(r'"id": "(\w{9})"', text)
        assert re.findall(r"<(\w{9})>", text) == written
        assert len(written) == len(messages) // 2
    assert (written[0] == ids[0]) == (ids[0] == "a1b2c3d4e")


def test_templates_that_take_any_id_get_the_clients() -> None:
    source = _STRICT_IDS.replace(" or c.id | length != 9", "").replace(" or m.tool_call_id | length != 9", "")
    text = ChatTemplate(source, bos_token="", eos_token="").render(
        [USER, called(call("123456789", "add", {})), result("123456789", "one")]
    )
    assert '"id": "123456789"' in text
    assert "<123456789>one" in text
