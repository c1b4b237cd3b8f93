"""Machine code that needs no linker any more, so that a warm start and a server's memory do without LLVM.

`link` puts the sections of an object file (ELF for x86-64, position-independent) into one image; what they say of each
other is relative and final. `load` copies images into executable memory and fills in what depends on where they lie:
addresses within them, and those of C's functions. System V ABI, AMD64 supplement, chapter 4, has the relocations.

An image is a line of JSON, then the code: `{"entry": offset, "absolute": offsets, "functions": {name: offset}}`, where
`absolute` are 64-bit words that count from the image's start, and a function's word is to become its address.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
from collections.abc import Sequence

ALIGNMENT = 64
ELF_X86_64 = b"\x7fELF\x02\x01", 1, 62  # 64 bits, little-endian; relocatable; the machine
SYMBOLS, RELOCATIONS, ZEROS = 2, 4, 8  # types of sections
WRITTEN, LOADED = 1, 2  # flags of sections
ABSOLUTE, RELATIVE, CALL = 1, 2, 4  # R_X86_64_64, R_X86_64_PC32, R_X86_64_PLT32
UNDEFINED, RESERVED = 0, 0xFF00  # sections of symbols
CONSTANTS = ".data.rel.ro"  # written by whoever loads it only
UNWINDING = ".eh_frame"  # nobody unwinds kernels
JUMP = b"\xff\x25\x02\x00\x00\x00\x66\x90"  # jmp [rip+2]; a no-op; then the address
_kept: list[mmap.mmap] = []  # for as long as the process lives


class NotLinkable(ValueError):
    """An object file of another kind of machine, or with something in it that no kernel had so far."""


def link(code: bytes, symbol: str) -> bytes:
    """The image of an object file, whose entry is the function `symbol`."""
    if (code[:6], *struct.unpack_from("<HH", code.ljust(20, b"\0"), 16)) != ELF_X86_64:
        raise NotLinkable("not an object file for x86-64")
    table, size, n, names_at = struct.unpack_from("<40xQ10xHHH", code)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(n)]

    def name(start: int, offset: int) -> str:
        return code[start + offset : code.index(b"\0", start + offset)].decode()

    image, place = bytearray(), {}
    for i, (label, kind, flags, _, offset, nbytes, _, _, alignment, _) in enumerate(sections):
        called = name(sections[names_at][4], label)
        if not flags & LOADED or called == UNWINDING:
            continue
        if kind == ZEROS or alignment > ALIGNMENT or (flags & WRITTEN and called != CONSTANTS):
            raise NotLinkable(f"section {called}")
        image += bytes(-len(image) % max(alignment, 1))
        place[i] = len(image)
        image += code[offset : offset + nbytes]

    (symbols,) = [s for s in sections if s[1] == SYMBOLS]
    names = sections[symbols[6]][4]
    known = [struct.unpack_from("<IBBHQQ", code, symbols[4] + at) for at in range(0, symbols[5], 24)]
    entry = next((place[s[3]] + s[4] for s in known if s[3] in place and name(names, s[0]) == symbol), None)
    if entry is None:
        raise NotLinkable(f"no function {symbol}")
    functions: dict[str, int] = {}

    def jump_to(function: str) -> int:
        """Where the image calls a function of C: it may lie too far away for the call itself."""
        if function not in functions:
            if not hasattr(ctypes.CDLL(None), function):
                raise NotLinkable(f"no function {function}")
            image.extend(bytes(-len(image) % 16) + JUMP + bytes(8))
            functions[function] = len(image) - 8
        return functions[function] - len(JUMP)

    absolute = []
    for _, kind, _, _, offset, nbytes, _, of, _, _ in sections:
        if kind != RELOCATIONS or of not in place:
            continue
        for at in range(offset, offset + nbytes, 24):
            where, info, addend = struct.unpack_from("<QQq", code, at)
            where += place[of]
            label, _, _, section, value, _ = known[info >> 32]
            how = info & 0xFFFFFFFF
            if section in place:
                to = place[section] + value + addend
            elif section == UNDEFINED and how == CALL:
                to = jump_to(name(names, label)) + addend
            else:
                raise NotLinkable(f"symbol {name(names, label)} in section {section}")
            if how == ABSOLUTE:
                absolute.append(where)
                struct.pack_into("<q", image, where, to)
            elif how in (RELATIVE, CALL):
                struct.pack_into("<i", image, where, to - where)
            else:
                raise NotLinkable(f"relocation {how}")
    return json.dumps({"entry": entry, "absolute": absolute, "functions": functions}).encode() + b"\n" + image


def is_image(code: bytes) -> bool:
    return code.startswith(b"{")


def load(images: Sequence[bytes]) -> list[int]:
    """The addresses of the images' entries. MemoryError where there is no memory, OSError where it may not be run."""
    if not images:
        return []
    parts = [image.partition(b"\n") for image in images]
    offsets, end = [], 0
    for _, _, code in parts:
        offsets.append(end)
        end += -(-len(code) // ALIGNMENT) * ALIGNMENT
    try:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{end} bytes for kernels: {error.strerror}") from error
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    process = ctypes.CDLL(None, use_errno=True)
    entries = []
    for offset, (head, _, code) in zip(offsets, parts, strict=True):
        told = json.loads(head)
        memory[offset : offset + len(code)] = code
        for at in told["absolute"]:
            (word,) = struct.unpack_from("<q", code, at)
            struct.pack_into("<q", memory, offset + at, base + offset + word)
        for function, at in told["functions"].items():
            address = ctypes.cast(getattr(process, function), ctypes.c_void_p).value
            struct.pack_into("<q", memory, offset + at, address)
        entries.append(base + offset + told["entry"])
    if process.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(end), mmap.PROT_READ | mmap.PROT_EXEC):
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"memory cannot be made executable ({reason})")
    _kept.append(memory)
    return entries
