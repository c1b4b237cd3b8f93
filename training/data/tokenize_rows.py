"""Tokenized rows: token ids, each with a flag whether it is a label (loss mask)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.chat.template import ChatTemplate, ChatTemplateError
from logitless.models.media.prompt_media import Span, Tile
from logitless.models.tokenizer import Tokenizer
from logitless.training.data.answer_spans import spans_of_answers
from logitless.training.data.dataset_rows import MEDIUM, DatasetRow, Messages, RowAnswer, media_of
from logitless.training.data.media import NO_PROJECTOR, MediaReader, Pieces
from logitless.training.data.run_media import TokenMedia
from logitless.training.errors import TrainingError

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Part = tuple[str, bool]  # text, and is it learned?
_MARKER_TEXT = f"<__image_{secrets.token_hex(8)}_{{}}__>"  # no row can have it
_MARKER = re.compile(_MARKER_TEXT.format(r"(\d+)"))
FEW = 16  # answers of a row that is rendered up to each of them
# of one row, times its answers, where its conversation must be rendered up to each answer
MAX_RENDERED, MAX_CHARACTERS = 1 << 20, 1 << 28  # messages, characters


@dataclass(frozen=True)
class Example:
    """Tokens of one example. `learn[i]`: the loss includes the prediction of token i."""

    tokens: I32  # (n,)
    learn: Mask  # (n,)
    source: str = ""  # where it came from, for messages
    value: float = 0.0  # how an answer was judged
    media: TokenMedia | None = None
    unused: tuple[str, ...] = ()  # names of the row's fields that change nothing
    omitted: str = ""  # the end of the chat template's generation prompt, where the row's text lacks it

    def cut(self, n: int) -> Example:
        """Its first n tokens."""
        media = None if self.media is None else self.media.cut(n)
        return replace(self, tokens=self.tokens[:n], learn=self.learn[:n], media=media)


def examples_of(
    records: Iterable[DatasetRow],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    name: str = "",
    media: MediaReader | None = None,
) -> Iterator[Example]:
    """Examples of rows, one each; a conversation whose template rewrites earlier turns becomes
    one per assistant turn. TrainingError names the line that the template refuses, or the part with
    an image that cannot be read. `media` None: none can."""
    for record, parts, omitted in row_texts(records, template, name):
        where = f"{name}: line {record.line}"
        end = not (record.messages and template)
        if media_parts := record.media:
            if media is None:
                raise TrainingError(f"{media_parts[0].where}: {NO_PROJECTOR}")
            example, spans = _example(
                _without_bos(parts, tokenizer), tokenizer, where, media.read(media_parts), end=end
            )
            example = replace(example, media=media.placed(spans, len(example.tokens)))
        else:
            example, _ = _example(_without_bos(parts, tokenizer), tokenizer, where, end=end)
        unused = tuple(name for name in record.unused if not _is_read(name, template))
        yield replace(example, omitted=omitted, unused=unused) if omitted or unused else example


def _is_read(name: str, template: ChatTemplate | None) -> bool:
    """True if the template reads this field of a message."""
    _, of_message, key = name.partition("[].")
    return bool(of_message) and template is not None and bool(re.search(rf"\b{re.escape(key)}\b", template.source))


def answer_of(
    record: DatasetRow,
    answer: RowAnswer,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    name: str = "",
    media: MediaReader | None = None,
) -> Example:
    """A row's prompt with an answer, which alone is learned; errors as `examples_of`."""
    result = list(examples_of([record.answered(answer)], tokenizer, template, name, media))
    if len(result) != 1:
        raise TrainingError(
            f"{name}: line {record.line}: the chat template rewrites earlier turns, so an answer must be one "
            "message of the assistant"
        )
    return replace(result[0], value=answer.value)


def row_texts(
    records: Iterable[DatasetRow],
    template: ChatTemplate | None,
    name: str = "",
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[DatasetRow, Sequence[Part], str]]:
    """(row, text in parts, `Example.omitted`) of each example, without tokenizing; errors as
    `examples_of`. `check` is called before each rendering and may raise."""
    for record in records:
        check()
        if record.answers:
            raise TrainingError(
                f"{name}: line {record.line}: is {record.format}; supervised learning has no use for it: choose a "
                "method of preference, such as dpo"
            )
        if not record.has_answer:
            answer = "no message of the assistant is there to learn from"
            problem = answer if record.messages else "field 'completion' must be a string"
            raise TrainingError(f"{name}: line {record.line}: {problem} (reinforcement alone learns from prompts)")
        chat = record.messages and (template is not None or not record.parts)
        turns = _turns(record, template, f"{name}: line {record.line}", check) if chat else [(record.parts, "")]
        for parts, omitted in turns:
            yield record, parts, omitted


def _example(
    parts: Sequence[Part], tokenizer: Tokenizer, where: str, media: Sequence[Pieces] = (), *, end: bool
) -> tuple[Example, list[Span]]:
    """(tokenized example, tiles among its tokens); `end`: the text is whole, so its end is learned:
    an EOS, unless it ends with such a token of its own. As in a prompt, each text between two of the
    images is tokenized by itself."""
    tokens: list[int] = []
    learn: list[bool] = []
    spans: list[Span] = []
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        tokens, learn = [tokenizer.bos_id], [False]
    for run in _between_media(parts) if media else [parts]:
        if isinstance(run, int):
            for piece in media[run]:
                if isinstance(piece, Tile):
                    spans.append(Span(len(tokens), piece))
                    tokens += [0] * piece.n_rows  # these are no tokens
                else:
                    tokens += piece
            learn += [False] * (len(tokens) - len(learn))
        else:
            ids, learned = encode_parts(run, tokenizer)
            tokens, learn = tokens + ids, learn + learned
    if end and tokenizer.eos_id is not None and not _ended(tokens, tokenizer):
        tokens, learn = [*tokens, tokenizer.eos_id], [*learn, True]
    if learn:
        learn[0] = False  # has no context
    return Example(np.array(tokens, np.int32), np.array(learn, np.bool_), where), spans


def _between_media(parts: Sequence[Part]) -> Iterator[list[Part] | int]:
    """Parts of a text up to each marker, and the number of the image that it stands for."""
    run: list[Part] = []
    for text, learned in parts:
        for i, piece in enumerate(_MARKER.split(text)):
            if i % 2:
                if run:
                    yield run
                yield int(piece)
                run = []
            elif piece:
                run.append((piece, learned))
    if run:
        yield run


def _ended(tokens: Sequence[int], tokenizer: Tokenizer) -> bool:
    """True if nothing but white space follows an end token."""
    for id in reversed(tokens):
        if tokenizer.is_eog(id):
            return True
        if tokenizer.piece(id).strip():
            return False
    return False


def encode_parts(parts: Sequence[Part], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of the joined text, tokenized as a prompt would be (special tokens too), and a flag for those that start in
    a learned part. Where a token would lie across the border to a learned part, the text is cut
    there, as inference has the prompt's own tokens before its answer."""
    whole = tokenizer.encode("".join(text for text, _ in parts), add_special=False)
    ids, learn, borders = _encoded(parts, whole, tokenizer)
    if not borders:
        return ids, learn
    ids, learn = [], []
    for a, b in pairwise([0, *borders, len(parts)]):
        text = "".join(text for text, _ in parts[a:b])
        own = tokenizer.encode_after(text) if a else tokenizer.encode(text, add_special=False)
        more, flags, _ = _encoded(parts[a:b], own, tokenizer)
        ids, learn = ids + more, learn + flags
    return ids, learn


def _encoded(parts: Sequence[Part], ids: list[int], tokenizer: Tokenizer) -> tuple[list[int], list[bool], list[int]]:
    """(ids, flags, numbers of the learned parts that begin within a token) of parts, with the ids of
    their joined text."""
    pieces = [tokenizer.piece(id) for id in ids]
    whole = b"".join(text.encode() for text, _ in parts)
    starts = _starts(whole, pieces)
    if starts is None:  # the tokenizer changes texts (lower case, accents): no token may straddle a border then
        each = [tokenizer.encode(text, add_special=False) for text, _ in parts]
        learn = [flag for part, (_, flag) in zip(each, parts, strict=True) for _ in part]
        return [id for part in each for id in part], learn, []
    ends = np.cumsum([len(text.encode()) for text, _ in parts])
    which = np.minimum(np.searchsorted(ends, starts, side="right"), len(parts) - 1)
    borders = []
    for k in range(1, len(parts)):
        if parts[k][1] and not parts[k - 1][1]:
            i = int(np.searchsorted(starts, ends[k - 1])) - 1  # the last token that begins before the border
            if i >= 0:
                in_text = whole.startswith(pieces[i], starts[i])  # else without the space in front
                if starts[i] + len(pieces[i]) - (not in_text) > ends[k - 1]:
                    borders.append(k)
    return ids, [parts[i][1] for i in which], borders


def _starts(text: bytes, pieces: Sequence[bytes]) -> list[int] | None:
    """Byte offset of each piece in the text; None if the pieces do not spell it. A tokenizer may
    add spaces, or drop some beside special tokens."""
    starts, at = [], 0
    for piece in pieces:
        while at < len(text) and not text.startswith(piece, at) and text[at : at + 1].isspace():
            if piece[:1] == b" " and text.startswith(piece[1:], at):
                break
            at += 1
        if piece[:1] == b" " and not text.startswith(piece, at):
            piece = piece[1:]  # the space that SentencePiece puts in front of a text
        if not text.startswith(piece, at):
            return None
        starts.append(at)
        at += len(piece)
    return starts


def _turns(
    record: DatasetRow, template: ChatTemplate | None, where: str, check: Callable[[], None]
) -> list[tuple[list[Part], str]]:
    if template is None:
        raise TrainingError(f"{where}: the model has no chat template")
    messages = _marked(record.messages, template)
    tools = list(record.tools) or None

    def written(messages: list[dict[str, Any]], prompt: bool) -> str:
        check()
        try:
            return template.render(messages, add_generation_prompt=prompt, tools=tools, **record.variables)
        except ChatTemplateError as error:
            raise TrainingError(f"{where}: {' '.join(str(error).split())}") from None

    def render(n: int, *, prompt: bool) -> str:
        return written(messages[:n], prompt)

    learned = [i for i, m in enumerate(record.messages) if m["role"] == "assistant" and m.get("weight") != 0]
    whole = render(learned[-1] + 1, prompt=False)
    if record.media:
        n = sum(len(media_of(m)) for m in record.messages[: learned[-1] + 1])
        if [int(i) for i in _MARKER.findall(whole)] != list(range(n)):
            raise TrainingError(f"{where}: the chat template does not write each image once, in order")
    spans = spans_of_answers(messages, learned, whole, written) if len(learned) > FEW else None
    if spans is not None:
        starts = [0, *(end for _, end in spans)]
        pieces = zip(starts, spans, strict=False)
        return [([p for at, (a, b) in pieces for p in ((whole[at:a], False), (whole[a:b], True))], "")]
    if len(learned) * len(messages) > MAX_RENDERED:
        raise TrainingError(
            f"{where}: {len(messages)} messages with {len(learned)} answers are too many for one row: cut it"
        )
    if len(learned) * len(whole) > MAX_CHARACTERS:
        raise TrainingError(
            f"{where}: {len(whole)} characters with {len(learned)} answers are too many for one row: cut it"
        )
    parts: list[Part] = []
    at = 0
    for i in learned:
        before, after = render(i, prompt=True) if i else "", render(i + 1, prompt=False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
            return [_last_turn(render(j, prompt=True) if j else "", render(j + 1, prompt=False)) for j in learned]
        parts += [(whole[at : len(before)], False), (whole[len(before) : len(after)], True)]
        at = len(after)
    return [(parts, "")]


def _marked(messages: Messages, template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as the template gets them: parts with images become a text with a marker for each."""
    result = []
    n = 0
    for message in messages:
        plain = {k: v for k, v in message.items() if k != "weight"}
        if of_message := len(media_of(message)):
            markers = (_MARKER_TEXT.format(i) for i in range(n, n + of_message))
            texts = (next(markers) if MEDIUM in part else part["text"] for part in message["content"])
            plain["content"] = template.between_parts.join(texts)
            n += of_message
        result.append(plain)
    return result


def _last_turn(before: str, after: str) -> tuple[list[Part], str]:
    # the generation prompt may hold what the finished turn has not, such as an empty thought
    n, most = 0, min(len(before), len(after))
    while n < most:  # by halves: a step a character would take too long
        middle = (n + most + 1) // 2
        n, most = (middle, most) if before[n:middle] == after[n:middle] else (n, middle - 1)
    return [(after[:n], False), (after[n:], True)], before[n:]


def _without_bos(parts: Sequence[Part], tokenizer: Tokenizer) -> Sequence[Part]:
    if not tokenizer.add_bos or tokenizer.bos_id is None:
        return parts
    text, learn = parts[0]
    return [(text.removeprefix(tokenizer.piece(tokenizer.bos_id).decode("utf-8", "replace")), learn), *parts[1:]]
