"""The subject index against a plain comparison of every subscription with every subject."""

from __future__ import annotations

import errno
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.index import PORTS_MAX, SUBJECT_BYTES_MAX, Match, SubjectIndex, sub_id

Sub = tuple[int, bytes, bytes]  # connection, subject, queue


def fails(code: int) -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, match=rf"^\[Errno {code}\]")


def matches(pattern: bytes, subject: bytes) -> bool:
    """The readable definition of a match."""
    want, have = pattern.split(b"."), subject.split(b".")
    if b"" in have:
        return False
    for i, token in enumerate(want):
        if token == b">" and i == len(want) - 1:
            return len(have) > i
        if i >= len(have) or token not in (b"*", have[i]):
            return False
    return len(want) == len(have)


def wild(subject: bytes) -> bool:
    tokens = subject.split(b".")
    return b"*" in tokens or tokens[-1] == b">"


def prefixes(patterns: set[bytes]) -> set[tuple[bytes, ...]]:
    """What the trie holds: every beginning of every wildcard pattern."""
    split = [tuple(p.split(b".")) for p in patterns if wild(p)]
    return {p[: i + 1] for p in split for i in range(len(p))}


def check(found: Match, subs: dict[int, Sub], subject: bytes, ports: int) -> None:
    """`found` is exactly what a comparison with every subscription gives."""
    hits = {s: sub for s, sub in subs.items() if matches(sub[1], subject)}
    plain = {s: conn for s, (conn, _, queue) in hits.items() if not queue}
    assert len(found.subs) == len(plain)
    assert dict(zip(found.subs, found.conns, strict=True)) == plain
    groups: dict[bytes, dict[int, int]] = {}
    for s, (conn, _, queue) in hits.items():
        if queue:
            groups.setdefault(queue, {})[s] = conn
    assert len(found.groups) == len(groups) == len({g.queue for g in found.groups})
    for g in found.groups:
        name = subs[g.subs[0]][2]
        assert dict(zip(g.subs, g.conns, strict=True)) == groups[name]
        assert len(g.subs) == len(groups[name])
        assert 0 <= g.turn < len(g.subs)
    of = [s >> 27 for s in found.subs]
    assert of == sorted(of)  # port by port
    assert not of or of[-1] < ports


# One token in a handful is longer than what a node holds itself.
WORDS = st.sampled_from([b"a", b"b", b"a1", b"foo", b"x" * 40])
LITERALS = st.lists(WORDS, min_size=1, max_size=4).map(b".".join)
PUBLISHED = st.lists(WORDS | st.sampled_from([b"*", b">"]), min_size=1, max_size=5).map(b".".join)


@st.composite
def patterns(draw: st.DrawFn) -> bytes:
    tokens = draw(st.lists(WORDS | st.just(b"*"), min_size=0, max_size=4))
    if not tokens or draw(st.booleans()):
        tokens.append(draw(st.sampled_from([b">", b"*", b"b"])))
    return b".".join(tokens)


SUBJECTS = LITERALS | patterns()
QUEUES = st.sampled_from([b"", b"", b"", b"q", b"r", b"long-queue-name-" * 3])


class AgainstBruteForce(RuleBasedStateMachine):
    """Changes and matches in any order; capacities from too small to ample."""

    def __init__(self) -> None:
        super().__init__()
        self.subs: dict[int, Sub] = {}
        self.ix: SubjectIndex | None = None

    @initialize(
        ports=st.sampled_from([1, 2, 3, PORTS_MAX]),
        slots=st.sampled_from([6, 8, 33]),
        subjects=st.sampled_from([1, 2, 4, 6, 300]),
    )
    def open(self, ports: int, slots: int, subjects: int) -> None:
        self.ports, self.slots, self.subjects = ports, slots, subjects
        self.ix = SubjectIndex(ports, slots, subjects)

    def fits(self, subject: bytes, queue: bytes) -> bool:
        """Whether the bounds allow one more; what is only cached never counts."""
        all_subjects = {s for _, s, _ in self.subs.values()} | {subject}
        literal = {s for s in all_subjects if not wild(s)}
        queues = ({q for _, _, q in self.subs.values()} | {queue}) - {b""}
        return (
            len(literal) <= self.subjects
            and len(prefixes(all_subjects)) <= 2 * self.subjects
            and len(queues) <= self.subjects
        )

    @rule(data=st.data(), conn=st.integers(0, 3), subject=SUBJECTS, queue=QUEUES)
    def add(self, data: st.DataObject, conn: int, subject: bytes, queue: bytes) -> None:
        assert self.ix is not None
        sub = sub_id(
            data.draw(st.integers(0, self.ports - 1)), data.draw(st.integers(0, self.slots - 1))
        )
        if sub in self.subs:
            if self.subs[sub] == (conn, subject, queue):
                self.ix.add(sub, conn, subject, queue)
            else:
                with pytest.raises(FileExistsError):
                    self.ix.add(sub, conn, subject, queue)
        elif self.fits(subject, queue):
            self.ix.add(sub, conn, subject, queue)
            self.subs[sub] = (conn, subject, queue)
        else:
            with fails(errno.ENOSPC):
                self.ix.add(sub, conn, subject, queue)

    @precondition(lambda self: self.subs)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        assert self.ix is not None
        sub = data.draw(st.sampled_from(sorted(self.subs)))
        before = self.ix.stats()
        self.ix.add(sub, *self.subs[sub])
        assert self.ix.stats() == before

    @precondition(lambda self: self.subs)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        assert self.ix is not None
        sub = data.draw(st.sampled_from(sorted(self.subs)))
        self.ix.remove(sub)
        del self.subs[sub]
        with pytest.raises(FileNotFoundError):
            self.ix.remove(sub)

    @rule(subject=PUBLISHED | LITERALS, times=st.integers(1, 4))
    def publish(self, subject: bytes, times: int) -> None:
        assert self.ix is not None
        for _ in range(times):
            check(self.ix.match(subject, pick=True), self.subs, subject, self.ports)

    @precondition(lambda self: self.subs)
    @rule(data=st.data(), times=st.integers(1, 3))
    def publish_subscribed(self, data: st.DataObject, times: int) -> None:
        self.publish(data.draw(st.sampled_from(sorted(s for _, s, _ in self.subs.values()))), times)

    @invariant()
    def counts(self) -> None:
        if self.ix is None:
            return
        stats = self.ix.stats()
        subjects = {s for _, s, _ in self.subs.values()}
        assert stats.subs == len(self.subs)
        assert stats.nodes - stats.nodes_cached == len([s for s in subjects if not wild(s)])
        assert stats.trie_nodes == len(prefixes(subjects))
        assert stats.queues == len({q for _, _, q in self.subs.values()} - {b""})
        assert stats.nodes <= stats.nodes_max == self.subjects
        assert stats.blocks <= stats.nodes

    def teardown(self) -> None:
        if self.ix is None:
            return
        for sub in self.subs:
            self.ix.remove(sub)
        # As many literal subscriptions as there are nodes push every cached subject out.
        room = min(self.subjects, self.slots * self.ports)
        ids = [sub_id(i // self.slots, i % self.slots) for i in range(room)]
        for i, sub in enumerate(ids):
            self.ix.add(sub, 1, b"fill.%d" % i)
        for sub in ids:
            self.ix.remove(sub)
        stats = self.ix.stats()
        assert (stats.subs, stats.trie_nodes, stats.queues) == (0, 0, 0)
        if room == self.subjects:
            assert (stats.nodes, stats.blocks) == (0, 0)
            assert (stats.text_used_bytes, stats.block_used_bytes) == (0, 0)
        self.ix.close()


TestAgainstBruteForce = AgainstBruteForce.TestCase
TestAgainstBruteForce.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(
    subs=st.lists(st.tuples(SUBJECTS, QUEUES), max_size=60),
    published=st.lists(PUBLISHED, min_size=1, max_size=20),
)
@settings(deadline=None)
def test_many_patterns_at_once(subs: list[tuple[bytes, bytes]], published: list[bytes]) -> None:
    """More overlap than the state machine reaches, cold, cached once and cached."""
    table = {sub_id(i % 3, i // 3): (i, *sub) for i, sub in enumerate(subs)}
    with SubjectIndex(3, 32, 512) as ix:
        for sub, (conn, subject, queue) in table.items():
            ix.add(sub, conn, subject, queue)
        for subject in published * 3:
            check(ix.match(subject), table, subject, 3)


@pytest.mark.parametrize("tail", [b"", b".tail"])
def test_every_length_of_subject(tail: bytes) -> None:
    """Short, inline and long texts; each subject finds itself and nothing else."""
    names = [(b"n" * (n - 1) + c) + tail for n in range(1, 150) for c in (b"x", b"y")]
    names += [b"n" * (SUBJECT_BYTES_MAX - 1) + c for c in (b"x", b"y")]
    with SubjectIndex(1, 512, 1024) as ix:
        for i, name in enumerate(names):
            ix.add(i, i, name)
        for i, name in enumerate(names):
            assert ix.match(name).subs == (i,)
            assert ix.match(b"m" + name[1:]).subs == ()
        for i in range(len(names)):
            ix.remove(i)
        assert ix.stats().text_used_bytes == 0
        assert ix.stats().nodes == 0


def test_the_longest_subject_has_the_most_tokens() -> None:
    subject = b"x." * (SUBJECT_BYTES_MAX // 2 - 1) + b"xx"
    with SubjectIndex(1, 4, 16384) as ix:
        ix.add(0, 0, b">")
        ix.add(1, 1, b"*." * (SUBJECT_BYTES_MAX // 2 - 1) + b"*")
        ix.add(2, 2, b"*.>")
        assert set(ix.match(subject).subs) == {0, 1, 2}
        assert set(ix.match(subject[2:]).subs) == {0, 2}
        assert ix.match(subject + b"x").subs == ()  # longer than a subject may be
        with fails(errno.ENAMETOOLONG):
            ix.add(3, 3, subject + b"x")


@pytest.mark.parametrize("subject", [b"", b".", b"a.", b".a", b"a..b", b"a.b..", b"..a.b"])
def test_a_subject_with_an_empty_token_goes_nowhere(subject: bytes) -> None:
    with SubjectIndex(1, 8, 64) as ix:
        for i, pattern in enumerate([b">", b"*", b"*.*", b"a.>", b"*.*.*", b"a.*"]):
            ix.add(i, i, pattern)
        assert ix.match(subject).subs == ()
        assert ix.match(subject).subs == ()  # from the cache, too


@pytest.mark.parametrize(
    "conf", [(0, 1, 1), (33, 1, 1), (1, 0, 1), (1, (1 << 27) + 1, 1), (1, 1, 0), (32, 1 << 26, 1)]
)
def test_open_refuses_what_it_cannot_hold(conf: tuple[int, int, int]) -> None:
    with fails(errno.EINVAL):
        SubjectIndex(*conf)


@pytest.mark.parametrize("sub", [sub_id(2, 0), sub_id(0, 5), sub_id(31, (1 << 27) - 1)])
def test_ids_out_of_range_are_refused(sub: int) -> None:
    with SubjectIndex(2, 5, 4) as ix:
        with fails(errno.EINVAL):
            ix.add(sub, 0, b"a")
        with fails(errno.EINVAL):
            ix.remove(sub)


def test_closed_index_says_so() -> None:
    ix = SubjectIndex(1, 1, 1)
    ix.close()
    ix.close()
    with pytest.raises(ValueError, match="closed"):
        ix.match(b"a")


def picked(ix: SubjectIndex, subject: bytes) -> list[int]:
    return [g.subs[g.turn] for g in ix.match(subject, pick=True).groups]


def even(counts: Counter[int], members: int, slack: int = 1) -> None:
    assert len(counts) == members
    assert max(counts.values()) - min(counts.values()) <= slack


def test_turns_are_even_while_cached() -> None:
    with SubjectIndex(2, 16, 16) as ix:
        for i in range(7):
            ix.add(sub_id(i % 2, i), i, b"a.b" if i < 3 else b"a.*", b"q")
        even(Counter(s for _ in range(700) for s in picked(ix, b"a.b")), 7)


@pytest.mark.parametrize("churn", [b"a.b", b"a.*", b"*.b", b">"])
def test_turns_are_even_while_results_are_rebuilt(churn: bytes) -> None:
    """Somebody subscribes or leaves after every second message: the order goes on."""
    with SubjectIndex(1, 16, 16) as ix:
        ix.add(9, 9, churn)
        for i in range(3):
            ix.add(i, i, b"a.b", b"q")
        turns = []
        for i in range(300):
            turns += picked(ix, b"a.b")
            if i % 4 == 1:
                ix.remove(9)
            elif i % 4 == 3:
                ix.add(9, 9, churn)
        assert turns == [(turns[0] + i) % 3 for i in range(300)]
        assert ix.stats().builds > 100


def test_turns_are_even_over_subjects_that_never_return() -> None:
    with SubjectIndex(1, 16, 16) as ix:
        for i in range(4):
            ix.add(i, i, b"work.*", b"q")
        even(Counter(s for n in range(400) for s in picked(ix, b"work.%d" % n)), 4)


@pytest.mark.parametrize("nodes", [1, 16])
def test_two_subjects_in_turn_each_reach_every_member(nodes: int) -> None:
    """Also when neither can be cached, because the only node is taken."""
    with SubjectIndex(1, 16, nodes) as ix:
        ix.add(9, 9, b"taken")
        for i in range(2):
            ix.add(i, i, b"work.*", b"q")
        counts = {subject: Counter[int]() for subject in (b"work.a", b"work.b")}
        for _ in range(200):
            for subject, counter in counts.items():
                counter.update(picked(ix, subject))
        for counter in counts.values():
            assert min(counter[0], counter[1]) >= 60
        even(counts[b"work.a"] + counts[b"work.b"], 2, slack=60)


def test_subjects_that_return_are_cached_in_the_end() -> None:
    """However their first-seen marks fall on one another."""
    with SubjectIndex(1, 4, 8) as ix:
        ix.add(0, 0, b"work.*")
        for _ in range(200):
            for n in range(8):
                ix.match(b"work.%d" % n)
        assert ix.stats().nodes_cached == 8
        builds = ix.stats().builds
        for n in range(8):
            ix.match(b"work.%d" % n)
        assert ix.stats().builds == builds


def test_a_hundred_thousand_on_one_subject_build_once() -> None:
    with SubjectIndex(4, 30_000, 16) as ix:
        ids = [sub_id(i % 4, i // 4) for i in range(100_000)]
        for i, sub in enumerate(ids):
            ix.add(sub, i, b"news")
        found = ix.match(b"news")
        assert ix.stats().builds == 1
        assert sorted(found.subs) == sorted(ids)
        assert [sub >> 27 for sub in found.subs] == [c for c in range(4) for _ in range(25_000)]
        assert list(found.subs) == sorted(ids)  # order of subscription within a connmgr
        for sub in ids[::2]:
            ix.remove(sub)
        assert sorted(ix.match(b"news").subs) == sorted(ids[1::2])
        for sub in ids[1::2]:
            ix.remove(sub)
        assert ix.stats().nodes == ix.stats().block_used_bytes == 0


def test_results_that_do_not_fit_are_still_right() -> None:
    """More large results than the pool of results holds: some go, none is wrong."""
    table = {sub_id(i % 2, i // 2): (i, b">", b"q" if i % 5 == 0 else b"") for i in range(100)}
    with SubjectIndex(2, 64, 200) as ix:
        for sub, (conn, subject, queue) in table.items():
            ix.add(sub, conn, subject, queue)
        for n in list(range(150)) * 4:
            check(ix.match(b"s.%d" % n), table, b"s.%d" % n, 2)
        stats = ix.stats()
        assert stats.evictions > 0
        assert 0 < stats.blocks < 150


@pytest.mark.parametrize("everywhere", [0, 60])
def test_churn_of_many_subjects(everywhere: int) -> None:
    """A full table of subjects, two subscribers each, coming and going at random.

    With sixty subscribers to everything the results also compete for their pool.
    """
    chance = random.Random(1)
    subjects = [b"s.%d" % n for n in range(600)]
    with SubjectIndex(2, 1024, len(subjects)) as ix:
        for i in range(everywhere):
            ix.add(sub_id(0, 700 + i), i, b">")
        present: set[tuple[int, int]] = set()
        for _ in range(20_000):
            n, connmgr = one = chance.randrange(len(subjects)), chance.randrange(2)
            if one in present:
                ix.remove(sub_id(connmgr, n))
            else:
                ix.add(sub_id(connmgr, n), n, subjects[n])
            present ^= {one}
            n = chance.randrange(len(subjects))
            mine = {sub_id(c, n) for c in (0, 1) if (n, c) in present}
            found = ix.match(subjects[n]).subs
            assert {s for s in found if s & 1023 < 700} == mine
            assert len(found) == len(mine) + everywhere
        assert (ix.stats().evictions > 0) == (everywhere > 0)
        for n, _ in present:  # room is still found for the result of whoever asks twice
            ix.match(subjects[n])
            builds = ix.stats().builds
            ix.match(subjects[n])
            assert ix.stats().builds == builds
        for n, connmgr in present:
            ix.remove(sub_id(connmgr, n))
        for i in range(everywhere):
            ix.remove(sub_id(0, 700 + i))
        for n, subject in enumerate(subjects):  # what is only cached makes room
            ix.add(sub_id(0, n), 0, subject + b".x")
        for n in range(len(subjects)):
            ix.remove(sub_id(0, n))
        stats = ix.stats()
        assert (stats.nodes, stats.blocks, stats.block_used_bytes) == (0, 0, 0)


def test_only_what_returns_is_cached() -> None:
    with SubjectIndex(1, 8, 4096) as ix:
        ix.add(0, 0, b"reply.*")
        for n in range(1000):
            ix.match(b"reply.%d" % n)
        assert ix.stats().nodes < 100  # chance hits of the first-seen marks at most
        for _ in range(3):
            ix.match(b"reply.again")
        builds = ix.stats().builds
        assert ix.match(b"reply.again").subs == (0,)
        assert ix.stats().builds == builds
        cached = ix.stats().nodes_cached
        ix.add(1, 1, b"reply.again")  # becomes a subscribed subject, and one no more
        assert ix.stats().nodes_cached == cached - 1
        assert set(ix.match(b"reply.again").subs) == {0, 1}
        ix.remove(1)
        assert ix.match(b"reply.again").subs == (0,)


def test_nothing_is_kept_for_subjects_without_any_interest() -> None:
    with SubjectIndex(1, 8, 64) as ix:
        ix.add(0, 0, b"a.b")
        for n in [1, 2, 3] * 3:
            assert ix.match(b"none.%d" % n).subs == ()
        assert ix.stats().nodes == 1


def test_a_change_spoils_little() -> None:
    """Of fifty cached subjects a change elsewhere leaves nearly all alone."""
    subjects = [b"%d.%d" % (n % 5, n) for n in range(50)]

    def rebuilt(ix: SubjectIndex) -> int:
        before = ix.stats().builds
        for subject in subjects:
            ix.match(subject)
        return ix.stats().builds - before

    with SubjectIndex(1, 64, 256) as ix:
        for i, subject in enumerate(subjects):
            ix.add(i, i, subject)
        assert rebuilt(ix) == 50
        assert rebuilt(ix) == 0
        ix.add(60, 0, subjects[7])
        assert rebuilt(ix) == 1
        ix.add(61, 0, b"other.*")
        assert rebuilt(ix) < 25
        ix.add(62, 0, b"3.*")
        assert 10 <= rebuilt(ix) < 35
        ix.add(63, 0, b"3.3.>")
        assert 1 <= rebuilt(ix) < 25
        ix.remove(63)
        assert 1 <= rebuilt(ix) < 25
        ix.remove(60)
        assert rebuilt(ix) == 1
        ix.add(60, 0, b"*.7")
        assert rebuilt(ix) == 50


def test_a_million_subscriptions() -> None:
    """Every one is found by its subject; a few hundred share the tag of another."""
    million = 1_000_000
    with SubjectIndex(4, million // 4, million) as ix:
        for i in range(million):
            ix.add(sub_id(i & 3, i >> 2), i, b"dev.%d.t" % i)
        stats = ix.stats()
        assert (stats.subs, stats.nodes) == (million, million)
        with pytest.raises(FileExistsError):
            ix.add(sub_id(0, 0), 0, b"one.more")
        for i in range(million):
            assert ix.match(b"dev.%d.t" % i).conns == (i,)
        for i in range(million):
            ix.remove(sub_id(i & 3, i >> 2))
        assert ix.stats().nodes == ix.stats().subs == 0
