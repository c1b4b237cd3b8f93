"""JSON bodies of chat requests → one prompt by the model's template → a job. Every 400 names its field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.chat_template import ChatTemplate, ChatTemplateError
from server.errors import InvalidRequest, NotSupported
from server.fields import Fields, article, refuse, unsupported
from server.parse import MAX_TOP, Job, RequestParser, refuse_unsupported

_OURS = ("self", "messages", "tools", "add_generation_prompt")  # what chat_template_kwargs cannot set


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation; `prefill` is the assistant's text that the model is to continue."""

    text: str
    prefill: str = ""


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
    return parser.job(fields, [parser.tokens(prompt.text)], top=top, prefixes=prefixes)


def render_chat(body: Mapping[str, Any], parser: RequestParser, template: ChatTemplate | None) -> ChatPrompt:
    """The conversation as the model's template writes it."""
    fields = Fields(body)
    refuse_unsupported(fields)
    if fields.text("reasoning_format", "auto") not in ("auto", "none"):
        unsupported("reasoning_format", "only auto and none are supported yet")
    if fields.integer("reasoning_budget_tokens", default=-1, low=-1, hard=True) >= 0:
        unsupported("reasoning_budget_tokens")
    for name in ("parallel_tool_calls", "parse_tool_calls", "reasoning_control"):
        fields.boolean(name)
    if template is None:
        raise NotSupported("this model has no chat template; give one with --chat-template")
    messages = _messages(fields)
    add = fields.boolean("add_generation_prompt", True)
    ends_with_assistant = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    proceed = fields.boolean("continue_final_message", parser.config.prefill_assistant and ends_with_assistant)
    if body.get("continue_final_message") is True:
        if body.get("add_generation_prompt") is True:
            refuse("continue_final_message", "cannot be true when add_generation_prompt is")
        if not ends_with_assistant:
            refuse("continue_final_message", "the last message must be the assistant's")
    if proceed and len(messages) > 1 and messages[-2]["role"] == "assistant":
        refuse("messages", "must not end with two messages of the assistant")
    prefill = ""
    if proceed:
        prefill = _content(body["messages"][-1], len(messages) - 1, "\n\n") or ""
        messages, add = messages[:-1], True
    kwargs = dict(fields.object("chat_template_kwargs"))
    for name in _OURS:
        if name in kwargs:
            refuse("chat_template_kwargs", f"must not contain '{name}'")
    try:
        text = template.render(messages, add_generation_prompt=add, **kwargs)
    except ChatTemplateError as error:
        raise InvalidRequest(f"field 'messages': {' '.join(str(error).split())}") from None
    tokenizer = parser.tokenizer
    if tokenizer.add_bos and tokenizer.bos_id is not None:  # the tokenizer adds it again
        text = text.removeprefix(tokenizer.piece(tokenizer.bos_id).decode("utf-8", "replace"))
    return ChatPrompt(text + prefill, prefill)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation with every content a text, as templates expect it."""
    given = fields.array("messages")
    if not given:
        refuse("messages", "must be a non-empty array")
    messages = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            refuse(f"messages[{i}]", f"expected an object, got {article(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            refuse(f"messages[{i}].role", f"expected a string, got {article(role)}")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            refuse(f"messages[{i}].tool_calls", f"expected an array, got {article(calls)}")
        if "content" not in message and not calls:
            refuse(f"messages[{i}].content", "is required")
        content = _content(message, i, "\n")
        messages.append({**message, "content": "" if content is None and not calls else content})
    return messages


def _content(message: Mapping[str, Any], i: int, separator: str) -> str | None:
    """A message's text: a string, or typed parts joined by `separator`."""
    content = message.get("content")
    name = f"messages[{i}].content"
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(name, f"expected a string or an array of parts, got {article(content)}")
    texts: list[str] = []
    for k, part in enumerate(content):
        if not isinstance(part, dict):
            refuse(f"{name}[{k}]", f"expected an object, got {article(part)}")
        kind = part.get("type")
        if kind in ("image_url", "input_image", "input_audio", "video_url", "input_video", "file"):
            unsupported(f"{name}[{k}]", f"{kind} needs a model with media, which this is not")
        if kind not in ("text", "input_text", "refusal"):
            refuse(f"{name}[{k}].type", "must be text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            refuse(f"{name}[{k}].text", f"expected a string, got {article(text)}")
        texts.append(text)
    return separator.join(texts)
