"""Chat request bodies: messages → prompt by the model's template → request. A 400 names its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec.structs import replace as replace_struct

from logitless.engine.errors import InvalidRequest
from logitless.engine.params import Generation
from logitless.engine.sampling.params import Param
from logitless.engine.sampling.reasoning_budget import ReasoningLimit
from logitless.frontend.chat.messages import Chat, content_text, parse_messages
from logitless.frontend.chat.tools import Tools, chat_constraint, parse_style, parse_tools, preserved_ids
from logitless.frontend.dialects.translate import Translated
from logitless.frontend.fields import as_array, as_object, as_text, bad_request, read
from logitless.frontend.media.media import Medium
from logitless.frontend.parser import (
    MAX_TOP,
    GenerationJob,
    RequestParser,
    refuse_unsupported,
)
from logitless.models.chat.efforts import UnknownEffort
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.parser import Style

_OURS = ("self", "messages", "tools", "add_generation_prompt", "tools_required", "parallel_tool_calls")
"""Variables that chat_template_kwargs cannot set."""


class ChatGeneration(Generation, frozen=True, kw_only=True):
    """POST /v1/chat/completions, beside the conversation."""

    logprobs: Annotated[bool, Param("show log-probabilities")] = False
    top_logprobs: Annotated[int, Param("of so many likely tokens", 0, MAX_TOP)] = 20
    n_probs: Annotated[int, Param("both in one, where logprobs is not given", 0, MAX_TOP)] = 0
    echo: Annotated[bool, Param("begin with the assistant's text that is continued")] = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation; `prefill` is the assistant's text that the model is to continue."""

    text: str
    prefill: str = ""
    style: Style = field(default_factory=Style)
    tools: Tools = field(default_factory=Tools)
    preserved: frozenset[int] = frozenset()
    thinks: bool = True  # the model may reason first, if it can
    limit: ReasoningLimit | None = None
    reasoning_format: str = "auto"
    include_reasoning: bool = True
    media: tuple[Medium, ...] = ()  # the text has a marker for each


def parse_chat(body: Mapping[str, Any], parser: RequestParser, media: Sequence[Medium] = ()) -> GenerationJob:
    """POST /v1/chat/completions. `media`: those whose markers the messages have already."""
    older = _first_form(body)
    if older is not None:
        job = older.read(lambda chat: _parse(chat, parser))
        return replace(job, functions=bool(body.get("functions")))
    return _parse(body, parser, media)


def _parse(body: Mapping[str, Any], parser: RequestParser, media: Sequence[Medium] = ()) -> GenerationJob:
    params = parser.read(ChatGeneration, body)
    top = params.n_probs or None
    if params.logprobs:
        top = params.top_logprobs
    elif body.get("top_logprobs") is not None:
        bad_request("top_logprobs", "needs logprobs to be true")
    prompt = _render(body, parser, media)
    template = parser.template
    assert template is not None  # _render refuses
    prefixes = (prompt.prefill,) if prompt.prefill and params.echo else ()
    job = parser.job(params, [parser.rendered(prompt.text, prompt.media, params)], top=top, prefixes=prefixes)
    first = job.requests[0]
    # reasoning that the client wants as text would be a part of the JSON
    thinks = prompt.thinks and (bool(prompt.tools.tools) or prompt.reasoning_format != "none")
    constraint = first.sampling.grammar
    if prompt.tools.tools or constraint is not None:
        constraint = chat_constraint(constraint, prompt.tools, template, prompt.style.primer, thinks, parser.grammars)
    of_chat: dict[str, Any] = {
        "preserved": first.preserved | prompt.preserved,
        "turn_end": "" if params.ignore_eos else template.turn_end(parser.tokenizer),
        "reasoning": prompt.limit,
    }
    return replace(
        job,
        requests=tuple(
            replace(request, sampling=replace_struct(request.sampling, grammar=constraint), **of_chat)
            for request in job.requests
        ),
        style=prompt.style,
        reasoning=prompt.include_reasoning,
        skipped_tools=prompt.tools.skipped,
        settings={
            **job.settings,
            "chat_format": "Content-only" if prompt.style.calls is None else prompt.style.calls.name,
            "reasoning_format": prompt.reasoning_format,
            "reasoning_in_content": prompt.style.tags_in_content,
        },
    )


def chat_tokens(body: Mapping[str, Any], parser: RequestParser) -> int:
    """Tokens of the prompt that a chat request would have, those of its media among them."""
    older = _first_form(body)
    if older is not None:
        return older.read(lambda chat: chat_tokens(chat, parser))
    prompt = render_chat(body, parser)
    return len(parser.rendered(prompt.text, prompt.media).ids) + parser.n_start


def render_chat(body: Mapping[str, Any], parser: RequestParser) -> ChatPrompt:
    """The conversation as the model's template writes it."""
    older = _first_form(body)
    if older is not None:
        return older.read(lambda chat: render_chat(chat, parser))
    refuse_unsupported(body)
    return _render(body, parser)


def _render(body: Mapping[str, Any], parser: RequestParser, media: Sequence[Medium] = ()) -> ChatPrompt:
    template = parser.template
    if template is None:
        raise InvalidRequest("this model has no chat template; give one with --chat-template")
    config = parser.config
    defaults = {
        "reasoning_format": "none" if config.skip_chat_parsing else config.reasoning_format,
        "reasoning_effort": config.reasoning_effort,
        "reasoning_budget_tokens": config.reasoning_budget,
        "reasoning_budget_message": config.reasoning_budget_message,
    }
    chat = read(Chat, body, defaults=defaults)
    media = list(media)
    messages = parse_messages(chat, body["messages"], template.between_parts, parser.media, media)
    tools = Tools()
    if body.get("tools") or chat.tool_choice != "auto":
        tools = parse_tools(chat, body.get("tools") or (), template)
    if tools.tools:
        _refuse_beside_tools(body)
    if chat.continue_final_message and body.get("add_generation_prompt") is True:
        bad_request("continue_final_message", "cannot be true when add_generation_prompt is")
    add, last = _continued(chat, messages, body["messages"][-1], parser)
    if last is not None:
        messages = messages[:-1]
    messages = _opened(config.first_messages, messages)
    kwargs = _variables(chat, config.chat_template_kwargs)
    if chat.documents is not None:
        kwargs["documents"] = list(chat.documents)
    if tools.tools:
        kwargs["tools"] = list(tools.tools)
        kwargs |= {"tools_required": tools.choice == "required", "parallel_tool_calls": tools.parallel}
    try:
        text = template.render(messages, add_generation_prompt=add, **kwargs)
    except UnknownEffort as error:
        bad_request("reasoning_effort", str(error))
    except ChatTemplateError as error:
        raise InvalidRequest(f"field 'messages': {' '.join(str(error).split())}") from None
    tokenizer = parser.tokenizer
    if tokenizer.add_bos and tokenizer.bos_id is not None:  # the tokenizer adds it again
        text = text.removeprefix(tokenizer.piece(tokenizer.bos_id).decode("utf-8", "replace"))
    begun = _begun(text, template) if add else ""
    prefill = ""
    if last is not None:
        if last[1]:  # the continued answer has reasoning of its own
            text = template.without_empty_thought(text)
        syntax, prefill = template.continuation(*last, opened=bool(begun))
        text, begun = text + syntax, begun + syntax
    if begun and not prefill and chat.reasoning_budget_tokens == 0 and template.reasoning is not None:
        ended = f"{template.reasoning[1]}\n\n"
        text, begun = text + ended, begun + ended
    style = parse_style(chat, template, tools, begun + prefill, raw=config.skip_chat_parsing)
    return ChatPrompt(
        text + prefill,
        prefill,
        style,
        tools,
        preserved_ids(template, tools, tokenizer),
        kwargs.get("enable_thinking", True),
        _limit(chat, parser, template, style) if chat.reasoning_budget_tokens > 0 or chat.reasoning_control else None,
        chat.reasoning_format,
        chat.include_reasoning,
        tuple(media),
    )


def _refuse_beside_tools(body: Mapping[str, Any]) -> None:
    if body.get("grammar"):
        bad_request("grammar", "cannot be combined with tools")
    if body.get("stream") and body.get("logprobs"):
        bad_request("logprobs", "cannot be streamed together with tools")


def _opened(first: Sequence[dict[str, str]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation behind the server's first messages. Its own system message replaces theirs."""
    if messages and first and messages[0]["role"] in ("system", "developer"):
        own = messages[:1]
        return [*own, *(message for message in first if message["role"] != "system"), *messages[1:]]
    return [*first, *messages]


def _continued(
    chat: Chat,
    messages: list[dict[str, Any]],
    last_message: Mapping[str, Any],
    parser: RequestParser,
) -> tuple[bool, tuple[str, str] | None]:
    """(add a generation prompt, the (text, reasoning) of a last message that is to be continued)."""
    last = messages[-1]
    ends_with_assistant = last["role"] == "assistant" and not last.get("tool_calls")
    proceed = chat.continue_final_message
    if proceed is None:
        proceed = parser.config.prefill_assistant and ends_with_assistant
    if chat.continue_final_message and not ends_with_assistant:
        bad_request("continue_final_message", "the last message must be the assistant's")
    if not proceed:
        return chat.add_generation_prompt, None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        bad_request("messages", "must not end with two messages of the assistant")
    media: list[Medium] = []
    text = content_text(last_message, len(messages) - 1, "\n\n", parser.media, media) or ""
    if media:
        bad_request(media[0].name, "an answer that is continued is text alone")
    return True, (text, last.get("reasoning_content") or "")


def _variables(chat: Chat, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The template's further variables: the server's, then the request's."""
    kwargs = {**variables, **chat.chat_template_kwargs}
    for name in _OURS:
        if name in kwargs:
            bad_request("chat_template_kwargs", f"must not contain '{name}'")
    if not isinstance(kwargs.get("enable_thinking", True), bool):
        bad_request("chat_template_kwargs", "enable_thinking must be a boolean")
    effort = chat.reasoning_effort
    if effort:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if chat.reasoning_budget_tokens == 0:
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _limit(chat: Chat, parser: RequestParser, template: ChatTemplate, style: Style) -> ReasoningLimit | None:
    """Limit of the reasoning: its budget, or the client while it runs (`reasoning_control`)."""
    budget = chat.reasoning_budget_tokens
    if template.reasoning is None:
        return None
    opening, closing = template.reasoning
    forced = tuple(parser.encode(chat.reasoning_budget_message + closing, parse_special=True))
    begun = style.primer.lstrip().startswith(opening.strip()) and closing not in style.primer
    calls = tuple(text.encode() for text in style.calls.ends_reasoning) if style.calls is not None else ()
    return ReasoningLimit(opening.lstrip().encode(), closing.encode(), forced, budget, begun, calls)


def _begun(text: str, template: ChatTemplate) -> str:
    """The opening tag of reasoning that the template itself has written, with the blanks after it."""
    opening = template.reasoning[0].rstrip() if template.reasoning is not None else ""
    if not opening or not text.rstrip().endswith(opening):
        return ""
    return text[text.rindex(opening) :]


# -- the first form of tools: `functions`, `function_call`, messages of the role function


def _first_form(body: Mapping[str, Any]) -> Translated | None:
    """Body with tools, where the request has OpenAI's first form of them, else None."""
    messages = body.get("messages")
    items = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    older = any(m.get("function_call") or m.get("role") == "function" for m in items)
    return _with_tools(body) if older or body.get("functions") or body.get("function_call") else None


def _with_tools(body: Mapping[str, Any]) -> Translated:
    """Body of a chat request with `tools` in place of `functions`."""
    functions, choice = body.get("functions"), body.get("function_call")
    messages = body.get("messages")
    for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if body.get(name) and body.get(newer):
            bad_request(name, f"cannot be combined with {newer}")
    chat = {name: value for name, value in body.items() if name not in ("functions", "function_call")}
    names = {"tool_choice": "function_call", "tools": "functions"} if functions or choice else {}
    if functions:
        chat["tools"] = [{"type": "function", "function": f} for f in as_array("functions", functions)]
        names |= {f"tools[{i}].function": f"functions[{i}]" for i in range(len(functions))}
        chat["parallel_tool_calls"] = False
    if choice:
        chat["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": choice}
    if isinstance(messages, list):
        chat["messages"] = [_message(i, message) for i, message in enumerate(messages)]
    return Translated(chat, names)


def _message(i: int, message: Any) -> Any:
    """A message with tool calls. Calls have no ids in the first form: the function's name stands for it."""
    if not isinstance(message, dict):
        return message
    called = message.get("function_call")
    rest = {key: value for key, value in message.items() if key != "function_call"}
    if message.get("role") == "function":
        name = as_text(f"messages[{i}].name", message.get("name"))
        return {**rest, "role": "tool", "tool_call_id": name}
    if not called:
        return rest
    called = as_object(f"messages[{i}].function_call", called)
    name = as_text(f"messages[{i}].function_call.name", called.get("name"))
    return {**rest, "tool_calls": [{"id": name, "type": "function", "function": called}]}
