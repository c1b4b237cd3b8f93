"""Chat template: renders messages as the prompt text that the model was trained on."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from logitless.models.chat.builtins import BUILTINS, CHATML, CHATML_END
from logitless.models.chat.efforts import Efforts
from logitless.models.chat.errors import ChatTemplateError, ExceededBounds
from logitless.models.chat.sandbox import SandboxedRenderer
from logitless.models.chat.tool_calls import generic
from logitless.models.chat.tool_calls.families import REASONING_OF, family_of, reasoning_tags
from logitless.models.chat.tool_calls.probed.probe import Probe
from logitless.models.chat.tool_calls.probed.reader import with_syntax
from logitless.models.chat.tool_results import in_call_order, one_by_one, with_ids, within_turns
from logitless.models.tokenizer import Tokenizer

__all__ = ["CHATML", "ChatTemplate", "ChatTemplateError", "builtin_names", "from_metadata", "of_file"]

log = logging.getLogger("logitless.chat")

Message = dict[str, Any]

REASONING_FORMS = ("reasoning_content", "thinking", "reasoning", "thought", "parts")
"""Fields of a message in which templates read reasoning; "parts": typed parts of its content."""


def builtin_names() -> list[str]:
    """Names of the built-in templates (`--chat-template`)."""
    return sorted(BUILTINS)


def from_metadata(metadata: Mapping[str, Any], tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    """The template of a GGUF file, or of `source` (Jinja, or a built-in's name); ChatML if there is
    none.

    Raises ChatTemplateError if the template is not valid Jinja."""

    def text(id: int | None) -> str:
        return "" if id is None else tokenizer.text(id)

    def source_at(key: str) -> str:
        value = metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ChatTemplateError(f"{key} is of type {type(value).__name__}, not a text")
        return value or ""

    tool_use = ""
    if source is None:
        tool_use = source_at("tokenizer.chat_template.tool_use")
        source = source_at("tokenizer.chat_template") or CHATML
    return ChatTemplate(source, bos_token=text(tokenizer.bos_id), eos_token=text(tokenizer.eos_id), tool_use=tool_use)


def of_file(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a GGUF file. ChatML stands in for one that cannot be used, with a line in the log."""
    try:
        return from_metadata(metadata, tokenizer)
    except ChatTemplateError as error:
        log.warning("the model's chat template is not usable, ChatML stands in: %s", error)
        return from_metadata({}, tokenizer)


class ChatTemplate:
    """Renders conversations as llama-server does, with its adjustments to the template's abilities.

    `source` is Jinja or the name of a built-in template; `tool_use`, if given, renders requests
    with tools. `caps` are the capabilities that probes found; `calls` and `reasoning` the model's
    formats of tool calls and reasoning; `between_parts` is the text between text parts. Raises
    ChatTemplateError if a source is not valid Jinja, or exceeds its bounds for a short conversation.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, tool_use: str = "") -> None:
        self.source = BUILTINS.get(source, source)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._renderer = _renderer(self.source)
        self._tool_renderer = _renderer(tool_use) if tool_use else self._renderer
        probe = _Probe(self._render)
        self.caps: dict[str, bool] = probe.caps()
        self.between_parts = probe.between_parts() if self.caps["supports_typed_content"] else "\n"
        self._results_within = probe.reads_results_within_turns() and not probe.shows_results()
        self._reasoning_form = probe.reasoning_form()
        self._efforts = Efforts(probe.with_effort, self.source + tool_use)
        self._takes_results = probe.takes_results()
        self.calls = family_of(tool_use or self.source)
        self.reasoning = reasoning_tags(self.source)
        self._probe_formats()
        self._needs_ids = self.caps["supports_tool_calls"] and not probe.takes_calls_without_ids()

    @property
    def is_sandboxed(self) -> bool:
        """True if another process renders the conversations."""
        return isinstance(self._renderer, SandboxedRenderer) or isinstance(self._tool_renderer, SandboxedRenderer)

    def turn_end(self, tokenizer: Tokenizer) -> str:
        """The text that ends the model's turn: ChatML's, where the vocabulary has no such token.
        "": an end token does."""
        if self.source != CHATML or len(tokenizer.encode(CHATML_END, add_special=False)) == 1:
            return ""
        return CHATML_END

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tools_required: bool = False,
        parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation. `kwargs`: further variables, such as enable_thinking
        (default: true).

        If the template knows no tools, the system message explains them. Content is a text, null or
        a list of typed parts. A reasoning_effort that the template does not know never reaches it
        (`Efforts`). Raises ChatTemplateError, one line with the template's own message,
        if the template refuses the conversation, fails, or exceeds a bound."""
        variables = self._defaults(kwargs) | self._efforts.variables(kwargs.get("reasoning_effort"))
        variables |= {name: kwargs[name] for name in kwargs if name != "reasoning_effort"}
        variables["add_generation_prompt"] = add_generation_prompt
        if tools and self.calls.instructs:
            messages = generic.instructed(messages, tools, required=tools_required, parallel=parallel_tool_calls)
        elif tools and not self.caps["supports_tools"] and generic.is_written(self.calls):
            messages = generic.described(messages, tools, self.calls)
        elif tools:  # undefined otherwise: templates test for that
            variables["tools"] = tools
        messages = in_call_order(messages)
        if not self.caps["supports_tool_calls"]:
            messages = generic.as_text(messages, self.calls, results=self.calls.instructs or not self._takes_results)
        else:
            if self._needs_ids:
                messages = with_ids(messages, self.calls.accepts_id, self.calls.id_letters)
            if not self.caps["supports_parallel_tool_calls"]:
                messages = one_by_one(messages)
            if self._results_within:
                messages = within_turns(messages)
        return self._render(self._adapt(messages), variables)

    def _probe_formats(self) -> None:
        """Set the formats of calls and reasoning that the source does not show to those of its renderings."""
        if self.calls.name in REASONING_OF or not self.caps["supports_tools"]:
            return

        def rendered(messages: list[Message], tools: list[dict[str, Any]]) -> str:
            variables = {"tools": tools, "add_generation_prompt": False, "enable_thinking": True}
            try:
                return self._render(self._adapt(messages), variables)
            except ExceededBounds:
                raise
            except ChatTemplateError:
                return ""

        formats = Probe(rendered, self.reasoning)
        if self.caps["supports_tool_calls"]:
            self.calls = formats.call_format(self.calls)
        if not self._reasoning_form:
            return

        def with_reasoning(message: Message, thought: str) -> Message:
            return _with_reasoning(message, self._reasoning_form, thought)

        self.reasoning = self.reasoning or formats.reasoning_tags(with_reasoning)
        if self.reasoning is not None and (restart := formats.restart(with_reasoning, self.reasoning[1])):
            self.calls = with_syntax(self.calls, restart=restart)

    def _defaults(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Variables that templates read and a request need not give, as llama.cpp has them."""
        now = datetime.now()
        values: dict[str, Any] = {
            "enable_thinking": True,
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y %H:%M:%S GMT"),
        }
        if variables.get("reasoning_effort") == "none" or variables.get("enable_thinking") is False:
            values |= {"enable_thinking": False, "thinking": False}  # the name in DeepSeek's and Kimi's
        return values

    def without_empty_thought(self, prompt: str) -> str:
        """The prompt less the reasoning without a word with which it ends, if it does (Qwen 3, Hunyuan 3)."""
        if self.reasoning is None:
            return prompt
        opening, closing, restart = (re.escape(part.strip()) for part in (*self.reasoning, self.calls.restart))
        return re.sub(rf"{opening}\s*{closing}\s*(?:{restart})?\s*\Z", "", prompt)

    def continuation(self, text: str, thought: str, opened: bool) -> tuple[str, str]:
        """(syntax, answer) that begin an answer with this text and reasoning, after the generation
        prompt.

        `opened`: the generation prompt has opened the reasoning, which a text without reasoning
        closes first, as in llama.cpp. The syntax is what the model would have written around the
        text; the answer is the client's part."""
        opening, closing = self.reasoning or ("", "")
        gap = "" if self.calls.restart or self.calls.name in REASONING_OF or opening.endswith("\n") else "\n"
        frame = self.calls.around[0] if self.calls.around else ""
        framed = frame + text if text and not text.startswith(("<|channel|>", frame) if frame else ()) else text
        if thought and self.reasoning:
            answer = f"{gap}{closing}{self.calls.restart or gap * 2}{framed}" if text else ""
            return "", ("" if opened else opening + gap) + thought + answer
        begins = text.lstrip()
        if opened and begins.startswith(opening):
            return "", begins.removeprefix(opening).lstrip("\n")
        syntax = framed[: len(framed) - len(text)]
        if opened and text and closing not in text:
            syntax = f"{closing}{gap * 2}{syntax}"
        return syntax, text

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        tokens: dict[str, Any] = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        renderer = self._tool_renderer if "tools" in variables else self._renderer
        if tools := variables.get("tools"):  # by the names of Firefunction and SmolLM 3, too
            tokens |= {"functions": json.dumps(tools, ensure_ascii=False, indent=2), "xml_tools": tools}
        elif "+ functions" in self.source:  # Firefunction's template fails without it
            tokens |= {"functions": ""}
        return renderer(tokens | variables | {"messages": messages})

    def _adapt(self, messages: list[Message]) -> list[Message]:
        """Copies of the messages in the form that this template takes."""
        adapted = [self._adapt_message(message) for message in messages]
        if not self.caps["supports_system_role"] and adapted and adapted[0].get("role") == "system":
            system, *adapted = adapted  # becomes part of the first user message
            if adapted and isinstance(adapted[0]["content"], str):
                adapted[0] = adapted[0] | {"content": f"{system['content']}\n{adapted[0]['content']}"}
            else:
                adapted.insert(0, system | {"role": "user"})
        return adapted

    def _adapt_message(self, message: Message) -> Message:
        adapted = dict(message)
        # gpt-oss knows the role
        if adapted.get("role") == "developer" and "<|channel|>" not in self.source:
            adapted["role"] = "system"
        content = adapted.get("content")
        if isinstance(content, list) and self.caps["supports_string_content"]:
            content = self.between_parts.join(part["text"] for part in content if isinstance(part.get("text"), str))
        adapted["content"] = "" if content is None else content
        if isinstance(content, str) and not self.caps["supports_string_content"]:
            adapted["content"] = [{"type": "text", "text": content}]
        thought = adapted.get("reasoning_content")
        if isinstance(thought, str) and thought:
            adapted = _with_reasoning(adapted, self._reasoning_form, thought)
        calls = adapted.pop("tool_calls", None)
        if calls:
            adapted["tool_calls"] = [self._adapt_call(call) for call in calls]
        return adapted

    def _adapt_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A tool call with its arguments as an object if the template takes one, else as JSON text."""
        function = call.get("function")
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.caps["supports_object_arguments"] and isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            arguments = parsed if isinstance(parsed, dict) else arguments
        elif not self.caps["supports_object_arguments"] and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": function | {"arguments": arguments}}


def _renderer(source: str) -> Callable[[dict[str, Any]], str]:
    """In this process for our own templates, in a sandbox for model files' templates."""
    if source not in BUILTINS.values():
        return SandboxedRenderer(source)
    from logitless.models.chat.jinja import Renderer  # jinja2 is imported where it renders

    return Renderer(source)


class _Probe:
    """Probe of a template's capabilities: renders marked conversations and looks for the marks."""

    def __init__(self, render: Any) -> None:
        self._try = render

    def caps(self) -> dict[str, bool]:
        """The capabilities by llama-server's names."""
        typed = self._text([_user([{"type": "text", "text": _QUOTED, _FOREIGN: _FOREIGN}])])
        calls = self._calls({"MARK-P": "value"}, 1)
        # An object written as Python does means that the template takes text.
        object_arguments = "MARK-P" in calls and "'MARK-P'" not in calls
        arguments: Any = {"MARK-P": "value"} if object_arguments else '{"MARK-P": "value"}'
        calls = calls if object_arguments else self._calls(arguments, 1)
        typed_content = _shows_text(typed)
        reasoned = {"role": "assistant", "content": "a", "reasoning_content": "MARK-A"}
        return {
            "supports_string_content": "MARK-A" in self._text([_user("MARK-A")]) or not typed_content,
            "supports_typed_content": typed_content,
            "supports_system_role": "MARK-A" in self._text([{"role": "system", "content": "MARK-A"}, _user("b")]),
            "supports_tools": "MARK-T" in self._text([_user("a")], tools=[_TOOL]),
            "supports_tool_calls": _shows_call(calls, 1),
            "supports_parallel_tool_calls": _shows_call(self._calls(arguments, 2), 2),
            "supports_object_arguments": object_arguments,
            "supports_preserve_reasoning": "MARK-A" in self._text([_user("a"), reasoned, _user("b")]),
        }

    def between_parts(self) -> str:
        """The text that the template writes between two text parts of a message."""
        parts = [{"type": "text", "text": f"MARK-{name}"} for name in "AB"]
        after = self._text([_user(parts)]).partition("MARK-A")[2]
        between, mark, _ = after.partition("MARK-B")
        return between if mark else "\n"

    def reasoning_form(self) -> str:
        """The place where the template reads reasoning: one of REASONING_FORMS; "": none.

        A form does not count if the template writes it as JSON or as Python does, nor typed parts if it fails
        with them."""
        calling = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        answering = {"role": "assistant", "content": "a"}
        turns: list[list[Message]] = [[calling, _RESULT], [answering]]
        plain = [self._reasoned(each, "") for each in turns]
        for form in REASONING_FORMS:
            texts = [self._reasoned(each, form) for each in turns]
            wrong = any(
                (form == "parts" and before and not text) or ("MARK-A" in text and not _shows_text(text))
                for before, text in zip(plain, texts, strict=True)
            )
            if not wrong and any(map(_shows_text, texts)):
                return form
        return ""

    def _reasoned(self, turns: list[Message], form: str) -> str:
        """The rendering of turns whose first one has reasoning in this form."""
        first = _with_reasoning(turns[0], form, _QUOTED)
        if form == "parts":
            first["content"][0][_FOREIGN] = _FOREIGN
        return self._text([_user("a"), first, *turns[1:]], tools=[_TOOL])

    def with_effort(self, effort: Mapping[str, Any]) -> str:
        """The rendering of a short conversation with an effort, by the name of its variable. Raises
        ChatTemplateError."""
        thinking = {"enable_thinking": True, "thinking": True, "add_generation_prompt": True}
        return str(self._try([_user("a")], {**thinking, **effort}))

    def reads_results_within_turns(self) -> bool:
        """True if the template reads the results of calls from the message that calls."""
        calling = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        turns = within_turns([_user("a"), calling, _RESULT])
        return _RESULT["content"] in self._text(turns, tools=[_TOOL])

    def takes_results(self) -> bool:
        """True if the template writes messages of results after a call that it does not write."""
        calling = {"role": "assistant", "content": "a"}
        return _RESULT["content"] in self._text([_user("a"), calling, _RESULT], tools=[_TOOL])

    def takes_calls_without_ids(self) -> bool:
        """True if the template writes a call and its result without an id. Those that do not may refuse ids, too."""
        call, result = ({key: each[key] for key in each if "id" not in key} for each in (_CALL, _RESULT))
        return bool(self._text([_user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}, result]))

    def shows_results(self) -> bool:
        """True if the template writes a result in a message of its own as the result of a call."""
        return "response:MARK-1" in self._calls({"MARK-P": "value"}, 1)

    def _text(self, messages: list[Message], **variables: Any) -> str:
        try:
            return str(self._try(messages, {"add_generation_prompt": True, "enable_thinking": True} | variables))
        except ExceededBounds:
            raise  # each further one would take as long
        except ChatTemplateError:
            return ""

    def _calls(self, arguments: Any, n: int) -> str:
        calls = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": f"MARK-{i}", "arguments": arguments}}
            for i in range(1, n + 1)
        ]
        answers = [{"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "r"} for call in calls]
        calling = {"role": "assistant", "content": "", "tool_calls": calls}
        final = {"role": "assistant", "content": "c"}
        return self._text([_user("a"), calling, *answers, final, _user("b")], tools=[_TOOL])


_TOOL = {
    "type": "function",
    "function": {
        "name": "MARK-T",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"p": {"type": "string", "description": "d"}},
            "required": ["p"],
        },
    },
}


_CALL = {"id": "call00001", "type": "function", "function": {"name": "MARK-T", "arguments": {"p": "v"}}}
_RESULT = {"role": "tool", "name": "MARK-T", "tool_call_id": "call00001", "content": "MARK-R"}


_QUOTED = "MARK-A\"'"
"""A text that is another one in JSON, as Python writes it, and in HTML."""
_FOREIGN = "MARK-K"
"""A member of typed parts that no template knows."""


def _shows_text(text: str) -> bool:
    """True if a rendering has the text itself, not the part or the message around it."""
    return _QUOTED in text and _FOREIGN not in text


def _shows_call(text: str, n: int) -> bool:
    """True if a rendering has call number n, by its name or, as Kimi's has, by its id."""
    return f"MARK-{n}" in text or (f"call0000{n}" in text and "MARK-P" in text)


def _with_reasoning(message: Message, form: str, thought: str) -> Message:
    """The message with its reasoning where the template reads it."""
    content = message.get("content")
    if form == "parts":
        text = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        return {**message, "content": [{"type": "thinking", "thinking": thought}, *text]}
    if not form or (form == "thinking" and content and message.get("tool_calls")):
        return message  # gpt-oss takes one of the two before a call
    return {**message, form: thought}


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
