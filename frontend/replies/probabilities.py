"""Token probabilities (logprobs) in the three shapes of the APIs."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import cast

from msgspec import Raw

from logitless.engine.requests import CompletionRequest, Token, TokenProb
from logitless.frontend.answers.generation import RankedLogprob, TokenLogprob
from logitless.frontend.answers.openai import TextLogprobs
from logitless.frontend.replies.encoding import encode_json, lazy
from logitless.models.tokenizer import Tokenizer

_LOWEST = -3.4028234663852886e38  # JSON has no infinity; llama-server writes this
_LOWEST_JSON = b"-3.4028234663852886e38"


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else _LOWEST


def valid_text(piece: bytes) -> str:
    """The whole characters at the start of a token's bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        return piece[: error.start].decode()


def by_id(prob: TokenProb, top: int, tokenizer: Tokenizer) -> dict[str, RankedLogprob]:
    """vLLM's shape of a prompt's token and the likeliest ones; the rank of one outside them is null."""
    lines: dict[str, RankedLogprob] = {}
    ranked = [(id, value, rank) for rank, (id, value) in enumerate(prob.top[:top], 1)]
    for id, value, rank in [*ranked, (prob.id, prob.value, None)]:
        text = tokenizer.piece(id).decode("utf-8", "replace")
        lines.setdefault(str(id), RankedLogprob(finite(value), rank, text))
    return lines


def with_chosen(prob: TokenProb, top: int) -> list[tuple[int, float]]:
    """The `top` likeliest tokens; the chosen one stands in the place of the last if it is not among them."""
    likeliest = list(prob.top[:top])
    if top > 0 and prob.id not in dict(likeliest):
        likeliest[top - 1 :] = [(prob.id, prob.value)]
    return likeliest


def entries(
    probs: Sequence[TokenProb],
    tokenizer: Tokenizer,
    top: int,
    post_sampling: bool,
    *,
    as_ids: bool = False,
    chosen: bool = True,
) -> list[TokenLogprob]:
    """The shape of /completion and of chat: one object per token with its alternatives, with `chosen`
    the chosen token among them. They are written as JSON when the answer is."""

    names = (b"prob", b"top_probs") if post_sampling else (b"logprob", b"top_logprobs")

    def items() -> Iterator[Raw]:
        heads: dict[int, bytes] = {}  # of a token's object, up to its value

        def head(id: int) -> bytes:
            piece = tokenizer.piece(id)
            text = f"token_id:{id}" if as_ids else valid_text(piece)
            heads[id] = b'%b,"%b":' % (encode_json(TokenLogprob(id, text, list(piece)))[:-1], names[0])
            return heads[id]

        for p in probs:
            likeliest = with_chosen(p, top) if chosen else p.top[:top]
            ids, values = zip((p.id, p.value), *likeliest, strict=True)
            numbers = encode_json(values)[1:-1].replace(b"null", _LOWEST_JSON).split(b",")
            first, *rest = [(heads.get(id) or head(id)) + n for id, n in zip(ids, numbers, strict=True)]
            yield Raw(b'%b,"%b":[%b%b]}' % (first, names[1], b"},".join(rest), b"}" if rest else b""))

    return cast("list[TokenLogprob]", lazy(items))


class TextTokens:
    """Tokens of the text that is finite; text that a stop string cut off has none."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest) -> None:
        self._tokenizer, self._request = tokenizer, request
        self._rest = b""  # of the tokens taken so far: bytes that no text has finite yet

    def take(self, tokens: Sequence[Token], text: str) -> list[Token]:
        """The next tokens that begin inside the next text."""
        raw = self._rest + b"".join([self._piece(token.id) for token in tokens])
        end, at, n = _n_bytes(raw, len(text)), len(self._rest), 0
        while n < len(tokens) and at < end:
            at += len(self._piece(tokens[n].id))
            n += 1
        self._rest = raw[end:at]
        return list(tokens[:n])

    def _piece(self, id: int) -> bytes:
        return _shown_piece(self._tokenizer, self._request, id)


def _shown_piece(tokenizer: Tokenizer, request: CompletionRequest, id: int) -> bytes:
    """The bytes of a token in the text; a hidden special token has none."""
    return tokenizer.piece(id, special=request.special or id in request.preserved)


class _Places:
    """Places of tokens in a text, in characters."""

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes) -> int:
        """The place of the next token; one inside a character is at that character."""
        pending = self._decoder.getstate()[0]
        text = self._decoder.decode(piece)
        broken = pending and text.startswith("\ufffd") and not (pending + piece).startswith(_REPLACEMENT)
        at = self._start + bool(broken)  # the token's text comes after a character that it broke off
        self._start += len(text)
        return at

    @property
    def end(self) -> int:
        """The length of the text so far."""
        return self._start + bool(self._decoder.getstate()[0])


_REPLACEMENT = "\ufffd".encode()


def _n_bytes(raw: bytes, n: int) -> int:
    """Bytes of the first n characters; an invalid one is a U+FFFD of one to three bytes."""
    at, rest = 0, memoryview(raw)
    while n > 0 and at < len(raw):
        try:
            text, broken = str(rest[at:], "utf-8"), 0
        except UnicodeDecodeError as error:
            text, broken = str(rest[at : at + error.start], "utf-8"), error.end - error.start
        if n <= len(text):
            return at + len(text[:n].encode())
        at += len(text.encode()) + broken
        n -= len(text) + 1
    return at


class LegacyLogprobs:
    """The shape of OpenAI's /v1/completions: four parallel arrays, the offsets counted in characters."""

    def __init__(self, tokenizer: Tokenizer, top: int, request: CompletionRequest, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._request = request
        self._as_ids = as_ids
        self._post = request.sampling.post_sampling_probs
        self._places = _Places()

    def of(self, probs: Sequence[TokenProb]) -> TextLogprobs:
        """These tokens, which follow those of the call before."""
        places = [self._places.add(_shown_piece(self._tokenizer, self._request, prob.id)) for prob in probs]
        return self._arrays([prob.id for prob in probs], probs, places)

    def of_prompt(self, ids: Sequence[int], probs: Sequence[TokenProb | None], text: str) -> TextLogprobs:
        """The prompt's tokens: the first has no probability. `text` may lack the blank that the tokenizer put
        in front."""
        places = _Places()
        starts = [places.add(self._tokenizer.piece(id)) for id in ids]
        before = places.end - len(text)  # characters of what the tokenizer put in front
        self.skip(text)
        rest = [None] * (len(ids) - len(probs))
        return self._arrays(ids, [*probs[: len(ids)], *rest], [max(0, start - before) for start in starts])

    def _arrays(self, ids: Sequence[int], probs: Sequence[TokenProb | None], places: list[int]) -> TextLogprobs:
        """The four arrays; a token without a probability has null."""
        return TextLogprobs(
            tokens=[self._name(id) for id in ids],
            token_logprobs=[None if prob is None else self._logprob(prob.value) for prob in probs],
            top_logprobs=lazy(lambda: (None if prob is None else self._likeliest(prob) for prob in probs)),
            text_offset=places,
        )

    def skip(self, text: str) -> None:
        """Text that comes before the tokens still to be told."""
        self._places = _Places(len(text))

    def _likeliest(self, prob: TokenProb) -> dict[str, float]:
        """The likeliest tokens, and the chosen one, which may not be among them."""
        lines = {self._name(id): self._logprob(value) for id, value in prob.top[: self._top]}
        return lines | {self._name(prob.id): self._logprob(prob.value)}

    def _name(self, id: int) -> str:
        """A token as OpenAI names it: its text, or its bytes where they are no text."""
        if self._as_ids:
            return f"token_id:{id}"
        piece = self._tokenizer.piece(id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _logprob(self, value: float) -> float:
        if self._post:
            return math.log(value) if value > 0 else _LOWEST
        return finite(value)
