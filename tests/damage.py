"""Damage to the bytes of files, for tests of readers."""

from __future__ import annotations

import io
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable

Change = Callable[[bytes, random.Random], bytes]


def damage(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to three changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(CHANGES + TEXT_CHANGES if is_text(data) else CHANGES)(data, rng)
    return data


def is_text(data: bytes) -> bool:
    return not any(byte < 9 for byte in data[:1000])


def place(data: bytes, rng: random.Random) -> int:
    """A position; half of the time in the header."""
    return rng.randrange(max(min(len(data), 256) if rng.random() < 0.5 else len(data), 1))


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 2, 4, 16))):
        out[place(out, rng)] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut_end(data: bytes, rng: random.Random) -> bytes:
    return data[: place(data, rng)]


def span(data: bytes, rng: random.Random) -> tuple[int, int]:
    begin = place(data, rng)
    return begin, min(begin + rng.choice((1, 4, 16, 256, 4096)), len(data))


def zero_span(data: bytes, rng: random.Random) -> bytes:
    begin, end = span(data, rng)
    return data[:begin] + bytes(end - begin) + data[end:]


def remove_span(data: bytes, rng: random.Random) -> bytes:
    begin, end = span(data, rng)
    return data[:begin] + data[end:]


def repeat_span(data: bytes, rng: random.Random) -> bytes:
    begin, end = span(data, rng)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 100)) + data[end:]


def insert_noise(data: bytes, rng: random.Random) -> bytes:
    begin, end = span(data, rng)
    return data[:begin] + rng.randbytes(end - begin) + data[begin:]


def extreme_field(data: bytes, rng: random.Random) -> bytes:
    """A number of one to eight bytes becomes the smallest, the largest, zero, one, or minus one."""
    begin, size = place(data, rng), rng.choice((1, 2, 4, 8))
    top = 1 << 8 * size
    value = rng.choice((0, 1, top // 2 - 1, top // 2, top - 1, 65535 % top, 10**6 % top))
    return data[:begin] + value.to_bytes(size, rng.choice(("little", "big"))) + data[begin + size :]


TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|[\[\]{},:]')
VALUES = (
    *(b"null", b"true", b"0", b"-1", b"0.5", b"1e999", b"NaN", b"99999999999", b"1" * 5000),
    *(b'""', b'"\\ud800"', b'"../../x"', b'"' + b"x" * 3000 + b'"', b"\xff", b"&a *a"),
    *(b"[]", b"{}", b"[" * 2000, b"[" * 50 + b"]" * 50),
)


def other_token(data: bytes, rng: random.Random) -> bytes:
    """A value, a name or a bracket is replaced by a value of another type, or removed."""
    tokens = list(TOKEN.finditer(data)) or [re.match(b"", data)]
    token = rng.choice([found for found in tokens if found])
    return data[: token.start()] + rng.choice((*VALUES, b"")) + data[token.end() :]


CHANGES: tuple[Change, ...] = (
    *(flip_bits, flip_bits, cut_end, zero_span, remove_span, repeat_span, insert_noise),
    *(extreme_field, extreme_field, extreme_field),
)
TEXT_CHANGES: tuple[Change, ...] = (other_token,) * 10


def repair_png(data: bytes) -> bytes:
    """The checksums of all chunks computed anew."""
    out, position = bytearray(data), 8
    while position + 12 <= len(out):
        (length,) = struct.unpack_from(">I", out, position)
        end = position + 8 + length
        if end + 4 > len(out):
            break
        struct.pack_into(">I", out, end, zlib.crc32(out[position + 4 : end]))
        position = end + 4
    return bytes(out)


def repair_zip(data: bytes) -> bytes:
    """The checksum of the first member computed anew, if it is stored uncompressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            member = archive.infolist()[0]
            names = struct.unpack_from("<HH", data, member.header_offset + 26)
            start = member.header_offset + 30 + sum(names)
            crc = struct.pack("<I", zlib.crc32(data[start : start + member.file_size]))
    except (zipfile.BadZipFile, struct.error, LookupError, OSError, ValueError, NotImplementedError):
        return data
    return data.replace(struct.pack("<I", member.CRC), crc)
