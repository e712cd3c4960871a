"""The NATS client protocol, client to server, as an executable specification.

Plain Python with the contract of `nats_parse()` in native/src/protocol/nats/, written for reading:
a frame is cut at its line end, its arguments are split, then counted and checked. The tests
hold the C parser to it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Operation -> (number, whether a blank must follow the name).
OPERATIONS = {
    b"PUB": (1, True),
    b"HPUB": (2, True),
    b"SUB": (3, True),
    b"UNSUB": (4, True),
    b"PING": (5, False),
    b"PONG": (6, False),
    b"CONNECT": (7, False),
    b"+OK": (8, False),
    b"INFO": (9, False),
}
VERBS = {number: name.decode().strip("+") for name, (number, _) in OPERATIONS.items()}
UNKNOWN_OP, PARSER, CONTROL_LINE, PAYLOAD, SUBJECT, SID, HEADERS, PUB_SUBJECT = range(-1, -9, -1)
TEXTS = {
    UNKNOWN_OP: "Unknown Protocol Operation",
    PARSER: "Parser Error",
    CONTROL_LINE: "maximum control line exceeded",
    PAYLOAD: "Maximum Payload Violation",
    SUBJECT: "Invalid Subject",
    SID: "Invalid Subscription Identifier",
    HEADERS: "message headers not supported",
    PUB_SUBJECT: "Invalid Publish Subject",
}
BAD_SUBJECT = 1
LINE_SLACK = 10
LINE_MAX = 6016


class Limits(NamedTuple):
    max_control_line: int = 4096
    max_payload: int = 1048576
    pedantic: bool = True
    headers: bool = False


class Frame(NamedTuple):
    op: int = 0
    flags: int = 0
    subject_len: int = 0
    reply_len: int = 0
    queue_len: int = 0
    sid_len: int = 0
    subject: int = 0
    reply: int = 0
    queue: int = 0
    sid: int = 0
    args: int = 0
    args_len: int = 0
    body: int = 0
    header_len: int = 0
    total_len: int = 0
    max_msgs: int = 0
    bytes: int = 0


class Refused(Exception):
    """The connection cannot continue; `error` says why."""

    def __init__(self, error: int) -> None:
        super().__init__(TEXTS[error])
        self.error = error


def parse(data: bytes, limits: Limits) -> tuple[int, Frame | None]:
    """(1, frame), (0, frame without its body), (0, None: no whole line yet), (error, None)."""
    try:
        name = operation_of(data)
        line_end = end_of_line(data, limits) if name else 0
        if not line_end:
            return 0, None
        frame = frame_of(name, data[:line_end], limits)
    except Refused as refused:
        return refused.error, None
    if not frame.body:
        return 1, frame
    after_body = data[frame.body + frame.total_len : frame.bytes]
    if not b"\r\n".startswith(after_body):
        return UNKNOWN_OP, None
    return (1 if len(data) >= frame.bytes else 0), frame


def operation_of(data: bytes) -> bytes:
    """The operation's name, or b"" while it is not all there."""
    upper = data[:8].upper()
    for name, (_, needs_blank) in OPERATIONS.items():
        if upper.startswith(name):
            following = data[len(name) : len(name) + 1]
            if needs_blank and following not in (b"", b" ", b"\t"):
                raise Refused(UNKNOWN_OP)
            return name
        if name.startswith(upper):
            return b""
    raise Refused(UNKNOWN_OP)


def end_of_line(data: bytes, limits: Limits) -> int:
    """The length of the control line with its LF, or 0 while it is not all there."""
    line_max = min(limits.max_control_line + LINE_SLACK, LINE_MAX)
    end = data.find(b"\n", 0, line_max) + 1
    if not end and len(data) >= line_max:
        raise Refused(CONTROL_LINE)
    return end


def frame_of(name: bytes, line: bytes, limits: Limits) -> Frame:
    """The frame that this control line announces; `line` ends with LF, perhaps with CRLF."""
    frame = Frame(op=OPERATIONS[name][0], bytes=len(line))
    text = line[:-2] if line.endswith(b"\r\n") else line[:-1]
    if name in (b"PING", b"PONG", b"+OK"):
        return frame
    if name in (b"CONNECT", b"INFO"):
        args_len = len(text[len(name) :].lstrip(b" \t"))
        return frame._replace(args=len(text) - args_len, args_len=args_len)
    words = [(m.start(), m.group()) for m in re.finditer(rb"[^ \t]+", text) if m.start() > 0]
    if any(b"\r" in word for _, word in words) or len(words) > 4:
        raise Refused(PARSER)
    if name == b"SUB":
        return subscription(frame, words)
    if name == b"UNSUB":
        return unsubscription(frame, words)
    return publication(frame, words, limits)


def publication(frame: Frame, words: list[tuple[int, bytes]], limits: Limits) -> Frame:
    """PUB subject [reply] size; HPUB subject [reply] header-size total-size."""
    sizes = 1
    if frame.op == OPERATIONS[b"HPUB"][0]:
        sizes = 2
        if not limits.headers:
            raise Refused(HEADERS)
    if len(words) not in (1 + sizes, 2 + sizes):
        raise Refused(PARSER)
    if any(not re.fullmatch(rb"[0-9]{1,9}", word) for _, word in words[-sizes:]):
        raise Refused(PARSER)
    total = int(words[-1][1])
    header = int(words[-2][1]) if sizes == 2 else 0
    if header > total:
        raise Refused(PARSER)
    if total > limits.max_payload:
        raise Refused(PAYLOAD)
    at, subject = words[0]
    frame = frame._replace(subject=at, subject_len=len(subject))
    if limits.pedantic and not subject_valid(subject, wildcards=False):
        frame = frame._replace(flags=BAD_SUBJECT)
    if len(words) == 2 + sizes:
        frame = frame._replace(reply=words[1][0], reply_len=len(words[1][1]))
    body = frame.bytes
    return frame._replace(body=body, header_len=header, total_len=total, bytes=body + total + 2)


def subscription(frame: Frame, words: list[tuple[int, bytes]]) -> Frame:
    """SUB subject [queue] sid."""
    if len(words) not in (2, 3):
        raise Refused(PARSER)
    at, subject = words[0]
    frame = frame._replace(subject=at, subject_len=len(subject))
    if not subject_valid(subject, wildcards=True):
        frame = frame._replace(flags=BAD_SUBJECT)
    if len(words) == 3:
        frame = frame._replace(queue=words[1][0], queue_len=len(words[1][1]))
    return with_sid(frame, words[-1])


def unsubscription(frame: Frame, words: list[tuple[int, bytes]]) -> Frame:
    """UNSUB sid [max]; a max that is not a number means now, which is 0."""
    if len(words) not in (1, 2):
        raise Refused(PARSER)
    if len(words) == 2 and re.fullmatch(rb"[0-9]{1,18}", words[1][1]):
        frame = frame._replace(max_msgs=int(words[1][1]))
    return with_sid(frame, words[0])


def with_sid(frame: Frame, word: tuple[int, bytes]) -> Frame:
    at, sid = word
    return frame._replace(sid=at, sid_len=len(sid))


def subject_valid(subject: bytes, wildcards: bool) -> bool:
    """No empty token, no blanks; `*` and `>` (last) as whole tokens only with wildcards."""
    tokens = subject.split(b".")
    if re.search(rb"[ \t\r\n]", subject) or b"" in tokens:
        return False
    if not wildcards:
        return b"*" not in tokens and b">" not in tokens
    return b">" not in tokens[:-1]
