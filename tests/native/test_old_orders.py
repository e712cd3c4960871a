"""Orders as a router of release 0.1 wrote them: found in a queue after an upgrade, and understood.

Method: the connmgr of a rig is given a batch made by hand, in place of the router's next one.
"""

from __future__ import annotations

import socket
import struct
import time

import posix_ipc

from bench.rig import Rig
from midair import names

HEAD = struct.Struct("<QIHBBQQ")  # struct batch
ROUTER, VERSION = 255, 4
INFO, TEXT = 4, 11  # enum order_type of that release
STATUS = b"NATS/1.0 410 Responder Gone\r\nMidair-Client: 7\r\n\r\n"


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def order(kind: int, count: int, one: int, handle: int, rest: bytes) -> bytes:
    return struct.pack("<BBHIQ", kind, 0, count, one, handle) + rest


def give(rig: Rig, *orders: bytes) -> None:
    """The batch after the last one the connmgr has finished; it has done all since it started."""
    records = b"".join(orders)
    done = rig.connmgr.stats()["order_batches"]
    head = HEAD.pack(done + 1, HEAD.size + len(records), 0, ROUTER, VERSION, 1, 1)
    queue = posix_ipc.MessageQueue(rig.runtime.queue(names.ORDERS, 0))
    queue.send(head + records)
    queue.close()
    rig.turn_connmgr()
    assert rig.connmgr.stats()["order_batches"] == done + 1


def test_a_status_whose_headers_the_router_wrote() -> None:
    with Rig() as rig:
        client = rig.open(b"SUB answers 1")
        rig.drain()
        slot, subject, body = 0, b"answers", b"body"  # the first subscription there is
        lengths = struct.pack("<HHHH", len(subject), 0, len(STATUS), len(body))
        text = lengths + subject + STATUS + body
        give(rig, order(TEXT, 1, len(text), 0, pad(struct.pack("<I", slot)) + pad(text)))
        sizes = b"%d %d" % (len(STATUS), len(STATUS) + len(body))
        assert rig.peek(client) == b"HMSG answers 1 %b\r\n%b%b\r\n" % (sizes, STATUS, body)


def test_a_greeting_that_came_with_the_order_is_not_looked_at() -> None:
    """The connmgr says its own, which in a rig is nothing, and the client is served."""
    with Rig() as rig:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, address = listener.accept()
        server.setblocking(False)
        slot, uid = rig._table.assign(0, 0, address[0], address[1], time.time_ns()) or (0, 0)
        rig.connmgr.adopt(slot, uid, server.detach())
        text = b'INFO {"server_id":"old"} \r\n'
        give(rig, order(INFO, len(text), slot, uid, pad(text)))
        assert rig.peek(client) == b""
        client.sendall(b"NOT A COMMAND\r\n")
        deadline = time.monotonic() + 20
        while not (got := rig.peek(client)) and time.monotonic() < deadline:
            rig._left.add(uid)
            rig.turn_connmgr()
        assert got == b"-ERR 'Unknown Protocol Operation'\r\n"
        client.close()
