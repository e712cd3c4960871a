"""Wire protocols (native/src/protocol): what they are called, say and refuse.

The data path parses in C; this is for the control plane (names, texts, subject rules) and for
tests.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from midair.errors import ConfigError
from native import ffi, lib

FLAG_BAD_SUBJECT: int = lib.FRAME_BAD_SUBJECT
FLAG_USUAL: int = lib.FRAME_USUAL

# The protocols of this build: a listener's is known by its number.
NAMES = tuple(ffi.string(lib.protocol_name(n)).decode() for n in range(lib.protocol_count()))
# And what carries their bytes.
TRANSPORTS = tuple(ffi.string(lib.transport_name(n)).decode() for n in range(lib.transport_count()))


def number(name: str | None) -> int:
    """Of the protocol that is spoken at a listener; None: that of which nothing is said."""
    return _number("protocol", name, NAMES)


def transport(name: str | None) -> int:
    """The same of a transport (native/src/transport)."""
    return _number("transport", name, TRANSPORTS)


def _number(what: str, name: str | None, names: tuple[str, ...]) -> int:
    if name is None:
        return 0
    if name not in names:
        there = ", ".join(names)
        raise ConfigError(f"server.listen: {what} {name!r}: one of {there} is allowed")
    return names.index(name)


class Op(enum.IntEnum):
    """`enum frame_op`."""

    MESSAGE = lib.FRAME_MESSAGE
    SUBSCRIBE = lib.FRAME_SUBSCRIBE
    UNSUBSCRIBE = lib.FRAME_UNSUBSCRIBE
    PING = lib.FRAME_PING
    CONNECT = lib.FRAME_CONNECT
    NOTHING = lib.FRAME_NOTHING


class Refusal(enum.IntEnum):
    """`enum refusal`: why a frame is refused, or a connection ended with a word."""

    UNKNOWN_OP = lib.REFUSED_UNKNOWN_OP
    PARSER = lib.REFUSED_PARSER
    CONTROL_LINE = lib.REFUSED_CONTROL_LINE
    PAYLOAD = lib.REFUSED_PAYLOAD
    SUBJECT = lib.REFUSED_SUBJECT
    SID = lib.REFUSED_SID
    HEADERS = lib.REFUSED_HEADERS
    PUB_SUBJECT = lib.REFUSED_PUB_SUBJECT
    STALE = lib.REFUSED_STALE
    SUBSCRIPTIONS = lib.REFUSED_SUBSCRIPTIONS
    RATE = lib.REFUSED_RATE
    SLOW = lib.REFUSED_SLOW
    NAME = lib.REFUSED_NAME
    CONNECTIONS = lib.REFUSED_CONNECTIONS
    REPLACED = lib.REFUSED_REPLACED


class Limits(NamedTuple):
    """`struct frame_limits`; the defaults are those of a connection that has said nothing."""

    max_control_line: int = 4096
    max_payload: int = 1048576
    pedantic: bool = True
    headers: bool = False


class Frame(NamedTuple):
    """`struct frame`, field by field: offsets, not copies."""

    op: int
    verb: int
    flags: int
    subject_len: int
    reply_len: int
    queue_len: int
    sid_len: int
    subject: int
    reply: int
    queue: int
    sid: int
    args: int
    args_len: int
    body: int
    header_len: int
    total_len: int
    max_msgs: int
    bytes: int


def parse(data: bytes, limits: Limits, protocol: int = 0) -> tuple[int, Frame | None]:
    """(1, frame), (0, frame), (0, None) while the control line is incomplete, (error, None).

    The bytes are copied into an allocation of exactly their size, so that a sanitizer build
    catches a read past them.
    """
    buf = ffi.new("uint8_t[]", len(data)) if data else ffi.NULL
    if data:
        ffi.memmove(buf, data, len(data))
    c_limits = ffi.new("struct frame_limits *", limits._asdict())
    frame = ffi.new("struct frame *")
    status: int = lib.protocol_parse(protocol, buf, len(data), c_limits, frame)
    if status < 0 or frame.bytes == 0:
        return status, None
    return status, Frame(*(getattr(frame, name) for name in Frame._fields))


def text(refusal: int, protocol: int = 0) -> str:
    """What a client of that protocol is told about it."""
    said = ffi.string(lib.protocol_text(protocol, refusal))
    assert isinstance(said, bytes)
    return said.decode("ascii")


def error(refusal: int, protocol: int = 0) -> bytes:
    """The whole reply with that text, for who refuses a client without a connmgr."""
    said = text(refusal, protocol).encode()
    room = len(said) + lib.PROTOCOL_REPLY_MORE
    buf = ffi.new("uint8_t[]", room)
    length: int = lib.protocol_error(protocol, said, len(said), buf, room)
    return bytes(ffi.buffer(buf, length))


def subject_valid(subject: bytes, wildcards: bool) -> bool:
    """Whether the subject may be subscribed to (wildcards) or published to."""
    buf = ffi.new("uint8_t[]", len(subject)) if subject else ffi.NULL
    if subject:
        ffi.memmove(buf, subject, len(subject))
    return bool(lib.subject_valid(buf, len(subject), int(wildcards)))
