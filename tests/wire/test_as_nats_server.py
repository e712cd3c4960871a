"""What other people's clients rely on: the same answers from Midair and from a real nats-server.

Method: every conversation is held with instances of one and of two connection managers, with and
without flows, and with nats-server itself, which shows that the test asks for what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from midair.version import NATS_LEVEL, __version__
from tests.support.instance import Instance, elsewhere, start
from tests.support.natsserver import nats_server
from tests.wire import conformance
from tests.wire.conformance import QUIET, Wire, talk

ASKED = "[latency]\nflow_leases = false\n"
SERVERS = ("1 connmgr", "1 connmgr, the router asked", "2 connmgrs", "nats-server")
UUID = b"6fa459ea-ee8a-3ca4-894e-db77e160355e"
STATUS = b"HMSG t.r 1 16 16|NATS/1.0 503\r\n\r\n"
NOBODY = b"PUB nobody.here t.r 2\r\nhi\r\n"


@pytest.fixture(scope="module", params=SERVERS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Instance]:
    with ExitStack() as stack:
        if given := elsewhere():
            yield given
        elif request.param == "nats-server":
            yield stack.enter_context(nats_server(tmp_path_factory.mktemp("ports")))[0]
        else:
            config = ASKED if "asked" in request.param else ""
            made = start(request.node.nodeid, config, "--connmgrs", request.param[0])
            stack.callback(made.stop)
            yield made


def sids(*lengths: int) -> list[bytes]:
    return [(b"%d." % length + b"s" * length)[:length] for length in lengths]


LONG = sids(27, 28, 32, 33, 36, 64, 65, 160, 161, 1000, 4000)
TALKS = [
    talk("a-uuid", b"SUB t.a %b\r\nPUB t.a 2\r\nhi\r\n" % UUID, b"MSG t.a %b 2|hi" % UUID),
    talk(
        "sids-of-all-lengths",
        b"".join(b"SUB t.%d %b\r\n" % (at, sid) for at, sid in enumerate(LONG))
        + b"".join(b"PUB t.%d r 3\r\nabc\r\n" % at for at in range(len(LONG))),
        *(b"MSG t.%d %b r 3|abc" % (at, sid) for at, sid in enumerate(LONG)),
    ),
    talk(  # many in a row go as one run; those with long sids are written one by one
        "a-run-to-a-long-sid",
        b"SUB t.run %b\r\nSUB t.run 2\r\nUNSUB 2\r\n" % LONG[-1]
        + b"".join(b"PUB t.run 4\r\n%04d\r\n" % n for n in range(500)),
        *(b"MSG t.run %b 4|%04d" % (LONG[-1], n) for n in range(500)),
    ),
    talk(
        "long-sids-that-differ-at-the-end",
        b"SUB t.a %b1\r\nSUB t.b %b2\r\nUNSUB %b1\r\n" % (LONG[-1], LONG[-1], LONG[-1])
        + b"PUB t.a 1\r\na\r\nPUB t.b 1\r\nb\r\n",
        b"MSG t.b %b2 1|b" % LONG[-1],
    ),
    talk(
        "a-long-sid-with-headers",
        b"SUB t.h %b\r\nHPUB t.h 12 14\r\nNATS/1.0\r\n\r\nhi\r\n" % LONG[-2],
        b"HMSG t.h %b 12 14|NATS/1.0\r\n\r\nhi" % LONG[-2],
    ),
    talk(
        "a-503-does-not-count",
        b"SUB t.r 1\r\nUNSUB 1 1\r\n%bPUB t.r 1\r\na\r\nPUB t.r 1\r\nb\r\n" % (NOBODY * 3) + NOBODY,
        STATUS,
        STATUS,
        STATUS,
        b"MSG t.r 1 1|a",
    ),
    talk("no-503-for-a-queue-group", b"SUB t.r q 1\r\n" + NOBODY),
    talk("a-503-beside-a-queue-group", b"SUB t.r q 2\r\nSUB t.r 1\r\n" + NOBODY, STATUS),
    talk(
        "a-sid-again-after-its-maximum",
        b"SUB t.a 1\r\nUNSUB 1 1\r\nPUB t.a 1\r\n1\r\n"
        b"SUB t.a 1\r\nPUB t.a 1\r\n2\r\nPUB t.a 1\r\n3\r\n",
        b"MSG t.a 1 1|1",
        b"MSG t.a 1 1|2",
        b"MSG t.a 1 1|3",
    ),
    talk(
        "again-and-again",
        b"SUB t.a 1\r\nUNSUB 1 2\r\nPUB t.a 1\r\n1\r\nPUB t.a 1\r\n2\r\n" * 20,
        *(b"MSG t.a 1 1|1", b"MSG t.a 1 1|2") * 20,
    ),
    talk(
        "a-sid-again-before-its-maximum",
        b"SUB t.a 1\r\nUNSUB 1 2\r\nPUB t.a 1\r\n1\r\nSUB t.b 1\r\nPUB t.b 1\r\nx\r\n"
        b"PUB t.a 1\r\n2\r\nPUB t.a 1\r\n3\r\n",
        b"MSG t.a 1 1|1",
        b"MSG t.a 1 1|2",
    ),
    talk(
        "a-maximum-that-was-had-before",
        b"SUB t.a 1\r\nPUB t.a 1\r\n1\r\nUNSUB 1 1\r\n"
        b"SUB t.b 1\r\nPUB t.a 1\r\n2\r\nPUB t.b 1\r\n3\r\n",
        b"MSG t.a 1 1|1",
        b"MSG t.b 1 1|3",
    ),
    talk(
        "a-member-again-after-its-maximum",
        b"SUB t.a q 1\r\nUNSUB 1 1\r\nPUB t.a 1\r\n1\r\nSUB t.a q 1\r\nPUB t.a 1\r\n2\r\n",
        b"MSG t.a 1 1|1",
        b"MSG t.a 1 1|2",
    ),
    talk(
        "keys-of-connect-in-any-case",
        b"SUB t.r 1\r\n" + NOBODY,
        STATUS,
        connect=b'CONNECT {"VERBOSE":false,"HEADERS":true,"No_Responders":true}\r\n',
    ),
    talk(
        "the-later-key-holds",
        b"PUB t.a 0\r\n\r\n",
        connect=b'CONNECT {"verbose":true,"Verbose":null,"VERBOSE":false}\r\n',
    ),
]


@pytest.mark.parametrize("piece", [0, 7])
@pytest.mark.parametrize("conversation", TALKS, ids=lambda it: it.name)
def test_the_same_answers(
    place: Instance, conversation: conformance.Conversation, piece: int
) -> None:
    conformance.hold(place.host, place.port, conversation, piece)


def test_a_sid_of_another_connection_is_another(place: Instance) -> None:
    with Wire(place.host, place.port) as one, Wire(place.host, place.port) as two:
        for wire, subject in ((one, b"o.1"), (two, b"o.2")):
            wire.say(QUIET + b"SUB %b %b\r\nPING\r\n" % (subject, LONG[-1]))
            wire.read_until(1, 0)
        one.say(b"UNSUB %b\r\nPUB o.1 0\r\n\r\nPUB o.2 0\r\n\r\nPING\r\n" % LONG[-1])
        one.read_until(2, 0)
        two.read_until(1, 1)
        assert one.messages == []
        assert two.messages == [b"MSG o.2 %b 0|" % LONG[-1]]


def test_the_level_is_one_that_the_server_it_is_compared_with_has(place: Instance) -> None:
    with Wire(place.host, place.port) as wire:
        if wire.is_nats_server:
            assert _number(wire.info["version"]) >= _number(NATS_LEVEL)
        else:
            assert wire.info["version"] == NATS_LEVEL
            assert wire.info["midair"] == __version__


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
