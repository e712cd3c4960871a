"""Frames of the NATS client protocol: the thin Python side of native/codec_nats.c.

The data path parses in C; this is for the control plane (error texts, subject rules) and for
tests. tests/wire/reference.py is the same contract in plain Python.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from native import ffi, lib

SID_MAX: int = lib.NATS_SID_MAX
LINE_SLACK: int = lib.NATS_LINE_SLACK
LINE_MAX: int = lib.NATS_LINE_MAX
FLAG_BAD_SUBJECT: int = lib.NATS_FLAG_BAD_SUBJECT
FLAG_USUAL: int = lib.NATS_FLAG_USUAL


class Op(enum.IntEnum):
    """`enum nats_op`."""

    PUB = lib.NATS_PUB
    HPUB = lib.NATS_HPUB
    SUB = lib.NATS_SUB
    UNSUB = lib.NATS_UNSUB
    PING = lib.NATS_PING
    PONG = lib.NATS_PONG
    CONNECT = lib.NATS_CONNECT
    OK = lib.NATS_OK
    INFO = lib.NATS_INFO


class Error(enum.IntEnum):
    """`enum nats_error`."""

    UNKNOWN_OP = lib.NATS_E_UNKNOWN_OP
    PARSER = lib.NATS_E_PARSER
    CONTROL_LINE = lib.NATS_E_CONTROL_LINE
    PAYLOAD = lib.NATS_E_PAYLOAD
    SUBJECT = lib.NATS_E_SUBJECT
    SID = lib.NATS_E_SID
    HEADERS = lib.NATS_E_HEADERS
    PUB_SUBJECT = lib.NATS_E_PUB_SUBJECT


class Limits(NamedTuple):
    """`struct nats_limits`; the defaults are those of a connection before its CONNECT."""

    max_control_line: int = 4096
    max_payload: int = 1048576
    pedantic: bool = True
    headers: bool = False


class Frame(NamedTuple):
    """`struct nats_frame`, field by field: offsets, not copies."""

    op: int
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


def parse(data: bytes, limits: Limits) -> tuple[int, Frame | None]:
    """(1, frame), (0, frame), (0, None) while the control line is incomplete, (error, None).

    The bytes are copied into an allocation of exactly their size, so that a sanitizer build
    catches a read past them.
    """
    buf = ffi.new("uint8_t[]", len(data)) if data else ffi.NULL
    if data:
        ffi.memmove(buf, data, len(data))
    c_limits = ffi.new("struct nats_limits *", limits._asdict())
    frame = ffi.new("struct nats_frame *")
    status: int = lib.nats_parse(buf, len(data), c_limits, frame)
    if status < 0 or frame.bytes == 0:
        return status, None
    return status, Frame(*(getattr(frame, name) for name in Frame._fields))


def error_text(error: int) -> str:
    """What stands between the quotes of -ERR '...'."""
    text = ffi.string(lib.nats_error_text(error))
    assert isinstance(text, bytes)
    return text.decode("ascii")


def subject_valid(subject: bytes, wildcards: bool) -> bool:
    """Whether the subject may be subscribed to (wildcards) or published to."""
    buf = ffi.new("uint8_t[]", len(subject)) if subject else ffi.NULL
    if subject:
        ffi.memmove(buf, subject, len(subject))
    return bool(lib.nats_subject_valid(buf, len(subject), int(wildcards)))
