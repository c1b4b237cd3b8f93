"""Chat templates: six real ones with hand-worked prompts, built-in ones, the sandbox and its limits."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from logitless.models.chat import sandbox
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import CHATML, ChatTemplate, builtin_names, from_metadata
from logitless.models.tokenizer import from_metadata as tokenizer_from

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
USER2 = {"role": "user", "content": "Bye"}
TURNS = [SYSTEM, USER, ASSISTANT, USER2]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "left "}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"}

GEMMA = "google-gemma-2-2b-it"
HERMES = "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
LLAMA = "meta-llama-Llama-3.2-3B-Instruct"
MISTRAL = "mistralai-Mistral-Nemo-Instruct-2407"
PHI = "microsoft-Phi-3.5-mini-instruct"
QWEN = "Qwen-Qwen3-0.6B"


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def real(shared_data: Path) -> Any:
    return lambda name: template((shared_data / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))


# -- real templates


def test_gemma_has_no_system_role_so_the_user_says_it(real: Any) -> None:
    gemma = real(GEMMA)
    assert gemma.render(TURNS) == (
        "<s><start_of_turn>user\nBe brief.\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    assert gemma.render([SYSTEM]) == "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(ChatTemplateError, match=r"^the chat template says: Conversation roles must alternate"):
        gemma.render([USER, USER2])


def test_phi(real: Any) -> None:
    phi = real(PHI)
    assert phi.render(TURNS) == (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n"
        "<|assistant|>\n"
    )
    assert phi.render([USER, ASSISTANT], add_generation_prompt=False) == (
        "<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n</s>"
    )


def test_qwen(real: Any) -> None:
    qwen = real(QWEN)
    assert qwen.render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    thoughtless = qwen.render([USER], enable_thinking=False)
    assert thoughtless == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_qwen_with_tools(real: Any) -> None:
    text = real(QWEN).render([SYSTEM, USER, CALLED, ANSWER], tools=[TOOL])
    head, _, rest = text.partition("# Tools")
    assert head == "<|im_start|>system\nBe brief.\n\n"
    assert (
        '<tools>\n{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": '
        '"object", "properties": {"a": {"type": "number", "description": "left "}}}}}\n</tools>'
    ) in rest
    assert rest.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama(real: Any) -> None:
    llama = real(LLAMA)
    assert llama.render(TURNS, date_string="1 May 2025") == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 1 May "
        "2025\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Bye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    called = llama.render([USER, CALLED, ANSWER], tools=[TOOL], date_string="x")
    assert called.endswith(
        '\n            "properties": {\n                "a": {\n                    "type": "number",\n'
        '                    "description": "left "\n                }\n            }\n        }\n    }\n}\n\nHi'
        '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )
    twice = llama.render([USER, CALLED | {"tool_calls": [CALL, CALL]}, ANSWER])  # the template refuses two in a message
    assert twice.count('{"name": "add", "parameters": {"a": 1}}<|eot_id|>') == 2


def test_todays_date_is_there_when_a_template_asks(real: Any) -> None:
    text = real(LLAMA).render([USER])
    day, month, year = text.split("Today Date: ")[1].split("\n")[0].split()
    assert (len(day), len(month)) == (2, 3)
    assert int(year) >= 2025


def test_mistral(real: Any) -> None:
    mistral = real(MISTRAL)
    assert mistral.render(TURNS) == "<s>[INST]Hi[/INST]Hello</s>[INST]Be brief.\n\nBye[/INST]"
    assert mistral.render([USER, CALLED, ANSWER], tools=[TOOL]) == (
        '<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
        '{"type": "object", "properties": {"a": {"type": "number", "description": "left "}}}}}][/AVAILABLE_TOOLS]'
        '[INST]Hi[/INST][TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS]{"content": 2, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )
    foreign = [CALLED | {"tool_calls": [CALL | {"id": "call_1"}]}, ANSWER | {"tool_call_id": "call_1"}]
    ids = re.findall(r'id": "(\w{9})"', mistral.render([USER, *foreign]))  # the template refuses other lengths
    assert len(ids) == 2
    assert ids[0] == ids[1]


def test_hermes(real: Any) -> None:
    text = real(HERMES).render([USER, CALLED, ANSWER, ANSWER], tools=[TOOL])
    assert text.startswith("<s><|im_start|>system\nYou are a function calling AI model.")
    assert (
        '{"type": "function", "function": {"name": "add", "description": "add(a: float) - Adds.\n\n'
        '    Args:\n        a(float): left", "parameters": {"type": "object"'
    ) in text
    assert text.endswith(
        '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
        "</tool_call><|im_end|>\n<|im_start|>tool\n<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|><|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "able"),
    [
        (GEMMA, ""),
        (PHI, "system_role"),
        (LLAMA, "system_role tools tool_calls object_arguments"),
        (QWEN, "system_role tools tool_calls parallel_tool_calls object_arguments"),
        (MISTRAL, "system_role tools tool_calls parallel_tool_calls object_arguments"),
        (HERMES, "system_role tools tool_calls parallel_tool_calls object_arguments"),
    ],
)
def test_real_template_has_its_caps(name: str, able: str, real: Any) -> None:
    caps = real(name).caps
    assert {cap for cap, able in caps.items() if able} == {
        f"supports_{cap}" for cap in ["string_content", *able.split()]
    }
    assert len(caps) == 8


# -- built-in templates


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
            "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("llama2", "[INST] Be brief.\nHi [/INST]Hello</s>[INST] Bye [/INST]"),
        ("llama2-sys", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Hello</s>[INST] Bye [/INST]"),
        ("llama2-sys-bos", "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Hello</s><s>[INST] Bye [/INST]"),
        ("mistral-v1", " [INST] Be brief.\n\nHi [/INST] Hello</s> [INST] Bye [/INST]"),
        ("mistral-v3", "[INST] Be brief.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]"),
        ("mistral-v3-tekken", "[INST]Be brief.\n\nHi[/INST]Hello</s>[INST]Bye[/INST]"),
        ("mistral-v7", "[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] Hi[/INST] Hello</s>[INST] Bye[/INST]"),
        (
            "gemma",
            "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("vicuna", "Be brief.\n\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: Bye\nASSISTANT:"),
        ("deepseek3", "Be brief.\n\n<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>Bye<｜Assistant｜>"),
    ],
)
def test_built_in_templates(name: str, text: str) -> None:
    assert template(name).render(TURNS) == text


@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_template_writes_every_message(name: str) -> None:
    text = template(name).render(TURNS)
    places = [text.index(str(message["content"])) for message in TURNS]
    assert places == sorted(places)
    assert "{" not in text


def test_from_metadata(shared_data: Path) -> None:
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [b"<unk>", b"<s>", b"</s>"],
        "tokenizer.ggml.token_type": [2, 3, 3],
    }
    tokenizer = tokenizer_from(values)
    assert from_metadata(values, tokenizer).source == CHATML
    assert from_metadata(values, tokenizer).turn_end(tokenizer) == "<|im_end|>"
    assert from_metadata(values, tokenizer, "phi3").turn_end(tokenizer) == ""
    known = dict(values)
    for key, last in (("tokenizer.ggml.tokens", b"<|im_end|>"), ("tokenizer.ggml.token_type", 3)):
        known[key] = [*values[key], last]
    assert from_metadata(values, tokenizer).turn_end(tokenizer_from(known)) == ""
    values["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    values["tokenizer.chat_template.tool_use"] = "tools: {{ tools[0].function.name }}{# <tool_call> #}"
    chat = from_metadata(values, tokenizer)
    assert chat.render([USER]) == "<s>Hi</s>"
    assert chat.render([USER], tools=[TOOL]) == "tools: add"
    assert from_metadata(values, tokenizer, "phi3").render([USER]) == "<|user|>\nHi<|end|>\n<|assistant|>\n"
    assert from_metadata(values, tokenizer, "plain").render([USER]) == "plain"


# -- adjustments


def test_contents_become_what_the_template_takes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = template("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert chat.render([{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == "[a\nb][]"
    typed = template("{% for m in messages %}[{% for p in m.content %}{{ p.text }},{% endfor %}]{% endfor %}")
    assert (typed.caps["supports_string_content"], typed.caps["supports_typed_content"]) == (False, True)
    assert typed.render([{"role": "user", "content": parts}, USER]) == "[a,b,][Hi,]"
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}"
    caps = template(both + "{% endif %}{% endfor %}").caps
    assert caps["supports_string_content"]
    assert caps["supports_typed_content"]


def test_messages_are_left_alone_and_roles_mapped() -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": []}]
    chat = template("{% for m in messages %}{{ m.role }}{{ m.tool_calls is defined }}{{ m.content }} {% endfor %}")
    assert chat.render(messages) == "systemFalsex assistantFalse "
    assert messages == [{"role": "developer", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": []}]


def test_arguments_stay_text_where_the_template_adds_them_to_text() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    chat = template(source)
    assert not chat.caps["supports_object_arguments"]
    assert chat.caps["supports_parallel_tool_calls"]
    calls = [CALL, {"id": "b", "function": {"name": "é", "arguments": {"x": "é"}}}]
    assert chat.render([CALLED | {"tool_calls": calls}]) == 'add{"a": 1}é{"x": "é"}'


def test_arguments_are_objects_where_the_template_goes_through_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )
    chat = template(source)
    assert chat.caps["supports_object_arguments"]
    assert chat.render([CALLED]) == "<function=add><a>1"
    words = "[ARGS]{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    as_text = template(words + "{{ c.function.arguments }}{% endfor %}{% endfor %}")
    assert not as_text.caps["supports_object_arguments"]
    assert as_text.render([CALLED]) == '[ARGS]add{"a": 1}'


def test_invalid_arguments_are_left_to_the_template(real: Any) -> None:
    call = {"id": "abcdefghi", "function": {"name": "add", "arguments": "{oops"}}
    assert '"arguments": {oops}' in real(QWEN).render([USER, CALLED | {"tool_calls": [call]}])


def test_reasoning_that_is_kept_shows() -> None:
    chat = template("{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}")
    assert chat.caps["supports_preserve_reasoning"]


# -- the language


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        (
            "{% for i in [0, 1, 2, 3] %}{% if i == 1 %}"
            "{% continue %}{% elif i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{% for i in [1, 2] %}{{ loop.index }}{{ loop.length }}{{ loop.last }} {% else %}none{% endfor %}",
            "12False 22True ",
        ),
        ("{% for i in [] %}{{ i }}{% else %}none{% endfor %}", "none"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
        ("{{ {'é<': ['&', none, true]} | tojson }}", '{"é<": ["&", null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{{ '<b>' }}{{ missing }}", "<b>"),
        ("{{ 'a' ~ 1 ~ none ~ ('b' ~ 'c') }}{{ ['a', 1] | join('-') }}", "a1Nonebca-1"),
        ("{{ 'a\nb' | indent }}{{ 'aa' | replace('a', 'b') }}{{ '%s-%d' | format('x', 3) }}", "a\n    bbbx-3"),
        (
            "{{ '%05.1f' % 2 }}{{ '{:>3}'.format(1) }}{{ 'a'.center(3) }}{{ ['x'] | map('upper') | join }}",
            "002.0  1 a X",
        ),
        ("{{ 'ab' * 2 + 'c' }}{{ 2 ** 3 }}{{ [1] + [2] }}", "ababc8[1, 2]"),
        ("{% macro f(x) %}{% for y in x %}{{ y }}{% endfor %}{% endmacro %}{{ f('ab') }}", "ab"),
        ("{{ enable_thinking }}{{ add_generation_prompt }}{{ tools is defined }}", "TrueTrueFalse"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        (
            "{% set a, b = [1], {} %}{% set _ = a.append(2) %}{% set _ = b.update(c=a.pop(0)) %}{{ a }}{{ b }}",
            "[2]{'c': 1}",
        ),
    ],
)
def test_language(source: str, text: str) -> None:
    assert template(source).render([USER]) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no\n good') }}", "the chat template says: no good"),
        ("{{ missing.field }}", "the chat template fails: 'missing' is undefined"),
        ("{{ 1 + 'a' }}", "the chat template fails: unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: access to attribute '__class__'"),
        ("{{ missing | tojson }}", "the chat template fails: Object of type Undefined is not JSON serializable"),
        ("{% for i in range(10**6) %}{% endfor %}", "the chat template fails: Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "the chat template writes more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template recurses too deeply"),
    ],
)
def test_failures_are_one_line(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        template(source).render([USER])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


FREEZE = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
NESTED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
NESTED += "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        FREEZE + "{{ f(60) }}",
        NESTED + "{{ ns.a == ns.b }}",
        "{% set n = messages | length %}{{ 9 ** (9 ** (8 + n)) }}",
        "{{ range(99999) | slice(999999999) | list | length }}",
        "{% for i in range(9999) %}{{ ([[i]] * 9999) | sum(start=[]) | length }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_fails_alone(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    slow = template("{% if messages[0].content == 'boom' %}" + source + "{% endif %}fine")
    with pytest.raises(ChatTemplateError, match=r"^the chat template (runs longer than 0\.2 s|needs too much memory)$"):
        slow.render([{"role": "user", "content": "boom"}])
    assert slow.render([USER]) == "fine"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('x' * 99999) * 99999 }}",
        "{{ ('x' * 10**6).encode() * 10**5 }}",
        "{{ '{:>{w}}'.format('a', w=10**10) }}",
        "{{ {'a': [1, 2]} | tojson(indent=10**10) }}",
        "{{ ('a' * 10**6).translate({97: 'b' * 10**5}) }}",
        "{{ (['x' * 10**6] * 10**5) | join }}",
        NESTED + "{{ ns.a }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_a_template_that_takes_all_memory_fails_alone(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(sandbox, "MAX_BYTES", 1 << 28)
    large = template("{% if messages[0].content == 'boom' %}" + source + "{% endif %}fine")
    with pytest.raises(ChatTemplateError, match=r"^the chat template (needs too much memory|runs longer than|fails: )"):
        large.render([{"role": "user", "content": "boom"}])
    assert large.render([USER]) == "fine"


def test_a_template_that_never_ends_costs_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capabilities are not probed any further."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    asked: list[object] = []
    run = sandbox._POOL.run
    monkeypatch.setattr(
        sandbox._POOL, "run", lambda source, variables: asked.append(variables) or run(source, variables)
    )
    with pytest.raises(ChatTemplateError, match=r"^the chat template runs longer than 0\.2 s$"):
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert [variables is None for variables in asked] == [True, False]  # it was parsed, and rendered


def test_a_process_that_is_killed_is_replaced() -> None:
    chat = template("{{ messages[0].content }}")
    (process, *_) = sandbox._POOL._idle
    process._process.kill()
    with pytest.raises(ChatTemplateError, match=r"^the chat template ended its process \(exit status -9\)$"):
        chat.render([USER])
    assert chat.render([USER]) == "Hi"


def test_templates_are_rendered_side_by_side() -> None:
    chat = template("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda i: chat.render([{"role": "user", "content": str(i)}]), range(100)))
    assert texts == [str(i) for i in range(100)]
    assert len(sandbox._POOL._idle) <= sandbox.MAX_PROCESSES


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% if %}", "the chat template, line 2: Expected an expression, got 'end of statement block'"),
        ("{{ x | nonsense }}", "the chat template, line 1: No filter named 'nonsense'."),
        ("{% for x in y %}", "the chat template, line 1: Unexpected end of template."),
    ],
)
def test_templates_that_do_not_parse(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        template(source)
    assert str(caught.value).startswith(message)


# -- variables, reasoning and continued answers


def test_variables_of_older_templates_have_defaults() -> None:
    source = "{{ date_string }}|{{ datetime }}|{{ functions is defined }}"
    date, time, functions = template(source).render([USER]).split("|")
    now = datetime.now()
    assert datetime.strptime(date, "%d %b %Y").date() in (now.date(), (now - timedelta(minutes=1)).date())
    assert abs(datetime.strptime(time, "%b %d %Y %H:%M:%S GMT") - now) < timedelta(minutes=1)
    assert functions == "False"
    assert template("{{ 'Tools:' + functions }}").render([USER]) == "Tools:"
    assert template(source).render([USER], date_string="x", datetime="y") == "x|y|False"
    listed = template("{{ tools | length }}{{ functions }}{# <tool_call> #}").render([USER], tools=[TOOL])
    assert json.loads(listed[1:]) == [TOOL]


def test_generators_become_json_lists() -> None:
    source = "{{ messages | map(attribute='role') | tojson }}"
    assert template(source).render([USER, ASSISTANT]) == '["user", "assistant"]'


IN_FIELD = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<{{ m.FIELD }}>{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
)
IN_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<' + part.thinking + '>' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        IN_PARTS,
        *(IN_FIELD.replace("FIELD", name) for name in ("reasoning_content", "thinking", "reasoning", "thought")),
    ],
)
def test_reasoning_stands_where_the_template_reads_it(source: str) -> None:
    turns = [USER, {**CALLED, "reasoning_content": "Hm."}, ANSWER]
    assert template(source).render(turns) == "Hi<Hm.>add2"


def test_reasoning_is_left_out_where_the_template_reads_none() -> None:
    turns = [USER, {**CALLED, "reasoning_content": "Hm."}, ANSWER]
    assert template(IN_FIELD.replace("FIELD", "nothing")).render(turns) == "Hi<>add2"


AS_TEXT = "{% for m in messages %}<{{ m.role }}>CONTENT{% endfor %}{{ tools | tojson if tools }}"


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content if m.content is string else m.content | tojson }}",  # LFM2, GigaChat 3, Jamba
        "{{ m.content }}",
        "{{ m.content | tojson | tojson if m.content is not string else m.content }}",
        "{{ m.content | string | escape if m.content is not string else m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% for k, v in part.items() %}"
        "{{ k }}: {{ v }}\n{% endfor %}{% endfor %}{% endif %}",
    ],
)
@pytest.mark.parametrize("turn", [ASSISTANT, {**CALLED, "content": "Hello"}])
def test_reasoning_never_becomes_json_in_the_prompt(content: str, turn: dict[str, Any]) -> None:
    plain = template(AS_TEXT.replace("CONTENT", content))
    assert not plain.caps["supports_typed_content"]
    expected = plain.render([USER, turn, USER2])
    assert plain.render([USER, {**turn, "reasoning_content": 'Hm\n"so"'}, USER2]) == expected
    assert "Hello" in expected


def test_typed_reasoning_fails_in_calling_turns_and_is_left_out_of_the_others() -> None:
    source = IN_PARTS.replace("{% for call in", "{% if m.tool_calls %}{{ 'x' + m.content }}{% endif %}{% for call in")
    assert template(source).render([USER, {**CALLED, "reasoning_content": "Hm."}]) == "Hixadd"


def test_a_template_that_takes_content_or_thinking_before_a_call_gets_content() -> None:
    source = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ m.thinking }}{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    both = {**CALLED, "content": "Let me see.", "reasoning_content": "Hm."}
    assert template(source).render([USER, both]) == "HiLet me see.add"
    assert template(source).render([USER, {**both, "content": None}]) == "HiHm.add"


RESULTS_WITHIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}!{{ call.function.name }}"
    "{% endfor %}{% for r in m.tool_responses %}response:{{ r.name }}{{ r.response }}{% endfor %}{% endfor %}"
)


def test_results_stand_in_the_turn_that_calls_only_where_the_template_reads_them_there() -> None:
    turns = [USER, CALLED, ANSWER]
    assert template(RESULTS_WITHIN).render(turns) == "<user>Hi<assistant>!addresponse:add2"
    word = RESULTS_WITHIN.replace("in m.tool_responses", "in []") + "{{ '<tool_responses>' }}"
    assert template(word).render(turns) == "<user>Hi<assistant>!add<tool>2<tool_responses>"


def test_no_reasoning_effort_is_what_the_template_has_for_it() -> None:
    named = "{% for m in messages %}{{ m.content }}{% endfor %}Reasoning: {{ reasoning_effort or 'medium' }}"
    assert template(named).render([USER], reasoning_effort="none") == "HiReasoning: low"
    switch = "{{ enable_thinking }} {{ thinking }} {{ 'x' if reasoning_effort == 'none' }}"
    assert template(switch).render([USER], reasoning_effort="none") == "False False x"
    assert template(switch).render([USER], reasoning_effort="high") == "True  "
    assert template(switch).render([USER], enable_thinking=False) == "False False "
    assert template(switch).render([USER], enable_thinking=False, thinking=True) == "False True "


HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text", "thought", "opened", "expected"),
    [
        ("<think></think>", "It is", "", True, ("</think>\n\n", "It is")),
        ("<think></think>", "It is", "", False, ("", "It is")),
        ("<think></think>", "<think>\nSo", "", True, ("", "So")),
        ("<think></think>", "So it is.</think>Two", "", True, ("", "So it is.</think>Two")),
        ("<think></think>", "", "Hm", True, ("", "Hm")),
        ("<think></think>", "", "Hm", False, ("", "<think>\nHm")),
        ("<think></think>", "It is", "Hm", True, ("", "Hm\n</think>\n\nIt is")),
        ("no reasoning", "It is", "Hm", False, ("", "It is")),
        (HARMONY, "It is", "", False, ("<|channel|>final<|message|>", "It is")),
        (HARMONY, "<|channel|>final<|message|>It", "", False, ("", "<|channel|>final<|message|>It")),
        (HARMONY, "", "Hm", False, ("", "<|channel|>analysis<|message|>Hm")),
        (
            HARMONY,
            "It is",
            "Hm",
            False,
            ("", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>It is"),
        ),
    ],
)
def test_a_continued_answer_begins_as_the_model_would(
    source: str, text: str, thought: str, opened: bool, expected: tuple[str, str]
) -> None:
    assert template(source).continuation(text, thought, opened) == expected


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_a_template_that_is_no_text_is_named(key: str) -> None:
    vocabulary = {"model": "llama", "tokens": [b"<unk>", b"<s>", b"</s>"], "token_type": [2, 3, 3]}
    tokenizer = tokenizer_from({f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()})
    with pytest.raises(ChatTemplateError, match=f"^{key} is of type int, not a text$"):
        from_metadata({key: 7}, tokenizer)


@pytest.mark.parametrize(("block", "n"), [("for a in b", 30), ("for a in b", 5000), ("if a", 5000)])
def test_blocks_in_each_other_beyond_what_python_compiles_are_refused(block: str, n: int) -> None:
    source = f"{{% {block} %}}" * n + ("{% end" + block.split()[0] + " %}") * n
    with pytest.raises(ChatTemplateError, match=r"^the chat template is nested too deeply$"):
        ChatTemplate(source, bos_token="", eos_token="")
