"""The way of a message through one, two and four connection managers, over real sockets."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest

from midair.client.wire_nats import Message, hpub, msg, pub
from tests.support.instance import PATIENCE_S, ROOT, eventually
from tests.support.net import Net, numbers
from tests.support.stream import Stream, Worker

COPY_MAX = 4096  # a larger body is written from the arena, not copied
LINE_MAX = 4096  # bytes of arguments in a control line
CHURN = "tests.support.churn"


def in_order(found: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(found))


# Who gets what


def test_everyone_gets_everything_in_order(net: Net) -> None:
    clients = net.spread(4)
    each = 300
    for client in clients:
        for sid, subject in enumerate((b"all.*.x", b"all.>", b"all.0.x", b"all.*.y")):
            client.sub(subject, b"%d" % sid)
        client.sync()

    def publish(at: int, client: Stream) -> None:
        for n in range(each):
            client.send(pub(b"all.%d.x" % at, b"%d" % n))

    senders = [Worker(partial(publish, at, client)) for at, client in enumerate(clients)]
    for sender in senders:
        sender.done()
    for client in clients:
        found = client.take((2 * len(clients) + 1) * each)
        for at in range(len(clients)):
            for name in (b"0", b"1", b"2") if at == 0 else (b"0", b"1"):
                got = [m for m in found if m.sid == name and m.subject == b"all.%d.x" % at]
                assert numbers(got) == list(range(each))
        assert client.sync() == []


def test_queue_groups_give_each_message_to_one_member(net: Net) -> None:
    members = net.spread(6)
    count = 20_000
    for at, member in enumerate(members):
        member.sub(b"work.*", b"g1", b"one")
        if at < 3:
            member.sub(b"work.>", b"g2", b"two")
        member.sub(b"end", b"e")
        member.sync()
    plain, publisher = net.open(), net.open()
    plain.sub(b"work.a", b"p")
    plain.sync()
    publisher.send(b"".join(pub(b"work.a", b"%d" % n) for n in range(count)) + pub(b"end"))
    found = [member.take_until(b"end") for member in members]
    plain.expect(b"".join(msg(b"work.a", b"p", b"%d" % n) for n in range(count)))
    for sid in (b"g1", b"g2"):
        shares = [numbers([m for m in share if m.sid == sid]) for share in found]
        assert all(in_order(share) for share in shares)
        assert sorted(n for share in shares for n in share) == list(range(count))


def test_fan_out_to_five_hundred_connections(net: Net) -> None:
    readers = [net.open() for _ in range(500)]
    for reader in readers:
        reader.send(b"SUB fan 1\r\nPING\r\n")
    for reader in readers:
        assert reader.line() == b"PONG"
    spread = Counter(slot.connmgr for slot in net.inside.table.used() if slot.state)
    assert len(spread) == net.connmgrs
    publisher = net.open()
    bodies = [random.Random(n).randbytes((n * 397) % 6000) for n in range(40)]
    publisher.send(b"".join(pub(b"fan", body) for body in bodies))
    expected = b"".join(msg(b"fan", b"1", body) for body in bodies)
    for reader in readers:
        reader.expect(expected)


def test_a_burst_is_to_each_client_what_it_would_be_alone(net: Net) -> None:
    """Messages in a row for the same clients are made once and copied: nobody is to notice."""
    same = [net.open() for _ in range(5)]
    longer, limited, plain, twice = net.open(), net.open(), net.open(headers=False), net.open()
    for client in (*same, plain):
        client.sub(b"burst", b"1")
    longer.sub(b"burst", b"a-sid-of-twenty-bytes")
    limited.sub(b"burst", b"1")
    limited.send(b"UNSUB 1 777\r\n")
    for client in (*same, longer, limited, plain):
        client.sync()
    block = b"NATS/1.0\r\nA: b\r\n\r\n"
    sent: list[bytes] = []
    with_headers: list[bytes] = []  # as those get them who take headers; %b stands for the sid
    without: list[bytes] = []

    def say(n: int) -> None:
        body = b"%d-" % n + bytes(97 + n % 26 for _ in range((n * 37) % 300))
        if n % 97 == 0:
            body = body.ljust(COPY_MAX + 1 + n, b".")
        usual = b"MSG burst %%b %d\r\n%b\r\n" % (len(body), body)
        if n % 41 == 0:  # headers
            sizes = (len(block), len(block) + len(body))
            sent.append(hpub(b"burst", block, body))
            with_headers.append(b"HMSG burst %%b %d %d\r\n" % sizes + block + body + b"\r\n")
        elif n % 29 == 0:  # not as a client library would write it
            sent.append(b"pub\tburst  %05d\r\n%b\r\n" % (len(body), body))
            with_headers.append(usual)
        elif n % 23 == 0:
            sent.append(pub(b"burst", body, b"answer.%d" % n))
            usual = b"MSG burst %%b answer.%d %d\r\n%b\r\n" % (n, len(body), body)
            with_headers.append(usual)
        else:
            sent.append(pub(b"burst", body))
            with_headers.append(usual)
        without.append(usual)

    for n in range(2000):
        say(n)
    publisher = net.open()
    publisher.send(b"".join(sent))
    for client in same:
        client.expect(b"".join(with_headers).replace(b"%b", b"1"))
    longer.expect(b"".join(with_headers).replace(b"%b", b"a-sid-of-twenty-bytes"))
    limited.expect(b"".join(with_headers[:777]).replace(b"%b", b"1"))
    plain.expect(b"".join(without).replace(b"%b", b"1"))
    assert limited.sync() == []
    # One who listens twice gets each message twice before the next one.
    twice.sub(b"burst", b"x")
    twice.sub(b"burst", b"yy")
    twice.sync()
    publisher.send(b"".join(sent[:300]))
    found = twice.take(600)
    firsts, seconds = found[::2], found[1::2]
    assert [(m.body, m.headers) for m in firsts] == [(m.body, m.headers) for m in seconds]
    assert all({a.sid, b.sid} == {b"x", b"yy"} for a, b in zip(firsts, seconds, strict=True))
    for client in same:
        client.expect(b"".join(with_headers[:300]).replace(b"%b", b"1"))


def test_pong_is_a_barrier_for_everyone(net: Net) -> None:
    clients = net.spread(4)
    for n in range(200):
        subscriber, publisher = clients[n % len(clients)], clients[(n + 1) % len(clients)]
        subject = b"barrier.%d" % n
        subscriber.sub(subject, b"%d" % n)
        subscriber.sync()
        publisher.send(pub(subject, b"x"))
        subscriber.expect(msg(subject, b"%d" % n, b"x"))
        # And the other way round: after the PONG nothing more comes.
        subscriber.send(b"UNSUB %d\r\n" % n)
        subscriber.sync()
        publisher.send(pub(subject, b"y"))
        publisher.sync()
        assert subscriber.sync() == []


def test_requests_and_replies(net: Net) -> None:
    clients = net.spread(4)
    responder, *askers = clients
    responder.sub(b"double", b"1", b"q")
    responder.sync()
    count = 500

    def answer() -> None:
        for _ in range(count * len(askers)):
            [request] = responder.take(1)
            responder.send(pub(request.reply, b"%d" % (2 * int(request.body))))

    def ask(at: int, client: Stream) -> None:
        client.sub(b"inbox.%d.*" % at, b"in")
        for n in range(count):
            client.send(pub(b"double", b"%d" % n, b"inbox.%d.%d" % (at, n)))
            client.expect(msg(b"inbox.%d.%d" % (at, n), b"in", b"%d" % (2 * n)))

    workers = [Worker(answer)]
    for at, asker in enumerate(askers):
        workers.append(Worker(partial(ask, at, asker)))
    for worker in workers:
        worker.done()


def test_nobody_there_and_no_echo(net: Net) -> None:
    clients = net.spread(4)
    for at, client in enumerate(clients):
        client.sub(b"nobody.%d.>" % at, b"in")
        client.send(pub(b"not.here", b"x", b"nobody.%d.1" % at))
        client.expect(b"HMSG nobody.%d.1 in 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" % at)
    silent = net.open(echo=False)
    silent.sub(b"echo", b"1")
    silent.sub(b"echo", b"2", b"group")
    silent.sub(b"mine.*", b"3")
    silent.sync()
    # To itself only: nobody gets it.
    silent.send(pub(b"echo", b"me", b"mine.1"))
    silent.expect(b"HMSG mine.1 3 16 16\r\nNATS/1.0 503\r\n\r\n\r\n")
    for client in clients:
        client.sub(b"echo", b"e")
        client.sync()
    silent.send(pub(b"echo", b"all"))
    for client in clients:
        client.expect(msg(b"echo", b"e", b"all"))
    clients[0].send(pub(b"echo", b"back"))
    assert {(m.sid, m.body) for m in silent.take(2)} == {(b"1", b"back"), (b"2", b"back")}
    assert silent.sync() == []


def test_a_reader_that_waits_gets_everything_later(net: Net) -> None:
    slow, quick = net.open(receive_buffer=4096), net.spread(2)[1]
    for client in (slow, quick):
        client.sub(b"wait", b"1")
        client.sync()
    chance = random.Random(1)
    choices = (0, 20, 500, 3000, COPY_MAX, COPY_MAX + 1, 9000, 40_000, 150_000)
    bodies: list[bytes] = []
    while sum(map(len, bodies)) < 30_000_000:
        bodies.append(chance.randbytes(chance.choice(choices)))
    publisher = net.open()
    expected = b"".join(msg(b"wait", b"1", body) for body in bodies)
    reader = Worker(lambda: quick.expect(expected))
    for body in bodies:
        publisher.send(pub(b"wait", body))
    publisher.sync()
    reader.done()
    assert any(live for live, _ in net.inside.census())  # what `slow` has yet to read
    slow.expect(expected)


@pytest.mark.parametrize("shape", ["one token", "many tokens", "wildcards"])
def test_subjects_as_long_as_a_line_allows(net: Net, shape: str) -> None:
    clients = net.spread(2)
    subscriber, publisher = clients[0], clients[1]
    for n, length in enumerate((71, 72, 73, 196, 197, 1000, LINE_MAX - 10)):
        text = b"x" * length if shape == "one token" else (b"ab." * length)[: length - 1] + b"z"
        literal = b"%d" % n + text[1:]
        wanted = literal
        if shape == "wildcards":
            wanted = b".".join(
                b"*" if at % 3 == 1 else token for at, token in enumerate(literal.split(b"."))
            )
        subscriber.sub(wanted, b"%d" % n)
        subscriber.sub(wanted, b"q%d" % n, b"g")
        subscriber.sync()
        publisher.send(pub(literal, b"hello") + pub(literal[:-1] + b"y", b"not this"))
        assert {(m.subject, m.sid, m.body) for m in subscriber.take(2)} == {
            (literal, b"%d" % n, b"hello"),
            (literal, b"q%d" % n, b"hello"),
        }
    half = b"r" * (LINE_MAX // 2 - 10)
    subscriber.sub(half, b"half")
    subscriber.sync()
    publisher.send(pub(half, b"hello", half))
    subscriber.expect(msg(half, b"half", b"hello", half))
    publisher.sync()
    assert subscriber.sync() == []


# Subscriptions that end


def test_unsubscribing_after_a_number_of_messages_under_load(net: Net) -> None:
    clients = net.spread(4)
    publisher = net.open()
    first, total, most = 15_000, 50_000, 20_000
    for client in clients:
        client.sub(b"load", b"1")
        client.sub(b"end", b"e")
        client.sync()
    sender = Worker(lambda: publisher.send(b"".join(pub(b"load", b"%d" % n) for n in range(first))))
    for client in clients:  # while the first part is on its way
        client.send(b"UNSUB 1 %d\r\nPING\r\n" % most)
    expected = [client.take(first) for client in clients]
    sender.done()
    for client in clients:
        while client.pongs < 2:  # the first was that of sync()
            assert client.message() is None
    publisher.send(b"".join(pub(b"load", b"%d" % n) for n in range(first, total)) + pub(b"end"))
    for client, found in zip(clients, expected, strict=True):
        assert numbers(found + client.take_until(b"end")) == list(range(most))


def test_a_queue_group_loses_nothing_when_members_reach_their_maximum(net: Net) -> None:
    """A maximum that comes when more than that is on its way already ends the membership, and
    what is on its way is delivered all the same."""
    members = net.spread(4)
    publisher, stays = net.open(), net.open()
    rounds, burst = 60, 200
    for client in (*members, stays):
        client.sub(b"end", b"e")
    stays.sub(b"q", b"1", b"g")
    stays.sync()
    reader = Worker(lambda: stays.take_until(b"end"))
    found: list[Message] = []
    for n in range(rounds):
        for member in members:
            member.sub(b"q", b"s%d" % n, b"g")
            found += member.sync()
        at = n * burst
        publisher.send(b"".join(pub(b"q", b"%d" % i) for i in range(at, at + burst)))
        for most, member in enumerate(members, 1):
            member.send(b"UNSUB s%d %d\r\n" % (n, most * (n % 3) + 1))
        publisher.sync()
    publisher.send(pub(b"end"))
    found += reader.done()
    for member in members:
        found += member.take_until(b"end")
    got = Counter(numbers(found))
    assert {n: got[n] for n in range(rounds * burst) if got[n] != 1} == {}


def test_a_queue_member_gets_exactly_its_maximum(net: Net) -> None:
    members = net.spread(4)
    for member in members:
        member.send(b"SUB q g 1\r\nUNSUB 1 700\r\nSUB end e\r\n")
        member.sync()
    asker = net.open()
    asker.sub(b"in", b"in")
    asker.send(b"".join(pub(b"q", b"%d" % n) for n in range(700 * len(members))) + pub(b"end"))
    found = [numbers(member.take_until(b"end")) for member in members]
    assert [len(share) for share in found] == [700] * len(members)
    assert sorted(itertools.chain(*found)) == list(range(700 * len(members)))
    asker.send(pub(b"q", b"one too many", b"in"))
    asker.expect(b"HMSG in in 16 16\r\nNATS/1.0 503\r\n\r\n\r\n")


def nobody_hears(asker: Stream, subjects: list[bytes]) -> None:
    for subject in subjects:
        asker.send(pub(subject, b"", b"in"))
    asker.expect(b"HMSG in in 16 16\r\nNATS/1.0 503\r\n\r\n\r\n" * len(subjects))


def test_a_hundred_thousand_subscriptions_go_with_their_connection(net: Net) -> None:
    """More rounds than a connmgr has slots for: they must be used again."""
    count = 100_000
    asker = net.open()
    asker.sub(b"in", b"in")
    asker.sync()
    for turn in range(net.connmgrs + 1):
        many = net.open()
        many.send(b"".join(b"SUB many.%d.%d s%d\r\n" % (turn, n, n) for n in range(count)))
        many.sync()
        some = [b"many.%d.%d" % (turn, n) for n in range(0, count, 997)]
        for subject in some:
            asker.send(pub(subject, b"here", b"in"))
        assert [m.subject for m in many.take(len(some))] == some
        many.close()
        eventually(lambda: net.inside.connections() == 1, "the connection is ended")
        nobody_hears(asker, some)


def test_unsubscribed_and_subscribed_again_with_the_same_names(net: Net) -> None:
    client, asker = net.spread(2)[:2]
    asker.sub(b"in", b"in")
    for turn in range(20):
        client.send(b"".join(b"SUB again.%d %d\r\n" % (n, n) for n in range(1000)))
        client.sync()
        asker.send(b"".join(pub(b"again.%d" % n, b"%d" % turn) for n in range(1000)))
        client.expect(b"".join(msg(b"again.%d" % n, b"%d" % n, b"%d" % turn) for n in range(1000)))
        client.send(b"".join(b"UNSUB %d\r\n" % n for n in range(1000)))
        client.sync()
    nobody_hears(asker, [b"again.%d" % n for n in range(0, 1000, 100)])


# Comings and goings


def test_two_thousand_connections_come_and_go_beside_a_steady_pair(net: Net) -> None:
    """Clients that end in every way there is do not disturb two that go on."""
    clients = net.spread(2)
    here, there = clients[0], clients[1]
    here.sub(b"steady.here", b"1")
    there.sub(b"steady.there", b"1")
    for client in (here, there):
        client.sync()
    count = 50_000
    churns = [
        subprocess.Popen(
            [sys.executable, "-m", CHURN, net.instance.host, str(net.instance.port), str(n), "500"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    try:

        def talk(client: Stream, subject: bytes) -> None:
            for n in range(0, count, 50):
                some = range(n, n + 50)
                client.send(b"".join(pub(subject, b"%d" % i) for i in some))
                client.expect(
                    b"".join(msg(b"steady.%b" % mine[client], b"1", b"%d" % i) for i in some)
                )

        mine = {here: b"here", there: b"there"}
        talkers = [
            Worker(lambda: talk(here, b"steady.there")),
            Worker(lambda: talk(there, b"steady.here")),
        ]
        ended = [churn.communicate(timeout=2 * PATIENCE_S)[0] for churn in churns]
        for talker in talkers:
            talker.done()
    finally:
        for churn in churns:
            churn.kill()
            churn.wait()
    assert ended == ["500\n"] * len(churns)
    for client in (here, there):
        assert client.sync() == []
