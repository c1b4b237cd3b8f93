"""JSON text between tokens and the grammar engine: escapes that the engine does not read, bounds that it does not set.

The engine reads `\\uXXXX` in strings without a pattern only, and `\\/` nowhere: such an escape is held back until it is
whole, and then given to the engine as the character that it stands for. Numbers have at most 15 digits before and 15
behind the point and two of the exponent, and an array or object 4,096 parts, unless the schema asks for more; brackets
nest at most 100 deep, and at most 64 empty ones follow each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.uint32]

MAX_DEPTH, MAX_PARTS, MAX_EMPTY = 100, 4096, 64
_DIGITS, _EXPONENT = 15, 2
_WIDE = 2**63  # bounds beyond are not enforced, so that no number needs their digits

_NUMBER = re.compile(rb"-?(\d+)(?:(\.)(\d*))?(?:([eE])[+-]?(\d*))?")
_IN_NUMBER = b"0123456789+-.eE"
_HEX = re.compile(rb"[0-9a-fA-F]*")
_PURE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,4})?|u[0-9a-fA-F]{0,4}|[0-9a-fA-F]{1,2}")  # parts of an escape
_NOTABLE = re.compile(rb"[0-9\[{/\\,]").search
_OPENING = re.compile(rb"[\[{]").search
_ESCAPED = {c: bytes([92, letter]) for c, letter in zip(b'"\\\b\f\n\r\t', b'"\\bfnrt', strict=True)}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PATTERNS = ("pattern", "patternProperties", "format")


def _of(characters: bytes) -> int:
    """The set of some bytes: bit i is byte i."""
    return sum(1 << byte for byte in characters)


_BYTES = (1 << 255) - 1  # 0xFF is in no text
_LETTER, _TEXT, _AFTER_NUMBER, _ENDS = _of(b"x"), _of(b"x\n"), _of(b"0,"), _of(b"]}")
_OTHER_VALUES = _of(b'"-0123456789tfn]}')  # first characters that open no array or object
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")


class Limits(NamedTuple):
    """Digits of a number: before the point, behind it, of the exponent; parts of an array or object.

    `patterns`: strings may have one; `mixed`: there is other text beside JSON."""

    before: int = _DIGITS
    behind: int = _DIGITS
    exponent: int = _EXPONENT
    patterns: bool = False
    mixed: bool = False
    parts: int = MAX_PARTS


def limits_of(lark: str) -> Limits | None:
    """The limits that the JSON schemas in a Lark grammar ask for; None without a schema."""
    schemas = []
    for match in re.finditer(r"%json\s*(?=[{tf])", lark):
        with suppress(ValueError):  # a client's Lark may have comments within
            schemas.append(json.JSONDecoder().raw_decode(lark, match.end())[0])
    if not schemas:
        return None
    before, behind, exponent, patterns, most = _DIGITS, _DIGITS, _EXPONENT, False, MAX_PARTS
    for key, value in _keywords(schemas):
        patterns |= key in _PATTERNS
        if key in _COUNTS and isinstance(value, int):
            most = max(most, value)
        for number in _numbers(value) if key in (*_BOUNDS, "const", "enum", "multipleOf") else ():
            digits = Decimal(repr(number)).as_tuple()
            size = digits.exponent if isinstance(digits.exponent, int) else 0
            behind = max(behind, -size)
            if abs(number) < _WIDE or key not in _BOUNDS:
                before = max(before, len(digits.digits) + size)
            exponent = 3 if abs(number) >= 1e99 else exponent
    mixed = re.match(r"(%llguidance .*\n)?start: %json ", lark) is None
    return Limits(before, behind, exponent, patterns, mixed, most)


def _keywords(schemas: Any) -> Iterator[tuple[str, Any]]:
    work = [schemas]
    while work:
        part = work.pop()
        if isinstance(part, dict):
            yield from part.items()
            work += part.values()
        elif isinstance(part, list):
            work += part


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | dict):
        for part in value if isinstance(value, list) else value.values():
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


class PieceTable:
    """Tables of a vocabulary: digits, brackets and escapes of its tokens."""

    def __init__(self, pieces: Sequence[bytes], first_byte: int) -> None:
        self._n = len(pieces)
        self.first_byte = first_byte  # the id of byte 0
        self._leading, self._longest = (np.zeros(self._n, np.uint8) for _ in range(2))
        sets: dict[str, list[int]] = {key: [] for key in ("open", "comma", "slash", "quote open", "quote comma")}
        exponents = []
        self.parts: list[tuple[int, bytes]] = []  # tokens that are parts of an escape
        self.digits: dict[int, list[int]] = {}  # tokens of a single digit, by their byte
        self.slashes: list[tuple[int, int]] = []  # (a token with `\/`, the same with `/`)
        ids = {piece: id for id, piece in enumerate(pieces) if b"/" in piece}
        for id, piece in enumerate(pieces):
            if not _NOTABLE(piece):
                if (len(piece) <= 2 or piece[0] == 0x75) and _PURE.fullmatch(piece):
                    self.parts.append((id, piece))
                continue
            if runs := re.findall(rb"\d+", piece):
                self._longest[id] = min(255, max(map(len, runs)))
                self._leading[id] = min(255, len(runs[0])) if piece.startswith(runs[0]) else 0
                if re.search(rb"[eE][+-]?\d{3}", piece):
                    exponents.append(id)
                if len(piece) == 1:
                    self.digits.setdefault(piece[0], []).append(id)
            after = piece.partition(b'"')[2]
            for key, fits in (
                ("open", _OPENING(piece)), ("quote open", _OPENING(after)), ("slash", piece[:1] == b"/"),
                ("comma", b"," in piece), ("quote comma", b"," in after),
            ):  # fmt: skip
                if fits:
                    sets[key].append(id)
            if _PURE.fullmatch(piece):
                self.parts.append((id, piece))
            if b"\\/" in piece and b"\\" not in (plain := piece.replace(b"\\/", b"/")) and plain in ids:
                self.slashes.append((id, ids[plain]))
        self.sets = {key: self.packed(ids) for key, ids in sets.items()}  # of tokens, by their characters
        self._exponents = self.packed(exponents)
        self.beginnings = [(id, piece) for id, piece in self.parts if piece.startswith(b"\\")]
        self.blocked = lru_cache(64)(self._blocked)

    def packed(self, ids: Sequence[int]) -> Bits:
        """The bitmask of some tokens."""
        flags = np.zeros(-(-self._n // 32) * 32, bool)
        flags[list(ids)] = True
        return np.packbits(flags, bitorder="little").view(np.uint32)

    def _blocked(self, n_digits: int, most: int, exponent: int) -> Bits | None:
        """All but tokens with more leading digits than `left`, more in a row than `most`, or too many of an exponent;
        None: there are no such tokens."""
        bits = self.packed(np.flatnonzero((self._leading > n_digits) | (self._longest > most)).tolist())
        bits = bits | self._exponents if exponent < 3 else bits
        return ~bits if bits.any() else None


class _State(NamedTuple):
    """Lexical state of the text; `held`: the part of an escape that the engine has not got yet."""

    quoted: bool = False
    escaped: bool = False
    number: bytes = b""
    parts: tuple[int, ...] = ()  # commas of each array and object that is open
    empty: int = 0  # empty arrays and objects that follow each other
    last: int = 0  # the last character that is no blank
    pending: bytes = b""


class JsonText:
    """The engine's state of one generation, behind the text of JSON. For one thread at a time."""

    def __init__(self, engine: LLMatcher, pieces: PieceTable, limits: Limits) -> None:
        self._engine, self._pieces, self._limits = engine, pieces, limits
        self._state = _State()
        self._bytes = 0  # bit i: the engine takes byte i next, at the last mask
        self._history: list[tuple[int, _State]] = []  # engine tokens, and the state before, of each text

    def copy(self) -> JsonText:
        """An independent copy."""
        other = JsonText(self._engine.deep_copy(), self._pieces, self._limits)
        other._state, other._history = self._state, self._history.copy()
        return other

    @property
    def engine(self) -> LLMatcher:
        """The engine, at the end of the text but for an escape that is held back."""
        return self._engine

    def is_accepting(self) -> bool:
        """True if the text is complete."""
        if not self._state.pending:
            return bool(self._engine.is_accepting())
        if not self._feed(self._state.pending):
            return False
        result = bool(self._engine.is_accepting())
        self._engine.rollback(len(self._state.pending))
        return result

    def accept(self, text: bytes, id: int | None = None) -> bool:
        """Advance by a text, which is that of a token; False, and no change, if it is not allowed."""
        state = self._state
        if id is not None and not state.pending and b"\\" not in text:
            if self._engine.is_stopped() or self._engine.try_consume_tokens([id]) != 1:
                return False
            count, pending = 1, b""
        else:
            result = self._escapes(state.pending + text)
            if result is None:
                return False
            count, pending = result
        after = _advanced(state, text)
        self._state = after if after.pending == pending else after._replace(pending=pending)
        if pending and not self._goes_on(pending):
            if count:
                self._engine.rollback(count)
            self._state = state
            return False
        self._history.append((count, state))
        return True

    def _goes_on(self, pending: bytes) -> bool:
        """True if the beginning of an escape has an end that the engine takes."""
        if self._probe(pending):
            return True
        if not self._state.quoted:
            return False
        bits = np.zeros(-(-(self._pieces.first_byte + 256) // 32), np.uint32)
        self._compute(bits)
        self._read_bytes(bits)
        return bool(
            (pending == b"\\" and self._bytes >> 0x2F & 1) or (self._limits.patterns and self._completes(pending))
        )

    def rollback(self, n: int) -> None:
        """Undo the last n texts."""
        count = 0
        for _ in range(n):
            consumed, self._state = self._history.pop()
            count += consumed
        if count:
            self._engine.rollback(count)

    # -- escapes

    def _feed(self, text: bytes) -> bool:
        """Give the engine the bytes of a text, all or none."""
        if self._engine.is_stopped():
            return not text
        ids = [self._pieces.first_byte + byte for byte in text if byte != 0xFF]
        count = int(self._engine.try_consume_tokens(ids))
        if count == len(text):
            return True
        if count:
            self._engine.rollback(count)
        return False

    def _escapes(self, text: bytes) -> tuple[int, bytes] | None:
        """Give the engine a text whose first character is no escaped one. (Engine tokens, rest to hold back)."""
        count, at = 0, 0
        quoted = self._state.quoted
        while at < len(text):
            start = text.find(b"\\", at)
            plain = text[at:] if start < 0 else text[at:start]
            part, meant, at = (b"", b"", len(text)) if start < 0 else self._escape(text, start)
            if plain and not self._feed(plain):
                break
            count += len(plain)
            quoted ^= plain.count(b'"') % 2 == 1
            if start >= 0 and not part:
                return count, text[start:]
            if not part:
                return count, b""
            # the character first: a name that is taken stays so however it is written
            fed = next((form for form in ((meant, part) if quoted and meant else (part,)) if self._feed(form)), b"")
            if not fed:
                break
            count += len(fed)
        else:
            return count, b""
        if count:
            self._engine.rollback(count)
        return None

    def _escape(self, text: bytes, start: int) -> tuple[bytes, bytes, int]:
        """(An escape, how the engine reads its character, its end); an escape without text is not whole yet."""
        kind = text[start + 1 : start + 2]
        if not kind:
            return b"", b"", start
        if kind == b"/":
            return text[start : start + 2], b"/", start + 2
        if kind != b"u":
            return text[start : start + 2], b"", start + 2
        match = _HEX.match(text, start + 2, start + 6)
        digits = match[0] if match else b""
        end = start + 2 + len(digits)
        if len(digits) < 4:
            return (b"", b"", start) if end == len(text) else (text[start:end], b"", end)
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00:
            pair = re.compile(rb"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(text, end)
            if pair:
                code = 0x10000 + ((code & 0x3FF) << 10) + (int(pair[1], 16) & 0x3FF)
                return text[start : pair.end()], chr(code).encode(), pair.end()
            rest = text[end:]
            return (b"", b"", start) if _begins_low(rest) else (text[start:end], b"", end)
        return text[start:end], b"" if 0xDC00 <= code < 0xE000 else _meant(code), end

    def _completes(self, part: bytes) -> bool:
        """True if the engine takes a character whose escape begins with this part."""
        digits = part[2:6]
        if len(part) > 6:  # after a high surrogate
            tail = part[8:12]
            if not _begins_low(part[6:12]):
                return False
            high, low = 0x10000 + ((int(digits, 16) & 0x3FF) << 10), int(tail or b"0", 16) << 4 * (4 - len(tail))
            first = max(low, 0xDC00) & 0x3FF
            last = min(low + (1 << 4 * (4 - len(tail))) - 1, 0xDFFF) & 0x3FF
            return self._takes(high + first, high + last)
        span = 4 * (4 - len(digits))
        first = int(digits or b"0", 16) << span
        last = first + (1 << span) - 1
        if self._takes(first, min(last, 0xD7FF)) or self._takes(max(first, 0xE000), last):
            return True
        low, high = max(first, 0xD800), min(last, 0xDBFF)
        return low <= high and self._takes(0x10000 + ((low & 0x3FF) << 10), 0x10000 + ((high & 0x3FF) << 10) + 0x3FF)

    def _takes(self, first: int, last: int) -> bool:
        """True if the engine takes one of these characters next."""
        if first > last:
            return False
        escapes = self._bytes >> 0x5C & 1
        for code in range(first, min(last, 0x7F) + 1):
            if code in _ESCAPED or code < 0x20 or code == 0x7F:
                if escapes and self._probe(_meant(code)):
                    return True
            elif self._bytes >> code & 1:
                return True
        return any(self._takes_of(low, high, b"") for low, high in _same_length(max(first, 0x80), last))

    def _takes_of(self, first: int, last: int, prefix: bytes) -> bool:
        """True if the engine takes one of these characters; their UTF-8 has one length, it has read `prefix`."""
        low, high = chr(first).encode(), chr(last).encode()
        for byte in range(low[len(prefix)], high[len(prefix)] + 1):
            if (not prefix and not self._bytes >> byte & 1) or not self._feed(bytes([byte])):
                continue
            text = prefix + bytes([byte])
            result = len(text) == len(low)
            if not result:
                start = first if low.startswith(text) else _smallest(text, len(low))
                end = last if high.startswith(text) else _largest(text, len(low))
                result = start is not None and end is not None and self._takes_of(start, end, text)
            self._engine.rollback(1)
            if result:
                return True
        return False

    def _probe(self, text: bytes) -> bool:
        result = self._feed(text)
        if result:
            self._engine.rollback(len(text))
        return result

    # -- masks

    def mask(self, bits: Bits) -> None:
        """Set the bits of the tokens that may come next (the engine's buffer: a bit a token of its vocabulary)."""
        pending, pieces = self._state.pending, self._pieces
        if not pending:
            self._compute(bits)
            if not self._in_plain_string():
                self._read_bytes(bits)
                self._bound(bits)
            if self._state.quoted:
                for id, plain in pieces.slashes:
                    if bits[plain // 32] >> np.uint32(plain % 32) & 1:
                        bits[id // 32] |= np.uint32(1 << (id % 32))
                self._parts(bits, pieces.beginnings)
            return
        if self._feed(pending):
            self._compute(bits)
            self._engine.rollback(len(pending))
        if self._state.quoted:
            before = np.zeros_like(bits)
            self._compute(before)
            self._read_bytes(before)
            if pending == b"\\":
                n_words = len(pieces.sets["slash"])
                bits[:n_words] |= before[:n_words] & pieces.sets["slash"]
            self._parts(bits, pieces.parts)

    def _in_plain_string(self) -> bool:
        """True within a string where nothing is bounded and the engine reads all escapes."""
        limits, state = self._limits, self._state
        if not state.quoted or limits.mixed or limits.patterns:
            return False
        parts = state.parts
        return len(parts) < MAX_DEPTH and state.empty < MAX_EMPTY and (not parts or parts[-1] + 1 < limits.parts)

    def _compute(self, bits: Bits) -> None:
        if not self._engine.is_stopped():
            self._engine.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def _read_bytes(self, bits: Bits) -> None:
        """Remember which bytes the engine takes next."""
        first, offset = divmod(self._pieces.first_byte, 32)
        self._bytes = int.from_bytes(bits[first : first + 9].tobytes(), "little") >> offset & _BYTES

    def _parts(self, bits: Bits, candidates: Sequence[tuple[int, bytes]]) -> None:
        """Add the tokens that begin or continue an escape of a character that the engine takes."""
        pending = self._state.pending
        if not self._limits.patterns or (not pending and self._bytes.bit_count() == 1 and self._bytes < 1 << 128):
            return  # a name or an enumeration's rest, which needs no escape
        if self._probe(b"\\u0041\\u0041"):
            return  # the engine reads escapes itself
        known: dict[bytes, bool] = {}
        for id, piece in candidates:
            part = pending + piece
            if _is_part(part):
                if part not in known:
                    known[part] = self._completes(part)
                if known[part]:
                    bits[id // 32] |= np.uint32(1 << (id % 32))

    def _bound(self, bits: Bits) -> None:
        """Take out the tokens that go on with a number or nesting beyond the limits."""
        limits, state, takes = self._limits, self._state, self._bytes
        if takes & _TEXT == _TEXT:  # free text of a Lark grammar, not JSON
            self._state = _State()
            return
        if state.quoted and limits.mixed and takes & _AFTER_NUMBER == _AFTER_NUMBER and not takes & _LETTER:
            state = self._state = _State()  # a number: the quotes were of another text than JSON
        pieces, parts = self._pieces, state.parts
        words = bits[: len(pieces.sets["open"])]
        within, n_digits = words, limits.before
        at = "quote " if state.quoted else ""
        if len(parts) >= MAX_DEPTH and (state.quoted or takes & _OTHER_VALUES):
            within = within & ~pieces.sets[at + "open"]
        is_full = parts and (parts[-1] + 1 >= limits.parts or state.empty >= MAX_EMPTY)
        if is_full and (state.quoted or takes & _ENDS):
            within = within & ~pieces.sets[at + "comma"]
        if not state.quoted and not takes & _LETTER:
            n_digits = _digits_left(state.number, limits) if state.number else limits.before
            most = max(limits.before, limits.behind)
            others = pieces.blocked(min(max(n_digits, 0), 255), most, limits.exponent)
            within = within if others is None else within & others
        if within is words:
            return
        if within.any() or self._engine.is_accepting():
            words[:] = within
        elif n_digits <= 0 and state.number:  # which cannot end yet: the digits that bring its end nearest
            nearest = next((near for n in range(3) if (near := [d for d in pieces.digits if self._ends(d, n)])), [])
            if nearest:
                words[:] = pieces.packed([id for digit in nearest for id in pieces.digits[digit]])

    def _ends(self, digit: int, n: int) -> bool:
        """True if a number can end after this digit and n others."""
        if not self._feed(bytes([digit])):
            return False
        if n:
            result = any(self._ends(other, n - 1) for other in range(0x30, 0x3A))
        else:
            result = bool(self._engine.is_accepting()) or any(self._probe(end) for end in (b",", b"]", b"}", b" "))
        self._engine.rollback(1)
        return result


def _digits_left(number: bytes, limits: Limits) -> int:
    """Digits that may follow a number's beginning."""
    match = _NUMBER.fullmatch(number)
    if match is None:
        return limits.before
    before, point, behind, exponent, of_exponent = match.groups()
    if exponent:
        return limits.exponent - len(of_exponent)
    return limits.behind - len(behind) if point else limits.before - len(before)


def _advanced(state: _State, text: bytes) -> _State:
    """The state after a text."""
    quoted, escaped, number, parts, empty, last, _ = state
    if quoted and not escaped and b"\\" not in text:
        start = text.find(b'"')
        if start < 0:
            return state
        quoted, last, text = False, 0x22, text[start + 1 :]
    for byte in text:
        if quoted:
            quoted, escaped = escaped or byte != 0x22, not escaped and byte == 0x5C
            continue
        number = number + bytes([byte]) if byte in _IN_NUMBER else b""
        if byte in b" \n\r\t":
            continue
        if byte in b"[{":
            parts += (0,)
        elif byte in b"]}":
            empty = empty + 1 if last in b"[{" and last else 0
            parts = parts[:-1]
        elif byte == 0x2C and parts:
            parts = (*parts[:-1], parts[-1] + 1)
        elif byte != 0x2C:
            quoted, empty = byte == 0x22, 0
        last = byte
    return _State(quoted, escaped, number, parts, empty, last)


def _meant(code: int) -> bytes:
    """A character as the engine reads it in a string."""
    if code in _ESCAPED:
        return _ESCAPED[code]
    return f"\\u{code:04x}".encode() if code < 0x20 or code == 0x7F else chr(code).encode()


def _is_part(text: bytes) -> bool:
    """True if a text is an escape of digits or its beginning."""
    match = re.fullmatch(rb"\\(?:u([0-9a-fA-F]{0,4})(\\.{0,5})?)?", text, re.DOTALL)
    if match is None or match[2] is None:
        return match is not None
    return len(match[1]) == 4 and 0xD800 <= int(match[1], 16) < 0xDC00 and _begins_low(match[2])


def _begins_low(text: bytes) -> bool:
    """True if a text is an escape of a low surrogate or its beginning."""
    return re.fullmatch(rb"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,2})?)?)?)?", text) is not None


def _same_length(first: int, last: int) -> Iterator[tuple[int, int]]:
    """The range of characters, split by the length of their UTF-8; without surrogates."""
    for low, high in ((0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)):
        if max(first, low) <= min(last, high):
            yield max(first, low), min(last, high)


def _smallest(prefix: bytes, length: int) -> int | None:
    """The smallest character whose UTF-8 begins so."""
    return _first_of(prefix + second + b"\x80" * (length - len(prefix + second)) for second in (b"", b"\x90", b"\xa0"))


def _largest(prefix: bytes, length: int) -> int | None:
    """The largest character whose UTF-8 begins so."""
    return _first_of(prefix + second + b"\xbf" * (length - len(prefix + second)) for second in (b"", b"\x9f", b"\x8f"))


def _first_of(texts: Iterable[bytes]) -> int | None:
    """The first of these that is one character."""
    for text in texts:
        with suppress(UnicodeDecodeError, TypeError):
            return ord(text.decode())
    return None
