"""Raw-socket conversations with a NATS server: what is sent, what must come back.

A conversation is sent as it stands and its answers are read back as two sequences, control
lines (INFO aside) and messages. They are compared separately: a server may answer a PING
before it has delivered what was published earlier. Where Midair's answer differs from
nats-server's on purpose (docs/protocol-nats.md), `nats_server` holds the other answer, so
that the same table can be run against both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from midair.client import wire_nats
from midair.client.wire_nats import Message
from tests.support.natsserver import without_subject

PATIENCE_S = 20
QUIET = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
PEDANTIC = b'CONNECT {"verbose":false,"pedantic":true,"headers":true}\r\n'
VERBOSE = b'CONNECT {"verbose":true,"pedantic":false,"headers":true}\r\n'
NO_HEADERS = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
NO_ECHO = b'CONNECT {"verbose":false,"pedantic":false,"echo":false}\r\n'
SILENT = b'CONNECT {"verbose":false}\r\n'

PARSER_ERROR = b"-ERR 'Parser Error'"
UNKNOWN = b"-ERR 'Unknown Protocol Operation'"
PAYLOAD = b"-ERR 'Maximum Payload Violation'"
CONTROL_LINE = b"-ERR 'maximum control line exceeded'"
SUBJECT = b"-ERR 'Invalid Subject'"
PUB_SUBJECT = b"-ERR 'Invalid Publish Subject'"


class Wire(wire_nats.Connection):
    """One connection past its INFO. What comes is kept in two lists: lines, and messages."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port, b"", timeout_s=PATIENCE_S)
        self.control: list[bytes] = []
        self.messages: list[bytes] = []
        self.closed = False

    @property
    def is_nats_server(self) -> bool:
        """nats-server says which Go built it."""
        return "go" in self.info

    def say(self, data: bytes, piece: int = 0) -> None:
        """Sends data, whole or in pieces of that many bytes."""
        try:
            for at in range(0, len(data), piece or len(data) or 1):
                self.send(data[at : at + (piece or len(data))])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has closed; what it said is still to be read

    def read_one(self) -> None:
        """One line or one message; sets `closed` at the end of the stream."""
        try:
            frame = self.frame()
        except wire_nats.EndedError:
            assert not self.reader.waiting
            self.closed = True
            return
        if isinstance(frame, Message):
            self.messages.append(frame.line + b"|" + frame.headers + frame.body)
        elif frame == b"PING":
            self.say(wire_nats.PONG)
        elif not frame.startswith(b"INFO "):
            self.control.append(frame)
        else:
            self.note(frame)

    def read_until(self, control: int, messages: int) -> None:
        """Reads until that many of each were seen, or the stream ended."""
        while not self.closed and (len(self.control) < control or len(self.messages) < messages):
            self.read_one()

    def read_to_end(self) -> None:
        while not self.closed:
            self.read_one()


@dataclass(frozen=True)
class Conversation:
    name: str
    send: bytes
    control: list[bytes] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    closes: bool = False
    connect: bytes = QUIET
    nats_server: list[bytes] | None = None  # its control lines, where they differ


def hold(host: str, port: int, conversation: Conversation, piece: int = 0) -> None:
    """Holds the conversation and asserts its outcome.

    One that stays open is followed by a PING and by a message to itself, so that an answer too
    many is seen, too.
    """
    with Wire(host, port) as wire:
        control = list(conversation.control)
        if wire.is_nats_server and conversation.nats_server is not None:
            control = list(conversation.nats_server)
        if wire.is_nats_server and PUB_SUBJECT in control:
            piece = 0  # it says this once more when line and body arrive apart
        wire.say(conversation.connect + conversation.send, piece)
        if conversation.closes:
            wire.read_to_end()
            assert wire.closed
        else:
            wire.read_until(len(control), len(conversation.messages))
            if conversation.connect != QUIET:
                wire.say(b'CONNECT {"verbose":false,"pedantic":false,"echo":true}\r\n')
            wire.say(b"SUB conformance.end end\r\nPUB conformance.end 0\r\n\r\nPING\r\n")
            wire.read_until(len(control) + 1, len(conversation.messages) + 1)
            assert not wire.closed, (wire.control, wire.messages)
            assert wire.control.pop() == b"PONG"
            assert wire.messages.pop() == b"MSG conformance.end end 0|"
        assert wire.control == control
        assert [without_subject(it) for it in wire.messages] == conversation.messages


def talk(name: str, send: bytes, *messages: bytes, **rest: Any) -> Conversation:
    """Stays open and delivers these messages."""
    return Conversation(name, send, messages=list(messages), **rest)


def refused(name: str, send: bytes, error: bytes, silent: bool = False) -> Conversation:
    """Ends with this error and a closed connection; silent: nats-server says nothing."""
    return Conversation(name, send, [error], closes=True, nats_server=[] if silent else None)


SUB = b"SUB t.> 1\r\n"
PUB = b"PUB t.a 2\r\nhi\r\n"
MSG = b"MSG t.a 1 2|hi"
NATS = b"NATS/1.0\r\n\r\n"

ACCEPTED = [
    talk("publish", SUB + PUB, MSG),
    talk("reply", SUB + b"PUB t.a r.x 2\r\nhi\r\n", b"MSG t.a 1 r.x 2|hi"),
    talk("empty-body", SUB + b"PUB t.a 0\r\n\r\n", b"MSG t.a 1 0|"),
    talk("body-of-line-ends", SUB + b"PUB t.a 4\r\n\r\n\r\n\r\n", b"MSG t.a 1 4|\r\n\r\n"),
    talk("lower-case", b"sub t.> 1\r\npub t.a 2\r\nhi\r\n", MSG),
    talk("line-feed-only", b"SUB t.> 1\nPUB t.a 2\nhi\r\n", MSG),
    talk("blanks", b"SUB \t t.>  \t 1 \r\nPUB \t t.a \t 2 \t\r\nhi\r\n", MSG),
    talk("two-subscriptions", SUB + b"SUB t.a 2\r\nUNSUB 1\r\n" + PUB, b"MSG t.a 2 2|hi"),
    talk("literal-star", SUB + b"PUB t.* 1\r\nx\r\n", b"MSG t.* 1 1|x"),
    talk("star-inside-token", b"SUB t.a* 1\r\nPUB t.ab 1\r\nx\r\nPUB t.a* 1\r\ny\r\n",
         b"MSG t.a* 1 1|y"),
    talk("empty-token-goes-nowhere", SUB + b"SUB t..a 2\r\nPUB t..a 1\r\nx\r\n" + PUB, MSG,
         control=[SUBJECT]),
    talk("sid-is-any-word", b"SUB t.a x-1!\r\n" + PUB, b"MSG t.a x-1! 2|hi"),
    talk("same-sid-twice", b"SUB t.a 1\r\nSUB t.a 1\r\nSUB t.b 1\r\nPUB t.b 0\r\n\r\n" + PUB, MSG),
    talk("queue", b"SUB t.a q 1\r\nSUB t.a q 1\r\n" + PUB, MSG),
    talk("unsub", SUB + b"UNSUB 1\r\n" + PUB),
    talk("unsub-unknown", b"UNSUB 77\r\n"),
    talk("unsub-after-one", SUB + b"UNSUB 1 1\r\n" + PUB + PUB, MSG),
    talk("unsub-after-more", SUB + b"UNSUB 1 1\r\nUNSUB 1 3\r\n" + PUB * 5, MSG, MSG, MSG),
    talk("unsub-max-zero", SUB + b"UNSUB 1 0\r\n" + PUB),
    talk("unsub-max-not-a-number", SUB + b"UNSUB 1 x\r\n" + PUB),
    talk("headers", SUB + b"HPUB t.a 12 14\r\n" + NATS + b"hi\r\n",
         b"HMSG t.a 1 12 14|" + NATS + b"hi"),
    talk("headers-and-reply", SUB + b"HPUB t.a r 12 12\r\n" + NATS + b"\r\n",
         b"HMSG t.a 1 r 12 12|" + NATS),
    talk("headers-of-no-bytes", SUB + b"HPUB t.a 0 2\r\nhi\r\n", MSG),
    talk("headers-of-no-bytes-often", SUB + b"HPUB t.a 0 2\r\nhi\r\n" * 3, MSG, MSG, MSG),
    # Not t.*: the router may not know yet that the client before has gone.
    talk("no-responders", b"SUB r.* 9\r\nPUB nobody.here r.1 2\r\nhi\r\n",
         b"HMSG r.1 9 16 16|NATS/1.0 503\r\n\r\n"),
    talk("echo-off", SUB + PUB, connect=NO_ECHO),
    talk("ping", b"PING\r\nping\nPING with words\r\n", control=[b"PONG"] * 3),
    talk("pong-and-ok-are-ignored", b"PONG\r\n+OK\r\n+ok\r\nINFO {}\r\n"),
    talk("invalid-subject-stays-open", b"SUB t..a 1\r\nSUB t. 2\r\nSUB >.t 3\r\n" + SUB + PUB, MSG,
         control=[SUBJECT] * 3),
    talk("pedantic-publish", SUB + b"PUB t.* 1\r\nx\r\nPUB t..a 1\r\ny\r\n", b"MSG t.* 1 1|x",
         connect=PEDANTIC, control=[PUB_SUBJECT] * 2),
    talk("pedantic-is-the-default", b"SUB t.> 1\r\nPUB t.* 0\r\n\r\n", b"MSG t.* 1 0|",
         connect=SILENT, control=[PUB_SUBJECT]),
    talk("verbose",
         SUB + PUB + b"HPUB t.a 12 12\r\n" + NATS + b"\r\nPONG\r\nUNSUB 1\r\nUNSUB 7\r\n", MSG,
         b"HMSG t.a 1 12 12|" + NATS, connect=VERBOSE, control=[b"+OK"] * 6),
    talk("verbose-ping", b"PING\r\n", connect=VERBOSE, control=[b"+OK", b"PONG"]),
    talk("verbose-invalid-subject", b"SUB t..a 1\r\n", connect=VERBOSE, control=[b"+OK", SUBJECT]),
    talk("verbose-is-the-default", SUB, connect=b"CONNECT {}\r\n", control=[b"+OK"] * 2),
    talk("no-connect-at-all", b"PING\r\n" + SUB + PUB, MSG, connect=b"",
         control=[b"PONG", b"+OK", b"+OK"]),
    talk("connect-twice", b'CONNECT {"verbose":true}\r\nPONG\r\n' + SUB, control=[b"+OK"] * 2,
         connect=SILENT),
    talk("connect-unknown-option", b"PING\r\n", connect=b'CONNECT {"verbose":false,"new":[1]}\r\n',
         control=[b"PONG"]),
    talk("connect-credentials-are-ignored", b"PING\r\n", control=[b"PONG"],
         connect=b'CONNECT {"verbose":false,"user":"u","pass":"p","auth_token":"t"}\r\n'),
]  # fmt: skip

REFUSED = [
    refused("unknown-op", b"FOO\r\n", UNKNOWN),
    refused("unknown-op-tail", b"PUBX t.a 2\r\nhi\r\n", UNKNOWN),
    refused("empty-line", b"\r\n", UNKNOWN),
    refused("msg-from-a-client", b"MSG t.a 1 2\r\nhi\r\n", UNKNOWN),
    refused("pub-without-blank", b"PUB\r\n", UNKNOWN),
    refused("pub-body-too-long", b"PUB t.a 2\r\nhix\r\n", UNKNOWN),
    refused("pub-body-too-short", b"PUB t.a 5\r\nhi\r\nPING\r\n", UNKNOWN),
    refused("pub-body-line-feed-only", b"PUB t.a 2\r\nhi\nPING\r\n", UNKNOWN),
    refused("pub-no-arguments", b"PUB \r\n", PARSER_ERROR, silent=True),
    refused("pub-one-argument", b"PUB t.a\r\n", PARSER_ERROR, silent=True),
    refused("pub-four-arguments", b"PUB t.a b c 2\r\n", PARSER_ERROR, silent=True),
    refused("pub-size-word", b"PUB t.a x\r\n", PARSER_ERROR, silent=True),
    refused("pub-size-negative", b"PUB t.a -1\r\n", PARSER_ERROR, silent=True),
    refused("pub-size-enormous", b"PUB t.a 99999999999999999999\r\n", PARSER_ERROR, silent=True),
    refused("pub-size-over-maximum", b"PUB t.a 999999999\r\n", PAYLOAD),
    refused("hpub-size-over-maximum", b"HPUB t.a 12 999999999\r\n", PAYLOAD),
    refused("hpub-header-longer-than-all", b"HPUB t.a 12 4\r\n", PARSER_ERROR, silent=True),
    refused("sub-no-arguments", b"SUB \r\n", PARSER_ERROR, silent=True),
    refused("sub-one-argument", b"SUB t.a\r\n", PARSER_ERROR, silent=True),
    refused("sub-four-arguments", b"SUB t.a b c 1\r\n", PARSER_ERROR, silent=True),
    refused("unsub-no-arguments", b"UNSUB \r\n", PARSER_ERROR, silent=True),
    refused("unsub-three-arguments", b"UNSUB 1 1 1\r\n", PARSER_ERROR, silent=True),
    refused("line-too-long", b"PUB t." + b"a" * 5000 + b" 2\r\n", CONTROL_LINE),
    refused("connect-broken-json", b"CONNECT {x\r\n", PARSER_ERROR, silent=True),
    refused("connect-without-json", b"CONNECT\r\n", PARSER_ERROR, silent=True),
    refused("connect-json-array", b"CONNECT []\r\n", PARSER_ERROR, silent=True),
    refused("connect-wrong-type", b'CONNECT {"verbose":5}\r\n', PARSER_ERROR, silent=True),
    refused("connect-protocol-2", b'CONNECT {"protocol":2}\r\n', b"-ERR 'invalid client protocol'"),
    refused("connect-no-responders-without-headers",
            b'CONNECT {"no_responders":true,"headers":false}\r\n',
            b"-ERR 'no responders requires headers support'"),
    Conversation("hpub-without-headers-agreed", b"HPUB t.a 12 14\r\n" + NATS + b"hi\r\n",
                 [b"-ERR 'message headers not supported'"], closes=True, connect=NO_HEADERS,
                 nats_server=[]),
    Conversation("good-then-bad", SUB + PUB + b"NONSENSE\r\n", [UNKNOWN], closes=True),
]  # fmt: skip


def check_bad_input(host: str, port: int, conversation: Conversation) -> None:
    """The offender is told and closed; a connection beside it loses nothing."""
    with Wire(host, port) as bystander, Wire(host, port) as other:
        bystander.say(QUIET + b"SUB beside.* 1\r\nPING\r\n")
        bystander.read_until(1, 0)
        other.say(QUIET + b"PUB beside.a 6\r\nbefore\r\n")
        with Wire(host, port) as offender:
            expected = list(conversation.control)
            if offender.is_nats_server and conversation.nats_server is not None:
                expected = list(conversation.nats_server)
            offender.say(conversation.connect + conversation.send)
            offender.read_to_end()
            assert offender.control == expected
        other.say(b"PUB beside.b 5\r\nafter\r\n")
        bystander.say(b"PING\r\n")
        bystander.read_until(2, 2)
        assert not bystander.closed
        assert bystander.control == [b"PONG", b"PONG"]
        assert bystander.messages == [b"MSG beside.a 1 6|before", b"MSG beside.b 1 5|after"]


def check_dead_client_is_forgotten(host: str, port: int) -> None:
    """A queue member that went away without a word gets no more messages."""
    with Wire(host, port) as member, Wire(host, port) as gone, Wire(host, port) as sender:
        for wire in (member, gone):
            wire.say(QUIET + b"SUB work.* q 1\r\nPING\r\n")
            wire.read_until(1, 0)
        gone.say(b"QUIT\r\n")
        gone.read_to_end()
        sender.say(QUIET + b"".join(b"PUB work.%d 0\r\n\r\n" % i for i in range(50)))
        member.read_until(1, 50)
        assert member.messages == [b"MSG work.%d 1 0|" % i for i in range(50)]
