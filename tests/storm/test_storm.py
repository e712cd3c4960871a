"""Short storms (docs/storms.md), and that their clients notice what they are there to notice.

Method: tests/storm starts an instance and client processes, kills and upgrades parts of it for
a minute and a half in all, and looks for lost, doubled, reordered or corrupted messages, dropped
or refused connections and debris. The seed is printed; MIDAIR_SEED=N puts another in the place of
the first. The same seed makes the same choices, not the same timing.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from tests.storm.clients import Bursty, Flow
from tests.storm.debris import own_deaths
from tests.storm.killer import plan
from tests.storm.storm import Options, StormError, storm
from tests.storm.wire import Connection, Loop, NotGreetedError
from tests.support.instance import new_name
from tests.support.promise import BrokenPromise

SEED = int(os.environ.get("MIDAIR_SEED", "1"))
STORMS = {
    "two connmgrs": Options(kills=1000, seed=SEED, minutes=1.0, connmgrs=2),
    "one connmgr with standbys": Options(
        kills=1000, seed=SEED + 1, minutes=0.5, connmgrs=1, extra_config="standby = true\n"
    ),
}


@pytest.mark.alone
@pytest.mark.storm
@pytest.mark.parametrize("kind", STORMS)
def test_nothing_is_lost_in_a_storm(kind: str, request: pytest.FixtureRequest) -> None:
    options = STORMS[kind].named(new_name(request.node.nodeid))
    print(options.command())
    try:
        print(storm(options))
    except StormError as error:
        pytest.fail(str(error), pytrace=False)


# What the clients notice


INFO = b'INFO {"server_id":"x"}\r\n'


class Liar:
    """A server that greets, then says what it was told to say, and waits or hangs up."""

    def __init__(self, says: bytes, hangs_up: bool = False) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.says = says
        self.hangs_up = hangs_up
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with self.listener.accept()[0] as client:
            client.sendall(self.says)
            if not self.hangs_up:
                self.over.wait(30)

    def close(self) -> None:
        self.over.set()
        self.thread.join(30)
        self.listener.close()


@pytest.fixture
def liar() -> Iterator[Callable[..., int]]:
    made: list[Liar] = []

    def make(says: bytes, hangs_up: bool = False) -> int:
        made.append(Liar(says, hangs_up))
        return made[-1].port

    yield make
    for each in made:
        each.close()


def message(n: int, text: bytes = b"") -> bytes:
    body = text or b"%d abc" % n
    return b"MSG s 1 %d\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (message(0) + message(2), "message b'2'"),
        (message(0) + message(1) + message(1), "message b'1'"),
        (message(1) + message(0), "message b'1'"),
        (message(0, b"0 abd"), "message b'0'"),
        (b"MSG s 1 5\r\n0 abcXX", "bad end"),
        (b"MSG s 1 05\r\n0 abc\r\n", "not a frame"),
        (b"-ERR 'Slow Consumer'\r\n", "not what was to come"),
        (b"\r\n", "not a frame"),
        (b"+OK\r\n", "without being verbose"),
        (b"PONG\r\n", "a PONG too many"),
        (b"HMSG s 1 99 5\r\n0 abc\r\n", "bad end"),
    ],
)
def test_a_client_notices(liar: Callable[..., int], says: bytes, what: str) -> None:
    loop = Loop()
    flows: list[Flow] = []

    def on_message(
        to: Connection, subject: bytes, sid: bytes, reply: bytes, header: bytes, body: bytes
    ) -> None:
        flows[0].check(to, header, body)

    connection = loop.add(Connection(liar(INFO + says), on_message))
    flow = Flow(connection, b"s", lambda n: 3, b"abc")
    flow.receivers[connection] = 0
    flows.append(flow)
    try:
        with pytest.raises(BrokenPromise, match=what):
            loop.until(lambda: False, "never")
    finally:
        connection.close()


def test_a_client_notices_that_it_is_dropped(liar: Callable[..., int]) -> None:
    loop = Loop()
    connection = loop.add(Connection(liar(INFO, hangs_up=True)))
    with pytest.raises(BrokenPromise, match=r"closed by the server|reset"):
        loop.until(lambda: False, "never")
    connection.close()
    with pytest.raises(NotGreetedError):
        Connection(liar(b"", hangs_up=True))


def test_a_verbose_client_notices_answers_out_of_order(liar: Callable[..., int]) -> None:
    loop = Loop()
    connection = loop.add(Connection(liar(INFO + b"+OK\r\n+OK\r\nPONG\r\n"), verbose=True))
    connection.ping()
    with pytest.raises(BrokenPromise, match="where b'PONG' was to come"):
        loop.until(lambda: False, "never")
    connection.close()


def test_sizes_of_the_bursty_lie_on_both_sides_of_what_is_copied() -> None:
    sizes = [Bursty.size(None, n) for n in range(1000)]  # type: ignore[arg-type]
    assert min(sizes) < 100 < 4096 < 8192 < max(sizes)


# What the killer does


def test_a_plan_is_made_of_its_seed() -> None:
    components = ["router", "connmgr/0", "connmgr/1", "dispatcher", "keeper", "manager"]
    first, again = (list(islice(plan(7, components, True), 2000)) for _ in range(2))
    assert first == again
    assert first != list(islice(plan(8, components, True), 2000))
    assert {action.kind for action in first} == {
        *("kill", "burst", "double", "all", "keeper", "pause", "stop and kill", "mix", "rest"),
        *("upgrade", "upgrade and kill", "manager", "manager and kill", "manager again"),
        *("manager and keeper", "upgrade manager", "upgrade and manager"),
    }
    killing = ("kill", "burst", "double", "all", "stop and kill", "manager and kill")
    assert not [a for a in first if "keeper" in a.who and a.kind in killing]
    assert not [a for a in islice(plan(7, components[:-1], True), 2000) if "manager" in a.kind]


def test_only_our_own_kills_are_forgiven() -> None:
    ours = "midair[1] warning: router died: killed by SIGKILL"
    theirs = ["midair[1] warning: router died: killed by SIGSEGV", "Traceback (most recent call)"]
    assert own_deaths("\n".join([ours, *theirs, "midair-router[2] info: recovered"])) == theirs
