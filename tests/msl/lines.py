"""Source lines of code addresses, from the DWARF 4 line table of a shared object."""

from __future__ import annotations

import struct
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path


class _Reader:
    def __init__(self, data: bytes, at: int = 0):
        self.data, self.at = data, at

    def take(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def leb(self, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value


def _section(data: bytes, wanted: str) -> bytes:
    """Contents of a section of a 64-bit ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 0x28), struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        if _Reader(data, headers[names][4] + name).string() == wanted:
            return data[offset : offset + length]
    return b""


def _program(r: _Reader, end: int, file_name: str) -> list[tuple[int, int]]:
    """(address, line) of one unit; the line is 0 at the end of a piece and -1 where it is not one of the file."""
    rows = []
    _version, header_length = r.take("H"), r.take("I")
    code = r.at + header_length
    shortest, _ops, _is_stmt, line_base, line_range, opcode_base = (r.take(c) for c in "BBBbBB")
    operands = [r.take("B") for _ in range(opcode_base - 1)]
    while r.string():  # directories
        pass
    files = []
    while name := r.string():
        files.append(name)
        for _ in range(3):
            r.leb()
    r.at = code
    address, file, line = 0, 1, 1
    while r.at < end:
        op = r.take("B")
        if op >= opcode_base:
            address += (op - opcode_base) // line_range * shortest
            line += line_base + (op - opcode_base) % line_range
        elif op == 0:
            length = r.leb()
            after, kind = r.at + length, r.take("B")
            if kind == 1:
                rows.append((address, 0))
                address, file, line = 0, 1, 1
            elif kind == 2:
                address = r.take("Q")
            r.at = after
            continue
        elif op == 2:
            address += r.leb() * shortest
        elif op == 3:
            line += r.leb(signed=True)
        elif op == 4:
            file = r.leb()
        elif op == 8:
            address += (255 - opcode_base) // line_range * shortest
        elif op == 9:
            address += r.take("H")
        elif op != 1:
            for _ in range(operands[op - 1]):
                r.leb()
        if op >= opcode_base or op == 1:
            rows.append((address, line if line and Path(files[file - 1]).name == file_name else -1))
    return rows


@lru_cache(maxsize=32)
def _table(path: str, file_name: str) -> list[tuple[int, int]]:
    r = _Reader(_section(Path(path).read_bytes(), ".debug_line"))
    rows = []
    while r.at < len(r.data):
        length = r.take("I")
        end = r.at + length
        rows += _program(r, end, file_name)
        r.at = end
    return sorted(rows, key=lambda row: row[0])


def line_of(path: str, address: int, file_name: str) -> int | None:
    """Line of `file_name` that the code at an address belongs to, also where that code is inlined from a header."""
    rows = _table(path, file_name)
    i = bisect_right(rows, (address, 1 << 60)) - 1
    while i >= 0 and rows[i][1] < 0:
        i -= 1
    return rows[i][1] or None if i >= 0 else None
