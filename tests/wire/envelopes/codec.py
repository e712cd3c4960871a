"""Envelopes of the tests' transport (envelope.c): sealed by clients, opened and checked by them."""

from __future__ import annotations

import struct
import zlib

HEAD = struct.Struct(">4sIQ")
MAGIC = b"MDRV"
PLAIN_MAX = 16384
FROM_CLIENT = 1 << 40
_KEYS = [bytes(byte ^ key for byte in range(256)) for key in range(256)]


class BrokenEnvelope(Exception):
    """An envelope that is not what it has to be: a number that came twice, other contents."""


def _xor(number: int, data: bytes) -> bytes:
    return data.translate(_KEYS[(number * 37 + 11) & 0xFF])


def _check(number: int, plain: bytes) -> bytes:
    begun = (number >> 15 & 0x7FFF) << 16 | number & 0x7FFF
    return struct.pack(">I", zlib.adler32(plain, begun))


class Sealer:
    """What a client sends: numbers count up."""

    def __init__(self) -> None:
        self._next = FROM_CLIENT

    def seal(self, plain: bytes) -> bytes:
        number, self._next = self._next, self._next + 1
        head = HEAD.pack(MAGIC, len(plain), number)
        return head + _xor(number, plain) + _check(number, plain)


class Opener:
    """What a client receives. Every number comes once, in order, and with one content."""

    def __init__(self) -> None:
        self.opened = 0
        self._raw = bytearray()

    def feed(self, raw: bytes) -> bytes:
        """The plain bytes of the envelopes that are whole now."""
        self._raw += raw
        plain = []
        at = 0
        while len(self._raw) - at >= HEAD.size:
            magic, size, number = HEAD.unpack_from(self._raw, at)
            if magic != MAGIC or number != self.opened:
                raise BrokenEnvelope(f"{magic!r} {number}, expected {self.opened}")
            end = at + HEAD.size + size + 4
            if len(self._raw) < end:
                break
            found = _xor(number, bytes(self._raw[at + HEAD.size : end - 4]))
            if _check(number, found) != self._raw[end - 4 : end]:
                raise BrokenEnvelope(f"content of {number} differs from what was begun")
            plain.append(found)
            self.opened += 1
            at = end
        del self._raw[:at]
        return b"".join(plain)

    @property
    def waiting(self) -> int:
        """Raw bytes of an envelope that is not whole."""
        return len(self._raw)
