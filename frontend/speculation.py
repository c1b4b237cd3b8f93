"""Speculative decoding fields: kinds, limits (`speculative.*`), drafts (`prediction`, `draft_tokens`)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from logitless.engine.params import Generation, Speculative
from logitless.engine.speculation.settings import (
    DFLASH,
    EAGLE3,
    KINDS,
    LEARN,
    MODEL,
    MODEL_ONLY,
    MTP,
    SpeculationParams,
)
from logitless.frontend.config import FrontendConfig
from logitless.frontend.fields import article, as_text, bad_request, read
from logitless.models.tokenizer import Tokenizer

MOST_CHARACTERS = 64  # of a prediction's token: what lies beyond n_ctx of these could never be verified
CONTEXT_TOKENS = 16  # of the prompt's end, that decide where a prediction's first token begins


@dataclass(frozen=True, slots=True)
class TextDraft:
    """A request's speculation, with a prediction that is still text."""

    params: SpeculationParams
    prediction: str = ""

    def after(self, prompt: tuple[int, ...], tokenizer: Tokenizer) -> SpeculationParams:
        """The same for one prompt."""
        if not self.prediction:
            return self.params
        return replace(self.params, draft=tuple(continuation(tokenizer, prompt, self.prediction)))


def parse_speculation(params: Generation, config: FrontendConfig, tokenizer: Tokenizer, n_ctx: int) -> TextDraft:
    """Speculation settings of a request, over the server's defaults."""
    for name, value in params.speculative.items():
        if value is not None and name not in Speculative.__struct_fields__:
            bad_request(DOTTED + name, f"is not one of {', '.join(Speculative.__struct_fields__)}")
    default = config.speculation
    limits = Speculative(n_min=default.n_min, p_min=default.p_min)
    if params.speculative:
        least = {"n_min": default.n_min, "p_min": default.p_min}
        limits = read(Speculative, params.speculative, defaults=least, within=DOTTED)
    kinds = default.kinds
    if limits.type is not None:
        kinds = parse_kinds(f"{DOTTED}type", limits.type, config.models_that_draft)
    drafts = SpeculationParams(
        kinds=kinds,
        n_max=limits.n_max,
        n_min=limits.n_min,
        p_min=limits.p_min,
        draft=draft_tokens(params.draft_tokens, tokenizer, n_ctx),
    )
    prediction = _prediction(params.prediction)
    if prediction and drafts.draft:
        bad_request("draft_tokens", "cannot be given together with prediction")
    return TextDraft(drafts, prediction[: n_ctx * MOST_CHARACTERS])


_NEEDED = {
    MODEL: "with a draft model (--model-draft)",
    MTP: "started with --spec-type draft-mtp",
    EAGLE3: "with an EAGLE-3 drafter (--model-draft)",
    DFLASH: "with a DFlash drafter (--model-draft)",
    LEARN: "started with --spec-learn",
}
DOTTED = "speculative."


def parse_kinds(name: str, text: str, models: Container[str]) -> tuple[str, ...]:
    """The kinds of a comma-separated list; "none" and "" are no kinds. `models`: kinds of those that draft here."""
    kinds: list[str] = []
    for kind in filter(None, (part.strip() for part in text.split(","))):
        if kind in MODEL_ONLY:
            bad_request(name, f"{kind} is not supported; this server has {', '.join(KINDS)}")
        if kind != "none" and kind not in KINDS:
            bad_request(name, f"{kind[:32]!r} is not one of none, {', '.join(KINDS)}")
        if kind in _NEEDED and kind not in models:
            bad_request(name, f"{kind} needs a server {_NEEDED[kind]}")
        if kind != "none" and kind not in kinds:
            kinds.append(kind)
    return tuple(kinds)


def draft_tokens(ids: Sequence[int], tokenizer: Tokenizer, n_ctx: int) -> tuple[int, ...]:
    """`draft_tokens`: ids that may follow the prompt. More than the context can hold are of no use and left out."""
    for id in ids:
        if not 0 <= id < tokenizer.n_vocab:
            bad_request("draft_tokens", f"token {str(id)[:20]} is outside the vocabulary of {tokenizer.n_vocab}")
    return tuple(ids[:n_ctx])


def continuation(tokenizer: Tokenizer, prompt: tuple[int, ...], text: str) -> list[int]:
    """The tokens of a text that goes on where the prompt ends.

    They are cut from the tokens of both texts together, so that a blank at the seam belongs to the token that the
    model would choose; where a token reaches across the seam the text stands alone."""
    target = text.encode("utf-8", "replace")
    before = tokenizer.pieces(prompt[-CONTEXT_TOKENS:]).decode("utf-8", "replace")
    ids = tokenizer.encode(before + text, add_special=False, parse_special=True)
    start, n = len(ids), 0
    while start and n < len(target):
        start -= 1
        n += len(tokenizer.piece(ids[start]))
    if n == len(target) and tokenizer.pieces(ids[start:]) == target:
        return ids[start:]
    return tokenizer.encode(text, add_special=False, parse_special=True)


def _prediction(prediction: Mapping[str, Any]) -> str:
    """OpenAI's `prediction`: {"type": "content", "content": text or text parts}."""
    if not prediction:
        return ""
    if prediction.get("type") != "content":
        bad_request("prediction.type", "must be content")
    content = prediction.get("content")
    if isinstance(content, list):
        parts: list[str] = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                bad_request("prediction.content", "expected a string or an array of text parts")
            parts.append(as_text("prediction.content", part.get("text")))
        return "".join(parts)
    if not isinstance(content, str):
        bad_request("prediction.content", f"expected a string or an array of text parts, got {article(content)}")
    return content
