"""The fields of speculation: kinds and limits (`speculative.*`), and drafts (`prediction`, `draft_tokens`)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from logitless.engine.speculation.settings import KINDS, MAX_DRAFT, MODEL, MODEL_ONLY, NEXTN, SpeculationParams
from logitless.models.tokenizer import Tokenizer
from logitless.server.config import ServerConfig
from logitless.server.protocol.fields import Fields, article, as_integer, as_text, refuse, unsupported

MOST_CHARACTERS = 64  # of a prediction's token: what lies beyond n_ctx of these could never be verified
CONTEXT_TOKENS = 16  # of the prompt's end, that decide where a prediction's first token begins


@dataclass(frozen=True, slots=True)
class Wishes:
    """A request's speculation, with a prediction that is still text."""

    params: SpeculationParams
    prediction: str = ""

    def after(self, prompt: tuple[int, ...], tokenizer: Tokenizer) -> SpeculationParams:
        """The same for one prompt."""
        if not self.prediction:
            return self.params
        return replace(self.params, draft=tuple(continuation(tokenizer, prompt, self.prediction)))


def parse_speculation(fields: Fields, config: ServerConfig, tokenizer: Tokenizer, n_ctx: int) -> Wishes:
    """What a request says about speculation, over the server's defaults."""
    fields = Fields({**_nested(fields), **fields.body})
    default = config.speculation
    kinds = default.kinds
    if (text := fields.body.get("speculative.type")) is not None:
        kinds = parse_kinds("speculative.type", as_text("speculative.type", text), config.models_that_draft)
    n_max = None
    if fields.body.get("speculative.n_max") is not None:
        n_max = fields.integer("speculative.n_max", default=0, low=0, high=MAX_DRAFT, hard=True)
    params = SpeculationParams(
        kinds=kinds,
        n_max=n_max,
        n_min=fields.integer("speculative.n_min", default=default.n_min, low=0, high=MAX_DRAFT, hard=True),
        p_min=fields.number("speculative.p_min", default=default.p_min, low=0.0, high=1.0, hard=True),
        draft=draft_tokens(fields, tokenizer, n_ctx),
    )
    for name in fields.body:
        if name.startswith("speculative.") and name not in _NAMES and fields.body[name] is not None:
            unsupported(name)
    prediction = _prediction(fields)
    if prediction and params.draft:
        refuse("draft_tokens", "cannot be given together with prediction")
    return Wishes(params, prediction[: n_ctx * MOST_CHARACTERS])


_NEEDED = {MODEL: "with a draft model (--model-draft)", NEXTN: "started with --spec-type draft-mtp"}
_NAMES = frozenset({"speculative.type", "speculative.n_max", "speculative.n_min", "speculative.p_min"})


def parse_kinds(name: str, text: str, models: Container[str]) -> tuple[str, ...]:
    """The kinds of a comma-separated list; "none" and "" are no kinds. `models`: kinds of those that draft here."""
    kinds: list[str] = []
    for kind in filter(None, (part.strip() for part in text.split(","))):
        if kind in MODEL_ONLY:
            unsupported(name, f"{kind} is not supported; this server has {', '.join(KINDS)}")
        if kind != "none" and kind not in KINDS:
            refuse(name, f"{kind[:32]!r} is not one of none, {', '.join(KINDS)}")
        if kind in _NEEDED and kind not in models:
            refuse(name, f"{kind} needs a server {_NEEDED[kind]}")
        if kind != "none" and kind not in kinds:
            kinds.append(kind)
    return tuple(kinds)


def draft_tokens(fields: Fields, tokenizer: Tokenizer, n_ctx: int) -> tuple[int, ...]:
    """`draft_tokens`: ids that may follow the prompt. More than the context can hold are of no use and left out."""
    ids = [as_integer("draft_tokens", item) for item in fields.array("draft_tokens") or ()]
    for id in ids:
        if not 0 <= id < tokenizer.n_vocab:
            refuse("draft_tokens", f"token {str(id)[:20]} is outside the vocabulary of {tokenizer.n_vocab}")
    return tuple(ids[:n_ctx])


def continuation(tokenizer: Tokenizer, prompt: tuple[int, ...], text: str) -> list[int]:
    """The tokens of a text that goes on where the prompt ends.

    They are cut from the tokens of both texts together, so that a blank at the seam belongs to the token that the
    model would choose; where a token reaches across the seam the text stands alone.
    """
    wanted = text.encode("utf-8", "replace")
    before = tokenizer.pieces(prompt[-CONTEXT_TOKENS:]).decode("utf-8", "replace")
    ids = tokenizer.encode(before + text, add_special=False, parse_special=True)
    start, n = len(ids), 0
    while start and n < len(wanted):
        start -= 1
        n += len(tokenizer.piece(ids[start]))
    if n == len(wanted) and tokenizer.pieces(ids[start:]) == wanted:
        return ids[start:]
    return tokenizer.encode(text, add_special=False, parse_special=True)


def _nested(fields: Fields) -> Mapping[str, Any]:
    """`speculative: {n_max: 4}` as `speculative.n_max: 4`."""
    return {f"speculative.{name}": value for name, value in fields.object("speculative").items()}


def _prediction(fields: Fields) -> str:
    """OpenAI's `prediction`: {"type": "content", "content": text or text parts}."""
    prediction = fields.object("prediction")
    if not prediction:
        return ""
    if prediction.get("type") != "content":
        refuse("prediction.type", "must be content")
    content = prediction.get("content")
    if isinstance(content, list):
        parts: list[str] = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                refuse("prediction.content", "expected a string or an array of text parts")
            parts.append(as_text("prediction.content", part.get("text")))
        return "".join(parts)
    if not isinstance(content, str):
        refuse("prediction.content", f"expected a string or an array of text parts, got {article(content)}")
    return content
