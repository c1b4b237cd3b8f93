"""JSON bodies of chat requests → one prompt by the model's template → a job. Every 400 names its field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec.structs import replace as replace_struct

from logitless.engine.errors import InvalidRequest, NotSupported
from logitless.engine.sampling.reasoning_budget import ReasoningLimit
from logitless.models.chat.template import ChatTemplate, ChatTemplateError
from logitless.models.chat.tool_calls import Style
from logitless.server.protocol.chat.messages import content_text, parse_messages
from logitless.server.protocol.chat.tool_grammar import chat_constraint
from logitless.server.protocol.chat.tools import Tools, parse_style, parse_tools, preserved_ids, reasoning_format
from logitless.server.protocol.completions import MAX_TOP, Job, RequestParser, refuse_unsupported
from logitless.server.protocol.fields import Fields, refuse

_OURS = ("self", "messages", "tools", "add_generation_prompt", "tools_required", "parallel_tool_calls")
"""What chat_template_kwargs cannot set."""


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


def parse_chat(body: Mapping[str, Any], parser: RequestParser, template: ChatTemplate | None) -> Job:
    """POST /v1/chat/completions."""
    fields = Fields(body)
    top: int | None = None
    if fields.boolean("logprobs"):
        top = fields.integer("top_logprobs", default=20, low=0, high=MAX_TOP)
    elif body.get("top_logprobs") is not None:
        refuse("top_logprobs", "needs logprobs to be true")
    elif body.get("n_probs") is not None:
        top = fields.integer("n_probs", default=0, low=0, high=MAX_TOP) or None
    prompt = render_chat(body, parser, template)
    prefixes = (prompt.prefill,) if prompt.prefill and fields.boolean("echo") else ()
    job = parser.job(fields, [parser.tokens(prompt.text)], top=top, prefixes=prefixes)
    told = {
        **job.options.settings,
        "chat_format": "Content-only" if prompt.style.calls is None else prompt.style.calls.name,
        "reasoning_format": reasoning_format(fields, parser.config.reasoning_format),
        "reasoning_in_content": prompt.style.tags_in_content,
    }
    assert template is not None  # render_chat refuses
    first = job.requests[0]
    given, begun = first.sampling.grammar, prompt.style.primer
    constraint = chat_constraint(given, prompt.tools, template, begun, prompt.thinks, parser.grammars)
    preserved = first.preserved | prompt.preserved
    requests = [
        replace(
            request,
            preserved=preserved,
            reasoning=prompt.limit,
            sampling=replace_struct(request.sampling, grammar=constraint),
        )
        for request in job.requests
    ]
    return Job(tuple(requests), replace(job.options, style=prompt.style, settings=told))


def render_chat(body: Mapping[str, Any], parser: RequestParser, template: ChatTemplate | None) -> ChatPrompt:
    """The conversation as the model's template writes it."""
    fields = Fields(body)
    refuse_unsupported(fields)
    if template is None:
        raise NotSupported("this model has no chat template; give one with --chat-template")
    messages = parse_messages(fields)
    tools = parse_tools(fields, template)
    add, last = _continued(fields, messages, parser)
    if last is not None:
        messages = messages[:-1]
    kwargs = _variables(fields, parser)
    if tools.tools:
        kwargs["tools"] = list(tools.tools)
        kwargs |= {"tools_required": tools.choice == "required", "parallel_tool_calls": tools.parallel}
    try:
        text = template.render(messages, add_generation_prompt=add, **kwargs)
    except ChatTemplateError as error:
        raise InvalidRequest(f"field 'messages': {' '.join(str(error).split())}") from None
    tokenizer = parser.tokenizer
    if tokenizer.add_bos and tokenizer.bos_id is not None:  # the tokenizer adds it again
        text = text.removeprefix(tokenizer.piece(tokenizer.bos_id).decode("utf-8", "replace"))
    begun = _begun(text, template) if add else ""
    prefill = ""
    if last is not None:
        syntax, prefill = template.continuation(*last, opened=bool(begun))
        text, begun = text + syntax, begun + syntax
    if begun and not prefill and _budget(fields, parser) == 0 and template.reasoning is not None:
        ended = f"{template.reasoning[1]}\n\n"
        text, begun = text + ended, begun + ended
    style = parse_style(fields, template, tools, parser.config.reasoning_format, begun + prefill)
    return ChatPrompt(
        text + prefill,
        prefill,
        style,
        tools,
        preserved_ids(template, tools, tokenizer),
        kwargs.get("enable_thinking", True),
        _limit(fields, parser, template, style.primer),
    )


def _continued(
    fields: Fields, messages: list[dict[str, Any]], parser: RequestParser
) -> tuple[bool, tuple[str, str] | None]:
    """(add a generation prompt, the (text, reasoning) of a last message that is to be continued)."""
    body = fields.body
    last = messages[-1]
    add = fields.boolean("add_generation_prompt", True)
    ends_with_assistant = last["role"] == "assistant" and not last.get("tool_calls")
    proceed = fields.boolean("continue_final_message", parser.config.prefill_assistant and ends_with_assistant)
    if body.get("continue_final_message") is True:
        if body.get("add_generation_prompt") is True:
            refuse("continue_final_message", "cannot be true when add_generation_prompt is")
        if not ends_with_assistant:
            refuse("continue_final_message", "the last message must be the assistant's")
    if not proceed:
        return add, None
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        refuse("messages", "must not end with two messages of the assistant")
    text = content_text(body["messages"][-1], len(messages) - 1, "\n\n") or ""
    return True, (text, last.get("reasoning_content") or "")


def _variables(fields: Fields, parser: RequestParser) -> dict[str, Any]:
    """The template's further variables: the server's, then the request's."""
    kwargs = {**parser.config.chat_template_kwargs, **fields.object("chat_template_kwargs")}
    for name in _OURS:
        if name in kwargs:
            refuse("chat_template_kwargs", f"must not contain '{name}'")
    if not isinstance(kwargs.get("enable_thinking", True), bool):
        refuse("chat_template_kwargs", "enable_thinking must be a boolean")
    effort = fields.text("reasoning_effort")
    if effort:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    if _budget(fields, parser) == 0:
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _budget(fields: Fields, parser: RequestParser) -> int:
    """Tokens of reasoning; -1: no limit."""
    return fields.integer("reasoning_budget_tokens", default=parser.config.reasoning_budget, low=-1, hard=True)


def _limit(fields: Fields, parser: RequestParser, template: ChatTemplate, primer: str) -> ReasoningLimit | None:
    """What may end the reasoning: its budget, or the client while it runs (`reasoning_control`)."""
    budget, control = _budget(fields, parser), fields.boolean("reasoning_control")
    if template.reasoning is None or not (budget > 0 or control):
        return None
    opening, closing = template.reasoning
    forced = tuple(parser.encode(closing, parse_special=True))
    begun = primer.lstrip().startswith(opening) and closing not in primer
    return ReasoningLimit(opening.encode(), closing.encode(), forced, budget, begun)


def _begun(text: str, template: ChatTemplate) -> str:
    """The opening tag of reasoning that the template itself has written, with the blanks after it."""
    if template.reasoning is None or not text.rstrip().endswith(template.reasoning[0]):
        return ""
    return text[text.rindex(template.reasoning[0]) :]
