"""Probed tool-call formats: readers, grammars, reasoning tags, broken answers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.deltas import Message
from logitless.models.chat.tool_calls.families import (
    COMMAND_R,
    DEEPSEEK_V31,
    FUNCTIONARY,
    GENERIC,
    GRANITE,
    HERMES,
    LFM2,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    NEMOTRON,
    QWEN3_CODER,
)
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from logitless.models.chat.tool_calls.grammar import answer_grammar, call_grammar
from logitless.models.chat.tool_calls.harmony import GPT_OSS
from logitless.models.chat.tool_calls.parser import CallFormat, Parser, Style
from logitless.models.grammar import Grammar
from logitless.models.tokenizer import Tokenizer
from tests.helpers import call_templates
from tests.helpers.grammars import accepts, text_of

NAMES = [
    "GRANITE", "HUNYUAN", "PLAIN_LIST", "APERTUS", "WRAPPED", "KIMI", "FUNCTIONARY", "GLM_46", "GLM_47", "SEED",
    "MINIMAX", "MINIMAX_M3", "LINES", "LFM", "PYTHON", "PYTHON_ONLY", "DSML", "KIMI_QUEUE", "FUNCTOOLS",
    "MINICPM", "SOLAR", "ID_OBJECT", "ID_TAGS", "ID_PYTHON", "NUMBER_FIRST",
]  # fmt: skip
ADD: dict[str, Any] = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "unit": {"enum": ["C", "F"], "type": "string"}},
        "required": ["a", "unit"],
        "additionalProperties": False,
    },
}
NOW: dict[str, Any] = {
    "name": "now",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "additionalProperties": False},
}
TOOLS = [{"type": "function", "function": {"description": "d", **function}} for function in (ADD, NOW)]
TEXTS = frozenset({("add", "unit"), ("now", "zone")})
Call = tuple[str, dict[str, Any]]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(getattr(call_templates, name), bos_token="<s>", eos_token="</s>")


def rendered(name: str, calls: list[Call]) -> str:
    """The calls as the template writes them after the generation prompt."""
    user = {"role": "user", "content": "Hi"}
    written = [
        {
            "id": f"functions.{called}:{i}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for i, (called, arguments) in enumerate(calls)
    ]
    prompt = template(name).render([user], tools=TOOLS)
    answer = {"role": "assistant", "content": "", "tool_calls": written}
    text = template(name).render([user, answer], tools=TOOLS, add_generation_prompt=False)
    assert text.startswith(prompt)
    text = text.removeprefix(prompt)
    for end in ("<|end|>", "<|eom_id|>", "<|eot_id|>"):
        text = text.removesuffix(end)
    return text


def parsed(calls: CallFormat, *pieces: str, **style: Any) -> Message:
    parser = Parser(Style(calls, frozenset({"add", "now"}), texts=TEXTS, **style))
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    return message.add(parser.finish())


def found_names(message: Message) -> list[str]:
    return [call.name for call in message.calls]


def found(message: Message) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


ADDED: Call = ("add", {"a": 1, "unit": "C"})
ASKED: Call = ("now", {"zone": 'Zürich "old"\n<b> {x}'})
NOTHING: Call = ("now", {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("calls", [[ADDED], [ADDED, ASKED], [NOTHING, ADDED, ADDED]])
def test_call_written_by_template_is_read_back(name: str, calls: list[Call]) -> None:
    text = rendered(name, calls)
    message = parsed(template(name).calls, text)
    assert found(message) == calls
    assert message.content == ""
    before = "" if template(name).calls.opening else "I look at <it> [now]:\n"
    for after in ("", "\nDone <ok>."):
        message = parsed(template(name).calls, before + text + after)
        assert (found(message), message.content) == (calls, before.rstrip() + after)


def test_templates_of_llama_4_write_json_or_python() -> None:
    calls = [ADDED, ASKED]
    assert template("LLAMA4").calls is LLAMA4
    assert found(parsed(LLAMA4, rendered("LLAMA4", calls))) == calls
    source = call_templates.LLAMA4_COMMENT + call_templates.PYTHON_ONLY
    python = ChatTemplate(source, bos_token="<s>", eos_token="</s>").calls
    assert found(parsed(python, rendered("PYTHON_ONLY", calls))) == calls


@settings(max_examples=60)
@given(st.data())
def test_any_cut_gives_the_same_message(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    unwritten = "\x00\r'\\" if name.startswith("PYTHON") else "\x00\r"  # the template has no escapes
    zone = data.draw(st.text(st.characters(codec="utf-8", exclude_characters=unwritten), max_size=12))
    text = rendered(name, [ADDED, ("now", {"zone": f"x{zone}x"})]) + " end"
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    message = parsed(template(name).calls, *pieces)
    assert found(message) == [ADDED, ("now", {"zone": f"x{zone}x"})]
    assert message.content == " end"


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_ends_in_a_call_never_changes_what_was_told(name: str) -> None:
    text = rendered(name, [ADDED, ASKED])
    calls = template(name).calls
    whole = parsed(calls, text)
    for end in range(len(text)):
        message = parsed(calls, text[:end])
        for call, of_whole in zip(message.calls, whole.calls, strict=False):
            assert of_whole.name == call.name
            assert of_whole.arguments.startswith(call.arguments)
        begun = text[:end].strip()
        assert message.content.strip() in ("", begun if len(begun) < 2 or calls.opening else "")
        required = parsed(calls, text[:end], required=True)
        assert (found_names(required), required.content.strip()) == (found_names(message), "")


@pytest.mark.parametrize("name", NAMES)
def test_text_that_is_no_call_is_kept(name: str) -> None:
    calls = template(name).calls
    for text in ("Two.", "a <b> [c] {d}", *(f"Hm {trigger} no, none" for trigger in calls.triggers)):
        message = parsed(calls, text)
        assert (message.content, message.calls) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_one_call_only(name: str) -> None:
    text = rendered(name, [ADDED, ASKED])
    message = parsed(template(name).calls, text, parallel=False)
    assert (found(message), message.content) == ([ADDED], "")


@pytest.mark.parametrize("name", NAMES)
def test_grammar(vocabulary: Tokenizer, name: str) -> None:
    calls = template(name).calls
    one, two = rendered(name, [ADDED]).strip(), rendered(name, [ADDED, ASKED]).strip()
    for parallel in (False, True):
        made = call_grammar(calls, [ADD, NOW], required=True, parallel=parallel)
        grammar = Grammar.compile("lark", made.lark, vocabulary)
        assert accepts(grammar, one)
        assert accepts(grammar, two) == parallel
        assert not accepts(grammar, one.replace("add", "sub"))
        assert not accepts(grammar, one.replace("C", "K"))
        assert not accepts(grammar, one.replace("unit", "mint"))
        assert not accepts(grammar, one.replace("1", "x"))
        assert not made.lazy
    lazy = call_grammar(calls, [ADD, NOW], required=False, parallel=True)
    assert lazy.lazy
    if calls.opening:
        assert lazy.patterns
    else:
        assert one.startswith(lazy.words[0])


@pytest.mark.parametrize("name", NAMES)
def test_every_text_of_a_grammar_is_calls(vocabulary: Tokenizer, name: str) -> None:
    made = call_grammar(template(name).calls, [ADD], required=True, parallel=True)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for seed in range(6):
        text = text_of(grammar, seed)
        message = parsed(template(name).calls, text)
        assert (message.content.strip(), message.reasoning) == ("", ""), text
        for called, arguments in found(message):
            assert called == "add"
            assert set(arguments) == {"a", "unit"}, text
            assert isinstance(arguments["a"], int | float)
            assert arguments["unit"] in ("C", "F")


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("SEED", ("<seed:think>", "</seed:think>")),
        ("APERTUS", ("<|inner_prefix|>", "<|inner_suffix|>")),
        ("MINIMAX_M3", ("<mm:think>", "</mm:think>")),
        ("KIMI", ("<think>", "</think>")),
    ],
)
def test_reasoning(name: str, tags: tuple[str, str]) -> None:
    assert template(name).reasoning == tags
    text = f"{tags[0]}Hm.{tags[1]}{rendered(name, [ADDED])}"
    message = parsed(template(name).calls, text, reasoning=tags)
    assert (message.reasoning, message.content, found(message)) == ("Hm.", "", [ADDED])


def test_ids_that_the_model_writes() -> None:
    message = parsed(template("KIMI").calls, rendered("KIMI", [ADDED, ASKED]))
    assert [call.id for call in message.calls] == ["functions.add:0", "functions.now:1"]


def test_known_families_stay() -> None:
    each = '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    each += "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}"
    assert ChatTemplate(call_templates.template(each), bos_token="", eos_token="").calls is HERMES
    unlike = call_templates.template("<tool_call>{{ m.tool_calls | length }}")  # neither way reads it
    assert ChatTemplate(unlike, bos_token="", eos_token="").calls is HERMES


def test_tags_around_answers() -> None:
    source = call_templates.HUNYUAN.replace(
        "{{ m.content }}",
        "{% if m.content and m.role == 'assistant' %}<|say|>"
        "{{ m.content }}<|said|>{% else %}{{ m.content }}{% endif %}",
    )
    calls = ChatTemplate(source, bos_token="", eos_token="").calls
    assert calls.around == ("<|say|>", "<|said|>")
    assert parsed(calls, "<|say|>Two.<|said|>").content == "Two."
    assert parsed(calls, f"<|say|>Look.<|said|>{rendered('HUNYUAN', [ADDED])}").content == "Look."


def test_an_id_need_not_be_written(vocabulary: Tokenizer) -> None:
    made = call_grammar(template("LFM").calls, [ADD], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    text = '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1, "unit": "C"}}]<|tool_call_end|>'
    assert accepts(grammar, text)
    assert found(parsed(template("LFM").calls, text)) == [ADDED]


@pytest.mark.parametrize("name", ["SOLAR", "ID_TAGS", "ID_PYTHON"])
def test_ids_before_names_are_those_of_the_calls(vocabulary: Tokenizer, name: str) -> None:
    text = rendered(name, [ADDED, ASKED])
    calls = template(name).calls
    grammar = Grammar.compile("lark", call_grammar(calls, [ADD, NOW], required=True, parallel=True).lark, vocabulary)
    for one, two in (("a1b2c3d4e5", "z"), ("call_AbC-1:2.3", "call00001")):
        written = text.replace("functions.add:0", one).replace("functions.now:1", two)
        message = parsed(calls, written)
        assert (found(message), message.content) == ([ADDED, ASKED], "")
        assert [call.id for call in message.calls] == [one, two]
        assert accepts(grammar, written.strip())
    twice = parsed(calls, text.replace("functions.now:1", "functions.add:0"))
    assert twice.calls[0].id == "functions.add:0"
    assert twice.calls[1].id.startswith("call_")  # results could not tell them apart


OWN_MESSAGES = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}<|begin|>{{ m.role }}"
    "{% if m.tool_calls %}<|calls:begin|>{% for c in m.tool_calls %}<|call|>{{ c.id }}<|name|>{{ c.function.name }}"
    "<|args|>{{ c.function.arguments | tojson }}<|call:end|>{% endfor %}<|calls:end|>"
    "{% else %}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)


def test_reasoning_and_the_answer_are_messages_of_their_own(vocabulary: Tokenizer) -> None:
    """Solar Open's: what begins the second message is syntax, for calls as well."""
    solar = ChatTemplate(OWN_MESSAGES, bos_token="", eos_token="")
    assert (solar.reasoning, solar.calls.restart) == (("<|think|>", "<|end|>"), "<|begin|>assistant")
    thought = "<|think|>Hm.<|end|><|begin|>assistant"
    message = parsed(solar.calls, f"{thought}<|content|>Two.<|end|>", reasoning=solar.reasoning)
    assert (message.reasoning, message.content) == ("Hm.", "Two.")
    assert parsed(solar.calls, "<|content|>An assistant<|end|>").content == "An assistant"
    call = f"<|calls:begin|><|call|>a1<|name|>add<|args|>{json.dumps(ADDED[1])}<|call:end|><|calls:end|>"
    message = parsed(solar.calls, thought + call, reasoning=solar.reasoning)
    assert (message.reasoning, message.content, found(message)) == ("Hm.", "", [ADDED])
    made = call_grammar(solar.calls, [ADD], required=True, parallel=False, reasoning=solar.reasoning)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    assert accepts(grammar, thought + call)
    assert accepts(grammar, call)
    assert solar.continuation("It is", "Hm.", False) == ("", f"{thought}<|content|>It is")


def test_an_id_that_nothing_comes_before_is_no_begin_of_a_call() -> None:
    calls = template("ID_WITHOUT_TAG").calls
    assert calls is GENERIC
    assert parsed(calls, "call1: we go home").content == "call1: we go home"


def test_cohere_with_other_tags_around_text(vocabulary: Tokenizer) -> None:
    calls = template("COHERE").calls
    assert calls.name == COMMAND_R.name
    assert calls.around == ("<|START_TEXT|>", "<|END_TEXT|>")
    assert set(calls.around) <= set(calls.preserved)
    assert parsed(calls, "<|START_TEXT|>Two.<|END_TEXT|>").content == "Two."
    message = parsed(calls, f"<|START_TEXT|>Look.<|END_TEXT|>{rendered('COHERE', [ADDED, ASKED])}")
    assert (message.content, found(message)) == ("Look.", [ADDED, ASKED])
    made = call_grammar(calls, [ADD, NOW], required=True, parallel=True)
    assert accepts(Grammar.compile("lark", made.lark, vocabulary), rendered("COHERE", [ADDED, ASKED]))
    said = Grammar.compile("lark", answer_grammar(calls, '%json {"type": "integer"}', None, False).lark, vocabulary)
    assert accepts(said, "<|START_TEXT|>12<|END_TEXT|>")


def test_values_as_python_writes_them(vocabulary: Tokenizer) -> None:
    calls = template("PYTHON").calls
    text = (
        "<|tool_call_start|>[now(zone=\"a\\nb\", x = None, y=['it\\'s', {'k': (True, -1.5)}], z={\"q\": null}, w=true)]"
    )
    message = parsed(calls, text + "<|tool_call_end|>")
    given = {"zone": "a\nb", "x": None, "y": ["it's", {"k": [True, -1.5]}], "z": {"q": None}, "w": True}
    assert found(message) == [("now", given)]
    for no_call in ("<|tool_call_start|>[now(1)]", "<|tool_call_start|>[now]", "<|tool_call_start|>[now(zone:1)]"):
        assert parsed(calls, no_call).content == no_call
    optional = {"type": "object", "properties": {name: {"type": "boolean"} for name in "abc"}, "required": ["b"]}
    made = call_grammar(calls, [{"name": "f", "parameters": optional}], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for arguments, allowed in (
        ("b=True", True), ("a=true, b=False", True), ("a=True,b=true, c=True", True), ("b=True, c=False", True),
        ("", False), ("a=True", False), (", b=True", False), ("b=True, a=True", False), ("b=1", False),
    ):  # fmt: skip
        assert accepts(grammar, f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>") == allowed


NESTED: dict[str, Any] = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "by": {"type": ["string", "null"]}},
                "required": ["on"],
            },
            "b": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "c": {"type": "null"},
        },
    },
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ("a={'on': True, 'by': None}, b=[1, None], c=None", True),
        ("""a={'on': True, 'by': "it's"}""", True),
        ("a={'on': False}", True),
        ('a={"on": true, "by": null}, b=[1, null], c=null', True),
        ("a={'by': None}", False),
        ("a={'on': 1}", False),
        ("a={'off': True}", False),
        ("b=[True]", False),
        ("c=0", False),
    ],
)
def test_python_literals_are_held_to_the_schema(vocabulary: Tokenizer, arguments: str, fits: bool) -> None:
    made = call_grammar(LFM2, [NESTED], required=True, parallel=False)
    text = f"<|tool_call_start|>[add({arguments})]<|tool_call_end|>"
    assert accepts(Grammar.compile("lark", made.lark, vocabulary), text) == fits
    if fits:
        (call,) = parsed(LFM2, text).calls
        assert set(json.loads(call.arguments)) <= {"a", "b", "c"}


def test_a_schema_that_repeats_itself_has_a_bounded_grammar(vocabulary: Tokenizer) -> None:
    tree = {"type": "object", "properties": {f"k{i}": {"$ref": "#/$defs/tree"} for i in range(9)}}
    for kinds in ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, tree):
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": kinds}}
        made = call_grammar(LFM2, [{"name": "add", "parameters": schema}], required=True, parallel=False)
        assert len(made.lark) < 100_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("zone='it's late'", {"zone": "it's late"}),
        ("zone='he said 'hi', then 'bye'', x=1", {"zone": "he said 'hi', then 'bye'", "x": 1}),
        ("zone='abc", {"zone": "abc"}),
        ('x=2, zone="abc', {"x": 2, "zone": "abc"}),
        ("zone={'a': 'b', 'c': [1", {"zone": {"a": "b", "c": [1]}}),
        (
            r"""zone='\x41\'\U0001f600\d', y=f(1, [2]), z=r'a', w='''c
'd' '''""",
            {"zone": "A'😀\\d", "y": "f(1, [2])", "z": "r'a'", "w": "c\n'd' "},
        ),
        ("zone='a', 'b'", {"zone": "a', 'b"}),
        ("zone='UTC', x={'k': None}", {"zone": "UTC", "x": {"k": None}}),
        ("zone='a, b=c', x='(d)]'", {"zone": "a, b=c", "x": "(d)]"}),
    ],
)
def test_badly_quoted_calls_have_arguments_that_are_json(arguments: str, expected: dict[str, Any]) -> None:
    for calls, text in (
        (LFM2, f"<|tool_call_start|>[now({arguments})]<|tool_call_end|>"),
        (template("PYTHON_ONLY").calls, f"[now({arguments})]"),
    ):
        message = parsed(calls, text)
        assert found(message) == [("now", expected)]
        assert message.content == ""
        assert found(parsed(calls, *text)) == [("now", expected)]  # a character after the other
    cut = parsed(LFM2, f"<|tool_call_start|>[now({arguments[:9]}")
    assert [call.name for call in cut.calls] == ["now"]
    assert cut.content == ""


def test_lists_and_dictionaries_of_python_between_tags() -> None:
    """Seed-OSS and MiniCPM 5 write `{{ value }}`."""
    (call,) = parsed(
        template("GLM_46").calls,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{'k': [True, None]}"
        "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>{'k': 1}</arg_value>\n</tool_call>",
    ).calls
    assert json.loads(call.arguments) == {"a": {"k": [True, None]}, "unit": "{'k': 1}"}


@pytest.mark.parametrize(
    ("name", "calls"), [("EMPTY_THOUGHT", COMMAND_R.name), ("LINE_AFTER", NEMOTRON.name), ("NAME_FIRST", GENERIC.name)]
)
def test_text_around_calls_changes_no_family(name: str, calls: str) -> None:
    """Reasoning tags with nothing between them, a line break after the turn, a prompt that ends in a marker."""
    assert template(name).calls.name == calls


def test_types_in_tags(vocabulary: Tokenizer) -> None:
    calls = template("DSML").calls
    text = rendered("DSML", [("now", {"zone": "12"})])
    assert 'string="true">12<' in text
    assert found(parsed(calls, text)) == [("now", {"zone": "12"})]
    assert found(parsed(calls, text.replace("zone", "any"))) == [("now", {"any": "12"})]
    assert found(parsed(calls, text.replace("zone", "any").replace("true", "false"))) == [("now", {"any": 12})]
    made = call_grammar(calls, [ADD, NOW], required=True, parallel=True)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for wrong in ("false", "maybe"):
        assert not accepts(grammar, text.strip().replace("true", wrong))


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC", "n": [true]}'}}],
}
RESULT = {"role": "tool", "content": "12:00"}


def test_a_template_that_shows_tools_but_writes_no_calls(vocabulary: Tokenizer) -> None:
    lfm = template("TOOLS_ONLY")
    assert lfm.calls is LFM2
    text = lfm.render([{"role": "user", "content": "Hi"}, CALLED, RESULT], tools=TOOLS)
    assert text.startswith("List of tools: ")
    written = "<|tool_call_start|>[now(zone='UTC', n=[True])]<|tool_call_end|>"
    assert text.endswith(f"<|user|>Hi<|assistant|>{written}<|tool|>12:00")
    assert found(parsed(lfm.calls, written)) == [("now", {"zone": "UTC", "n": [True]})]
    grammar = Grammar.compile("lark", call_grammar(lfm.calls, [ADD], required=True, parallel=False).lark, vocabulary)
    assert accepts(grammar, '<|tool_call_start|>[add(a=1, unit="C")]<|tool_call_end|>')


def test_a_template_that_writes_calls_but_shows_no_tools() -> None:
    """DeepSeek V3.1's: the system message shows the tools, and the syntax that the model knows."""
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# " + call + " #}"
    deepseek = ChatTemplate(source, bos_token="", eos_token="")
    assert deepseek.calls is DEEPSEEK_V31
    text = deepseek.render([{"role": "user", "content": "Hi"}, CALLED, RESULT], tools=TOOLS)
    assert '"name": "now"' in text.partition("<user>")[0]
    assert call.format("<name>", "<JSON object>") in text.partition("<user>")[0]
    assert f"<assistant>{call.format('now', CALLED['tool_calls'][0]['function']['arguments'])}<tool>12:00" in text  # type: ignore[index]


def test_smollm_reads_tools_by_another_name() -> None:
    source = "{% if xml_tools %}{{ xml_tools | tojson }}{% endif %}<tool_call>"
    source += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    smollm = ChatTemplate(source, bos_token="", eos_token="")
    assert smollm.caps["supports_tools"]
    assert smollm.calls is HERMES
    text = smollm.render([{"role": "user", "content": "Hi"}, CALLED, RESULT], tools=TOOLS)
    written = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC", "n": [true]}}\n</tool_call>'
    assert text.endswith(f"<user>Hi<assistant>{written}<tool>12:00")
    assert "xml_tools" not in smollm.render([{"role": "user", "content": "Hi"}])


def test_firefunction_reads_tools_as_text() -> None:
    source = "{% set all = 'Functions:' + functions %}{% if tools %}{{ all }}{% endif %}"
    fire = ChatTemplate(source + call_templates.FUNCTOOLS.partition("{% endif %}")[2], bos_token="", eos_token="")
    assert fire.caps["supports_tools"]
    assert found(parsed(fire.calls, ' functools[{"name": "now", "arguments": {"zone": "UTC"}}]')) == [
        ("now", {"zone": "UTC"})
    ]
    assert parsed(fire.calls, "functions are fine").content == "functions are fine"


def test_reasoning_tags_that_answers_always_have() -> None:
    """Hunyuan 3's: the template writes them around nothing where there is no reasoning."""
    source = call_templates.HUNYUAN.replace("<think>", "{{ '<th{}>'.format(':x') }}").replace(
        "</think>", "{{ '</th{}>'.format(':x') }}{% elif m.role == 'assistant' %}<th:x></th:x>"
    )
    assert ChatTemplate(source, bos_token="", eos_token="").reasoning == ("<th:x>", "</th:x>")


def test_granite_describes_calls_but_does_not_write_them(vocabulary: Tokenizer) -> None:
    source = "{% if tools %}{{ tools | tojson }} Answer <|tool_call|> and a list.{% endif %}"
    source += "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    granite = ChatTemplate(source, bos_token="", eos_token="")
    assert granite.calls is GRANITE
    thinking = ChatTemplate(source + "{# <think></think><response></response> #}", bos_token="", eos_token="")
    message = parsed(thinking.calls, "<think>Hm.</think><response>Two.</response>", reasoning=thinking.reasoning)
    assert (message.reasoning, message.content) == ("Hm.", "Two.")
    assert thinking.calls.around is None
    assert thinking.calls.frames
    text = '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "unit": "C"}}]'
    message = parsed(granite.calls, f"Look. {text}")
    assert (message.content, found(message)) == ("Look.", [ADDED])
    made = call_grammar(granite.calls, [ADD], required=True, parallel=False)
    assert accepts(Grammar.compile("lark", made.lark, vocabulary), text)
    function = {"name": "add", "arguments": json.dumps(ADDED[1])}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    assert text in granite.render([{"role": "user", "content": "Hi"}, called], tools=TOOLS)


def test_kimis_calls_end_reasoning_that_is_not_closed() -> None:
    calls = template("KIMI").calls
    text = rendered("KIMI", [ADDED, ASKED])
    tags = ("<think>", "</think>")
    for written in (text, text.removeprefix("<|tool_calls_section_begin|>")):
        message = parsed(calls, f"<think>I need two.{written}", reasoning=tags)
        assert (found(message), message.reasoning, message.content) == ([ADDED, ASKED], "I need two.", "")


def test_texts_with_markup_in_cdata(vocabulary: Tokenizer) -> None:
    calls = template("MINICPM").calls
    markup: Call = ("now", {"zone": '<a href="/x">hi</a> </param>'})
    text = rendered("MINICPM", [markup])
    assert "<![CDATA[<a" in text
    assert found(parsed(calls, text)) == [markup]
    made = call_grammar(calls, [NOW], required=True, parallel=False)
    grammar = Grammar.compile("lark", made.lark, vocabulary)
    for written, fits in ((text, True), (rendered("MINICPM", [("now", {"zone": "UTC"})]), True), (text[:-12], False)):
        matcher = grammar.matcher()
        assert (matcher.accept_bytes(written.encode()) and matcher.can_end) == fits


JUNK = ["'", '"', "}", "]", "{", "[", ",", ":", "x", " oops ", "\\", "None", "\u201c", ""]
A, B = '{"zone": "Z\u00fcrich, it", "n": [1, {"k": true}]}', '{"a": 1, "unit": "C"}'
LISTED = f'[{{"name": "now", "arguments": {A}}}, {{"name": "add", "arguments": {B}}}]'
WRITTEN: dict[str, tuple[CallFormat, str]] = {
    "Hermes": (
        HERMES,
        f'<tool_call>\n{{"name": "now", "arguments": {A}}}\n</tool_call>'
        f'<tool_call>{{"name": "add", "arguments": {B}}}</tool_call>',
    ),
    "Llama 4": (
        LLAMA4,
        f'<|python_start|>{{"name": "now", "parameters": {A}}}<|python_end|>'
        f'<|python_start|>{{"name": "add", "parameters": {B}}}<|python_end|>',
    ),
    "Llama 3": (LLAMA3, f'{{"name": "now", "parameters": {A}}}; {{"name": "add", "parameters": {B}}}'),
    "Mistral": (MISTRAL, f"[TOOL_CALLS]{LISTED}"),
    "Mistral v11": (MISTRAL, f"[TOOL_CALLS]now[ARGS]{A}[TOOL_CALLS]add[ARGS]{B}"),
    "Nemotron": (NEMOTRON, f"<TOOLCALL>{LISTED}</TOOLCALL>"),
    "generic": (GENERIC, f'{{"tool_calls": {LISTED}}}'),
    "gpt-oss": (
        GPT_OSS,
        f"<|channel|>commentary to=functions.now json<|message|>{A}<|call|><|start|>assistant"
        f"<|channel|>commentary to=functions.add json<|message|>{B}<|call|>",
    ),
    "DeepSeek": (
        DEEPSEEK_V31,
        f"<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>now<\uff5ctool\u2581sep\uff5c>{A}"
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>add<\uff5ctool\u2581sep\uff5c>"
        f"{B}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
    "Gemma 4": (
        GEMMA4,
        '<|tool_call>call:now{zone:<|"|>Z<|"|>,n:[1,{k:true}]}<tool_call|><|tool_call>call:add{a:1}<tool_call|>',
    ),
    "FunctionGemma": (
        FUNCTION_GEMMA,
        "<start_function_call>call:now{zone:<escape>Z<escape>,n:[1,{k:true}]}<end_function_call>"
        "<start_function_call>call:add{a:1}<end_function_call><start_function_response>",
    ),
    "Functionary": (FUNCTIONARY, f"now\n{A}>>>add\n{B}"),
    "LFM2": (LFM2, '<|tool_call_start|>[now(zone="Z", n=[1, {"k": True}]), add(a=1, unit="C")]<|tool_call_end|>'),
    "Qwen3 Coder": (
        QWEN3_CODER,
        "<tool_call>\n<function=now>\n<parameter=zone>\nZ\n</parameter>\n<parameter=n>\n[1]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
}


@pytest.mark.parametrize("name", [*NAMES, *WRITTEN])
def test_a_call_that_is_malformed_in_the_middle_is_no_text_and_has_json(name: str) -> None:
    calls, text = WRITTEN.get(name) or (template(name).calls, rendered(name, [ASKED, ADDED]))

    def answer(text: str, *, is_cut: bool = False) -> Message:
        parser = Parser(Style(calls, frozenset({"add", "now"}), texts=TEXTS))
        message = Message().add(parser.push(text[:40])).add(parser.push(text[40:]))
        return message.add(parser.finish(is_cut=is_cut, by_model=not is_cut))

    assert found_names(answer(text)) == ["now", "add"]
    begin = next(i for i in range(len(text)) if answer(text[:i], is_cut=True).calls)
    end = text.index("add")  # of the first call's arguments, its end and the next one's begin
    end = begin + max(1, (end - begin) // 2)
    for i in range(begin + 1, end):
        junk = JUNK[i % len(JUNK)]
        for broken in (text[:i] + junk + text[i:], text[:i] + junk + text[i + 1 :]):
            message = answer(broken)
            assert "zone" not in message.content, broken
            for call in message.calls:
                json.loads(call.arguments)
    for i in range(begin, len(text)):
        assert not answer(text[:i], is_cut=True).content.strip(), text[:i]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{'zone': 'it''s'}", {"zone": "it''s"}),
        ("{'zone': 'it\\'s \"old\"', 'n': None}", {"zone": 'it\'s "old"', "n": None}),
        ('{"zone": "he said "hi, you", and left"}', {"zone": 'he said "hi, you", and left'}),
        ('{zone: Paris, "n": True, "m": NaN}', {"zone": "Paris", "n": True, "m": None}),
        ('{"n": [1, 2, {"k": 3}, ], }', {"n": [1, 2, {"k": 3}]}),
        ('{"n": [1, {"k": 2}', {"n": [1, {"k": 2}]}),
        ('{"path": "C:\\dir\\new", "re": "\\d+\\."}', {"path": "C:\\dir\new", "re": "\\d+\\."}),
        ('{"text": "one\ntwo\t", "u": "\\u00fc\\u12"}', {"text": "one\ntwo\t", "u": "\u00fc\\u12"}),
        ('{"n": [1, 2}', {"n": [1, 2]}),
        ('{"n": }', {"n": None}),
    ],
)
def test_arguments_as_models_write_them_become_the_json_that_was_meant(written: str, meant: Any) -> None:
    for text in (f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call> So.', "".join(
        ("<tool_call>{'name': 'now', 'arguments': ", written, "}</tool_call> So.")
    )):  # fmt: skip
        for cut in range(len(text)):
            parser = Parser(Style(HERMES, frozenset({"now"})))
            message = Message().add(parser.push(text[:cut])).add(parser.push(text[cut:]))
            message.add(parser.finish(by_model=True))
            assert found(message) == [("now", meant)]
            assert message.content.strip() == "So."


@pytest.mark.parametrize("name", [*NAMES, *WRITTEN])
def test_an_answer_that_the_model_ends_anywhere_leaves_whole_arguments(name: str) -> None:
    calls, text = WRITTEN.get(name) or (template(name).calls, rendered(name, [ADDED, ("now", {"zone": "Z"})]))
    for end in range(len(text)):
        for parallel in (True, False):
            parser = Parser(Style(calls, frozenset({"add", "now"}), texts=TEXTS, parallel=parallel))
            message = Message().add(parser.push(text[:end])).add(parser.finish(by_model=True))
            assert all(isinstance(json.loads(call.arguments), dict) for call in message.calls), text[:end]
            assert len(message.calls) <= 1 or parallel


@pytest.mark.parametrize("name", ["BARE_PYTHON", "QUOTED_PYTHON", "REPR_PYTHON", "LINES_OF_PYTHON"])
def test_templates_that_write_nearly_python_have_calls_in_python(name: str) -> None:
    calls = template(name).calls
    assert calls.markers is not None
    assert calls.markers.style == "Python"
    between = "\n" if name == "LINES_OF_PYTHON" else ", "
    text = f"add(a=1, unit='C'){between}now(zone=\"Z\"){between}now(zone=Paris)"
    text = f"<function_calls>\n{text}\n</function_calls>" if between == "\n" else f"[{text}]"
    assert found(parsed(calls, text, "Done.")) == [
        ("add", {"a": 1, "unit": "C"}),
        *(("now", {"zone": z}) for z in ("Z", "Paris")),
    ]
    assert found(parsed(calls, text.replace("Paris", "")))[-1] == ("now", {"zone": ""})
    assert found(parsed(calls, text.replace("Paris", "a\n(b, c)")))[-1] == ("now", {"zone": "a\n(b, c)"})
    assert parsed(calls, text, "Done.").content == "Done."
    assert parsed(calls, "[1] says: now (or never).").content == "[1] says: now (or never)."


def test_members_in_tags_of_their_own_become_an_object_or_a_list() -> None:
    ns, calls = "]<]minimax[>[", template("MINIMAX_M3").calls
    tree = (
        f"{ns}<zone>{ns}<city>Z\u00fcrich{ns}</city>\n{ns}<zip>8001{ns}</zip>{ns}<old>{ns}<item>1{ns}</item>"
        f"{ns}<item>{ns}<b>true{ns}</b>{ns}</item>{ns}</old>{ns}</zone>\n"
    )
    text = f'{ns}<tool_call>\n{ns}<invoke name="now">\n{tree}{ns}</invoke>\n{ns}</tool_call>'
    parser = Parser(Style(calls, frozenset({"now"})))
    message = Message().add(parser.push(text)).add(parser.finish(by_model=True))
    assert found(message) == [("now", {"zone": {"city": "Z\u00fcrich", "zip": 8001, "old": [1, {"b": True}]}})]
