"""What clients have received, taken apart."""

from __future__ import annotations

from midair.client.wire_nats import Message, Reader


def messages(data: bytes) -> list[Message]:
    """The messages of a whole stream, in which nothing else comes but PONG."""
    reader = Reader()
    reader.feed(data)
    frames = list(reader)
    assert not reader.waiting, data[-80:]
    found = [frame for frame in frames if isinstance(frame, Message)]
    assert {frame for frame in frames if isinstance(frame, bytes)} <= {b"PONG"}
    return found
