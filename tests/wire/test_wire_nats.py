"""The client that drill, bench suite and tests share: what it reads, and what it refuses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midair.client.wire_nats import (
    PING,
    PONG,
    AsyncConnection,
    Connection,
    EndedError,
    Frame,
    FrameError,
    Message,
    Polled,
    Reader,
    RefusedError,
    hpub,
    msg,
    pub,
    sub,
    unsub,
)
from tests.support.server import run
from tests.wire import reference

INFO = b'INFO {"server_id":"x","client_id":7}\r\n'
WORDS = st.sampled_from((b"a", b"a.b", b"x-1!", b"9", b"\xc3\xa4.>"))
HEADS = st.sampled_from((b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\nA: 1\r\n\r\n"))
MESSAGES = st.builds(
    Message, WORDS, WORDS, st.just(b"") | WORDS, HEADS, st.binary(max_size=300) | st.just(b"\r\n")
)
LINES = st.sampled_from((b"PING", b"PONG", b"+OK", b"-ERR 'Parser Error'", b'INFO {"a":1}'))


def bytes_of(frame: Frame) -> bytes:
    return frame.frame if isinstance(frame, Message) else frame + b"\r\n"


@given(
    frames=st.lists(MESSAGES | LINES, max_size=20), sizes=st.lists(st.integers(1, 40), max_size=60)
)
def test_frames_come_whole_however_they_are_cut(frames: list[Frame], sizes: list[int]) -> None:
    data, reader, got = b"".join(map(bytes_of, frames)), Reader(), []
    for size in [*sizes, len(data)]:
        reader.feed(data[:size])
        data = data[size:]
        got += list(reader)
    assert got == frames
    assert not reader.waiting


@given(frames=st.lists(MESSAGES, min_size=1, max_size=5), cut=st.integers(1, 10_000))
def test_half_a_frame_is_none(frames: list[Message], cut: int) -> None:
    data, reader = b"".join(map(bytes_of, frames)), Reader()
    reader.feed(data[: -(cut % len(bytes_of(frames[-1])) or 1)])
    assert list(reader) == frames[:-1]
    assert reader.waiting


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"MSG a 1 05\r\n01234\r\n",
        b"MSG a  1 1\r\nx\r\n",
        b"MSG a 1 1 \r\nx\r\n",
        b"msg a 1 1\r\nx\r\n",
        b"MSG a 1 1\r\nxy\r\n",
        b"MSG a 1 1\r\nx\n\n",
        b"MSG a 1 -1\r\nx\r\n",
        b"MSG a 1\r\n\r\n",
        b"MSG a 1 r s 0\r\n\r\n",
        b"HMSG a 1 0 2\r\nhi\r\n",
        b"HMSG a 1 9 5\r\n01234\r\n",
        b"PING \r\n",
        b"PONGPONG\r\n",
        b"+OKAY\r\n",
        b"-ERR\r\n",
        b"INFO x\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    reader = Reader()
    reader.feed(PING + data)
    assert reader.next() == b"PING"
    with pytest.raises(FrameError):
        reader.next()


def test_a_line_may_be_as_long_as_the_reader_says() -> None:
    reader = Reader(line_bytes_max=20)
    reader.feed(b"-ERR '34567890123'\r")
    assert reader.next() is None
    reader.feed(b"x")
    with pytest.raises(FrameError, match="no end of line"):
        reader.next()


def test_bytes_can_be_taken_as_they_are() -> None:
    reader = Reader()
    reader.feed(msg(b"a", b"1", b"0123456789")[:-4])
    assert reader.next() is None
    assert reader.take(100) is None
    assert reader.take(4) == b"MSG "
    rest = b"a 1 10\r\n01234567"
    assert reader.take(reader.waiting) == rest
    reader.feed(PONG)
    assert list(reader) == [b"PONG"]


@given(subject=st.sampled_from((b"a", b"a.b")), body=st.binary(max_size=50), reply=st.booleans())
def test_what_a_client_says_is_what_servers_read(subject: bytes, body: bytes, reply: bool) -> None:
    """tests/wire/reference.py is a parser of what clients send."""
    back = b"r.x" if reply else b""
    head = b"NATS/1.0\r\nA: 1\r\n\r\n"
    said = [
        pub(subject, body, back),
        hpub(subject, head, body, back),
        sub(subject, b"s1"),
        sub(subject, b"s1", b"q"),
        unsub(b"s1"),
        unsub(b"s1", 5),
    ]
    operations = (b"PUB", b"HPUB", b"SUB", b"SUB", b"UNSUB", b"UNSUB")
    for data, name in zip(said, operations, strict=True):
        done, frame = reference.parse(data + PING, reference.Limits(headers=True))
        assert done == 1
        assert frame is not None
        assert (frame.op, frame.bytes) == (reference.OPERATIONS[name][0], len(data))
        assert frame.header_len == (len(head) if name == b"HPUB" else 0)


# ---- over sockets --------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Callable[[bytes, bool], int]]:
    """Says what it is told to one client, and hangs up, or waits for the test to end."""
    over, threads, listeners = threading.Event(), [], []

    def serve(listener: socket.socket, says: bytes, hangs_up: bool) -> None:
        with listener.accept()[0] as client:
            client.sendall(says)
            if not hangs_up:
                over.wait(30)

    def make(says: bytes, hangs_up: bool = True) -> int:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        arguments = (listeners[-1], says, hangs_up)
        threads.append(threading.Thread(target=serve, args=arguments, daemon=True))
        threads[-1].start()
        return int(listeners[-1].getsockname()[1])

    yield make
    over.set()
    for thread in threads:
        thread.join(30)
    for listener in listeners:
        listener.close()


Serve = Callable[..., int]


def test_a_connection_notes_what_is_said_between_messages(server: Serve) -> None:
    says = INFO + b"PING\r\n+OK\r\n-ERR 'x y'\r\n" + msg(b"a", b"1", b"hi") + PONG
    with Connection("127.0.0.1", server(says, False)) as it:
        assert it.info["client_id"] == 7
        assert it.sync() == [Message(b"a", b"1", b"", b"", b"hi")]
        assert (it.pongs, it.oks, it.errors) == (1, 1, [b"-ERR 'x y'"])


def test_the_end_of_a_connection_is_an_error(server: Serve) -> None:
    with Connection("127.0.0.1", server(INFO + b"MSG a 1 5\r\n012"), b"") as it:
        with pytest.raises(EndedError):
            it.frame()
        assert it.reader.waiting
    with pytest.raises(EndedError):
        Connection("127.0.0.1", server(b""))
    with pytest.raises(RefusedError, match="maximum"):
        Connection("127.0.0.1", server(b"-ERR 'maximum connections exceeded'\r\n"))


def test_a_polled_connection_waits_for_nothing(server: Serve) -> None:
    """But for the answer to its hello: then what comes behind that is still there."""
    says = INFO + PONG + msg(b"a", b"1", b"hi")
    with Polled("127.0.0.1", server(says, False), synced=True) as it:
        while not (got := list(it.reader)):
            it.receive()
        assert got == [Message(b"a", b"1", b"", b"", b"hi")]
        it.receive()  # nothing is there: returns
        block = pub(b"a", bytes(1 << 20))
        it.send(block)
        for _ in range(20):
            it.send(block)
        assert it.out_bytes == sum(map(len, it.out)) > 0


def test_over_asyncio(server: Serve) -> None:
    says = INFO + b"PING\r\n" + msg(b"a", b"1", b"hi") + PONG + msg(b"b", b"1")

    async def test() -> None:
        it = await AsyncConnection.open("127.0.0.1", server(says, False))
        assert it.info["client_id"] == 7
        assert [message.subject for message in await it.sync()] == [b"a"]
        assert (await it.next()).subject == b"b"
        await it.close()
        it = await AsyncConnection.open("127.0.0.1", server(INFO), b"")
        with pytest.raises(EndedError):
            await it.next()
        await it.close()
        with pytest.raises(RefusedError):
            await AsyncConnection.open("127.0.0.1", server(b"-ERR 'no'\r\n"))

    run(test())
