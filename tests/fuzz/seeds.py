"""Where the fuzzers begin, beside what they found before (corpus/): inputs known to matter.

For the parser these are the vectors of the codec, each whole and in small pieces, so that a vector
which is added for a bug is a seed from then on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from midair.process import wire

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
VECTORS = HERE.parent / "wire" / "vectors" / "nats"
# As in parser.c.
CONTROL_LINES = (4096, 0, 8, 18, 58, 64, 1024, 2**32 - 1)
PAYLOADS = (1048576, 0, 64, 2**32 - 1)
# Lengths of pieces less one.
CUTS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x03\x00\x0c\x11")


def parser() -> Iterator[bytes]:
    """The head of an input (parser.c) and the bytes of a vector."""
    for path in sorted(VECTORS.glob("*/*.nats")):
        limits = json.loads(path.with_suffix(".json").read_text())["limits"]
        options = limits.get("pedantic", True) | limits.get("headers", False) << 1
        options |= nearest(CONTROL_LINES, limits.get("max_control_line", 4096)) << 3
        options |= nearest(PAYLOADS, limits.get("max_payload", 1048576)) << 6
        stream = path.read_bytes()
        for at, cuts in enumerate(CUTS):
            more = 4 if at == 1 else 0  # repeats, and nothing is judged
            yield bytes([options & ~1 | more if at else options, 31]) + cuts + stream


def nearest(table: tuple[int, ...], wanted: int) -> int:
    return min(range(len(table)), key=lambda at: abs(table[at] - wanted))


def control() -> Iterator[bytes]:
    release = {"python": "/usr/bin/python3", "root": "/nowhere", "version": "0.2.0"}
    for request in (
        {"op": "status", "v": 1},
        {"op": "down"},
        {"op": "down", "lame_duck": True, "v": 1},
        {"op": "reload", "v": 1},
        {"op": "reload", "dry_run": True, "v": 1},
        {"op": "trace", "want": True, "v": 1},
        {"op": "trace", "want": False, "v": 1},
        {"op": "upgrade", "target": "router", "release": release, "ready_s": 30.0, "v": 1},
        {
            "op": "upgrade",
            "target": "all",
            "release": {**release, "version": "0.1.0"},
            "ready_s": 1,
        },
        {"op": "status", "v": 2},
        {"v": None},
        {},
    ):
        yield json.dumps(request).encode()
    yield from (b"[]", b'"op"', b"{", b"\xff\xfe", b"null", b"[" * 100)


def notify() -> Iterator[bytes]:
    yield b"READY=1\nMONOTONIC_USEC=123456789"
    yield b"STATUS=standby"
    yield b"WATCHDOG=1"


def connect() -> Iterator[bytes]:
    for path in sorted(VECTORS.glob("valid/connect-*.nats")):
        yield b"\x00" + path.read_bytes().partition(b" ")[2]
    yield (
        b"\x08"
        + json.dumps(
            {
                "verbose": False,
                "pedantic": False,
                "tls_required": False,
                "name": "ipc:prices.one",
                "lang": "python3",
                "version": "2.6.0",
                "protocol": 1,
                "echo": True,
                "headers": True,
                "no_responders": True,
            }
        ).encode()
    )


def messages() -> Iterator[bytes]:
    """Of dispatcher and keeper."""
    yield wire.ASK
    yield wire.hello()
    for op in (wire.HOLD, wire.DROP, wire.GIVE, wire.HELD, wire.END, wire.PING, wire.PONG):
        yield wire.pack_uids(op, [1, 2**63][: op % 3], 1)
    yield wire.pack_handoff([(1, 0, 0), (2**64 - 1, 2**32 - 1, 0)], 1)


def keeper() -> Iterator[bytes]:
    def piece(count: int, message: bytes) -> bytes:
        return struct.pack("<BH", count, len(message)) + message

    for message in messages():
        yield piece(0, message) + piece(2, message)
    held = piece(2, wire.pack_uids(wire.HOLD, [5, 6], 1)) + piece(0, wire.pack_uids(wire.DROP, [5]))
    yield held + piece(0, wire.pack_uids(wire.GIVE)) + piece(2, wire.pack_uids(wire.HOLD, [5, 7]))


SEEDS = {
    "parser": parser,
    "control": control,
    "notify": notify,
    "connect": connect,
    "keeper": keeper,
    "handoff": messages,
}


def inputs(target: str) -> dict[str, bytes]:
    """Every known input of a target, by name."""
    found = {f"seed-{at:04}": data for at, data in enumerate(SEEDS[target]())}
    for path in sorted((CORPUS / target).glob("*")):
        found[path.name] = path.read_bytes()
    return found
