"""Tool-call formats of model families, each a row of markers, and the family of a chat template.

gpt-oss, Gemma, Muse and the generic format have readers by hand, for what markers do not say.
Facts: OpenAI's description of harmony, the models' own chat templates, and what llama.cpp accepts."""

from __future__ import annotations

from logitless.models.chat.tool_calls.call_object import closing
from logitless.models.chat.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4, OF_FUNCTION_GEMMA, OF_GEMMA4
from logitless.models.chat.tool_calls.harmony import GPT_OSS, MUSE, MUSE_REASONING
from logitless.models.chat.tool_calls.json_text import StringText
from logitless.models.chat.tool_calls.parser import CallFormat, NotACall, Parser, Step
from logitless.models.chat.tool_calls.probed.markers import ID, JSON, NAMED, NUMBER, PYTHON, TAGGED, TYPE, Markers
from logitless.models.chat.tool_calls.probed.reader import call_format, read_objects, with_syntax
from logitless.models.chat.tool_calls.values import text_value, value

_NAME, _ARGUMENTS, _PARAMETERS = '{"name": ', ', "arguments": ', ', "parameters": '
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_BEGIN_ALL, _END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

HERMES = call_format(
    Markers(JSON, "<tool_call>\n", _ARGUMENTS, "\n</tool_call>", separator="\n", head=_NAME, tail="}"), "Hermes 2 Pro"
)
_LLAMA = Markers(JSON, "", _PARAMETERS, "", separator="; ", head=_NAME, tail="}")
LLAMA3 = call_format(_LLAMA, "Llama 3.x", triggers=("<|python_tag|>",), opening=("{",), preserved=("<|python_tag|>",))
# its other templates write Python, which probes find
LLAMA4 = call_format(
    _LLAMA,
    "Llama 4",
    triggers=(f"{_PYTHON_START}{_PYTHON_END}", _PYTHON_START),
    opening=("{",),
    preserved=(_PYTHON_START, _PYTHON_END),
    ends=(_PYTHON_END,),
)
NEMOTRON = call_format(
    Markers(JSON, "", _ARGUMENTS, "", "<TOOLCALL>[", "]</TOOLCALL>", ", ", _NAME, "}"), "Nemotron Nano 2"
)
_OF_MISTRAL = {
    "preserved": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "ends": ("[TOOL_CALLS]",),
    "id_prefix": "",
    "id_letters": 9,  # the templates refuse others
}
_MISTRAL_NAMED = Markers(NAMED, "[TOOL_CALLS]", "[ARGS]", "", id_mark="[CALL_ID]")
MISTRAL_NAMED = call_format(_MISTRAL_NAMED, "Mistral v11", **_OF_MISTRAL)
MISTRAL = call_format(
    Markers(JSON, "", _ARGUMENTS, "", "[TOOL_CALLS][", "]", ", ", _NAME, f', "id": "{ID}"}}', also=_MISTRAL_NAMED),
    "Mistral Nemo",
    **_OF_MISTRAL,
)
_V31 = Markers(NAMED, _BEGIN, _SEP, _END, _BEGIN_ALL, _END_ALL)
_R1 = Markers(NAMED, f"{_BEGIN}function{_SEP}", "\n```json\n", f"\n```{_END}", _BEGIN_ALL, _END_ALL, "\n", also=_V31)
DEEPSEEK = call_format(_R1, "DeepSeek R1", preserved=_V31.tags, ends=_V31.ends)
DEEPSEEK_V31 = call_format(_V31, "DeepSeek V3.1", read=DEEPSEEK.read)
COMMAND_R = call_format(
    Markers(
        *(JSON, "", _PARAMETERS, "", "<|START_ACTION|>[", "]<|END_ACTION|>", ", "),
        *(f'{{"tool_call_id": "{NUMBER}", "tool_name": ', "}", "tool_name"),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "Command R7B",
)
COMMAND_R_ACTION = call_format(
    Markers(JSON, "", _PARAMETERS, "", "Action: ```json\n[", "]```", ", ", '{"tool_name": ', "}", "tool_name"),
    "Command R",
    triggers=("Action:",),
    opening=(),
    ends=("```",),
)
QWEN3_CODER = call_format(
    Markers(
        *(TAGGED, "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        separator="\n",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>",
        gap="\n",
    ),
    "Qwen3 Coder",
    triggers=("<tool_call>", "<function="),
    preserved=("<tool_call>", "</tool_call>"),
    ends=("</function>", "</tool_call>"),
    ends_reasoning=("<tool_call>",),  # Qwen 3.5 calls without closing it; llama.cpp reads it as a call
)
_GRANITE = (JSON, "", _ARGUMENTS, "", "<|tool_call|>[", "]", ", ", _NAME, "}")
GRANITE = call_format(Markers(*_GRANITE), "Granite 3")
GRANITE_THINKS = call_format(  # the tags around answers are there after reasoning only
    Markers(*_GRANITE, around=("<response>", "</response>")), "Granite 3.3", around=None
)
LFM2 = call_format(Markers(PYTHON, "", "(", "", "<|tool_call_start|>[", "]<|tool_call_end|>", ", "), "LFM2")
KIMI_K3 = with_syntax(
    call_format(
        Markers(
            TAGGED,
            '<|open|>call tool="',
            f'" index="{NUMBER}"<|sep|>',
            "<|close|>call<|sep|>",
            section="<|open|>tools<|sep|>",
            section_end="<|close|>tools<|sep|>",
            key_begin='<|open|>argument key="',
            key_end=f'" type="{TYPE}"<|sep|>',
            value_end="<|close|>argument<|sep|>",
            types=("string", ""),
            around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ),
        "Kimi K3",
        ends_reasoning=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
    *('<|open|>message role="assistant"<|sep|>', "<|close|>message<|sep|>", "<|end_of_msg|>"),
)
FUNCTIONARY = call_format(
    Markers(NAMED, "", "\n", "", separator=">>>"),
    "Functionary 3.2",
    triggers=(">>>all\n", ">>>"),
    opening=("all\n",),
    syntax=("all\n", ">>>all\n"),
    around=("all\n", ""),
    opens_with_name=True,
)


def _generic(p: Parser, trigger: str) -> Step[None]:
    """{"tool_call": {…}}, {"tool_calls": [{…}, …]} or {"response": "…"} as the whole answer."""
    key = yield from text_value(p)
    if key not in ("tool_call", "tool_calls", "response") or (yield from p.after_blanks()) != ":":
        raise NotACall
    if key == "response":
        c = yield from p.after_blanks()
        if c != '"':
            raise NotACall
        p.back(c)
        p.frame()
        text = StringText()
        whole = yield from value(p, lambda piece: p.content(text.feed(piece)))
    else:
        whole = yield from read_objects(p, p.style.names, "name", sure=True)
    if whole:
        yield from closing(p, "}")


GENERIC = CallFormat("Generic", (), ("{",), _generic, instructs=True)

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
REASONING_OF = {
    GPT_OSS.name: ("<|channel|>analysis<|message|>", "<|end|>"),
    KIMI_K3.name: ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    MUSE.name: MUSE_REASONING,
    FUNCTIONARY.name: None,
}
"""Reasoning tags of families whose templates need no probe of their formats."""

_FAMILIES: tuple[tuple[CallFormat, str, *tuple[str, ...]], ...] = (
    (GPT_OSS, "<|channel|>", "<|message|>"),
    (KIMI_K3, "<|open|>", "<|close|>", "<|sep|>"),
    (MUSE, "<atem:function_calls>", "<|message|>"),
    (FUNCTIONARY, ">>>all", ">>>${recipient}"),
    (COMMAND_R, "<|START_ACTION|>"),
    (COMMAND_R, "<|START_RESPONSE|>"),
    (COMMAND_R_ACTION, "Action:", "tool_name"),
    (DEEPSEEK, _BEGIN_ALL, "```json"),
    (DEEPSEEK_V31, _BEGIN_ALL),
    (QWEN3_CODER, "<function=", "<parameter="),
    (MISTRAL_NAMED, "[TOOL_CALLS]", "[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]"),
    (GEMMA4, f"{OF_GEMMA4.begin}call:"),
    (FUNCTION_GEMMA, OF_FUNCTION_GEMMA.begin),
    (NEMOTRON, "<TOOLCALL>"),
    (HERMES, "<tool_call>"),
    (LLAMA3, "<|python_tag|>"),
    (LLAMA3, "<|start_header_id|>", "ipython"),
    (LLAMA4, "<|header_start|>", "ipython"),
    # the templates of Granite 3 and LFM2 describe calls or tools, but do not write calls
    (GRANITE_THINKS, "<|tool_call|>", "<response>"),
    (GRANITE, "<|tool_call|>"),
    (LFM2, "<|tool_list_start|>"),
    (LFM2, "List of tools: ["),
)
"""Families by the texts of their templates: the first whose texts are all there."""


def family_of(template: str) -> CallFormat:
    """The tool-call format that a template's source shows."""
    return next((calls for calls, *texts in _FAMILIES if all(text in template for text in texts)), GENERIC)


def reasoning_tags(template: str) -> tuple[str, str] | None:
    """The reasoning tags of models with this template, if they reason."""
    family = family_of(template).name
    if family in REASONING_OF:
        return REASONING_OF[family]
    return next((tags for tags in REASONING_TAGS if _shows(template, tags[0]) or tags[1] in template), None)


def _shows(template: str, text: str) -> bool:
    """True if the template has the text, or Jinja's way to write it."""
    return text in template or text.replace("\n", "\\n") in template
