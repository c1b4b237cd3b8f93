"""Linker of object files into code images, so that a warm start and a server need no LLVM.

`link` places the sections of an object file (ELF for x86-64, position-independent) into one image
and resolves the relative relocations. `load` copies images into executable memory and resolves the
absolute ones: addresses within the image, and those of C functions. The relocations are defined in
the System V ABI, AMD64 supplement, chapter 4.

An image is a line of JSON, then the code: `{"entry": offset, "absolute": offsets, "functions":
{name: offset}}`. `absolute` lists 64-bit words relative to the image's start. A function's word
becomes its address."""

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
UNDEFINED = 0  # section of symbols
CONSTANTS = ".data.rel.ro"  # written by the loader only
UNWINDING = ".eh_frame"  # kernels are never unwound
JUMP = b"\xff\x25\x02\x00\x00\x00\x66\x90"  # jmp [rip+2]; a no-op; then the address
_mappings: list[mmap.mmap] = []  # for the lifetime of the process


class NotLinkable(ValueError):
    """The object file is for another machine, or has a feature that no kernel had so far."""


def link(code: bytes, symbol: str) -> bytes:
    """Image of an object file whose entry is the function `symbol`."""
    if (code[:6], *struct.unpack_from("<HH", code.ljust(20, b"\0"), 16)) != ELF_X86_64:
        raise NotLinkable("not an object file for x86-64")
    table, size, n, names_at = struct.unpack_from("<40xQ10xHHH", code)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(n)]

    def name(start: int, offset: int) -> str:
        return code[start + offset : code.index(b"\0", start + offset)].decode()

    image, place = bytearray(), {}
    for i, (label, kind, flags, _, offset, nbytes, _, _, alignment, _) in enumerate(sections):
        section_name = name(sections[names_at][4], label)
        if not flags & LOADED or section_name == UNWINDING:
            continue
        if kind == ZEROS or alignment > ALIGNMENT or (flags & WRITTEN and section_name != CONSTANTS):
            raise NotLinkable(f"section {section_name}")
        image += bytes(-len(image) % max(alignment, 1))
        place[i] = len(image)
        image += code[offset : offset + nbytes]

    (symbols,) = [s for s in sections if s[1] == SYMBOLS]
    names = sections[symbols[6]][4]
    symbol_table = [struct.unpack_from("<IBBHQQ", code, symbols[4] + at) for at in range(0, symbols[5], 24)]
    entry = next((place[s[3]] + s[4] for s in symbol_table if s[3] in place and name(names, s[0]) == symbol), None)
    if entry is None:
        raise NotLinkable(f"no function {symbol}")
    functions: dict[str, int] = {}

    def jump_to(function: str) -> int:
        """Offset of the jump to a C function, which may be too far away for a direct call."""
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
            label, _, _, section, value, _ = symbol_table[info >> 32]
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
    """Entry addresses of the images.

    MemoryError when there is no memory, OSError when it may not be executable."""
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
        header = json.loads(head)
        memory[offset : offset + len(code)] = code
        for at in header["absolute"]:
            (word,) = struct.unpack_from("<q", code, at)
            struct.pack_into("<q", memory, offset + at, base + offset + word)
        for function, at in header["functions"].items():
            address = ctypes.cast(getattr(process, function), ctypes.c_void_p).value
            struct.pack_into("<q", memory, offset + at, address)
        entries.append(base + offset + header["entry"])
    if process.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(end), mmap.PROT_READ | mmap.PROT_EXEC):
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"memory cannot be made executable ({reason})")
    _mappings.append(memory)
    return entries
