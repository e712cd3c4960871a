"""The NATS codec against its vectors and its reference.

tests/wire/vectors/nats/{valid,invalid}/NAME.nats are bytes a client sends, NAME.json beside each
says what they mean: the limits, the frames in order and, for an invalid one, the error that
follows them and after how many bytes it is known. Strings in the JSON are bytes (Latin-1).
Every vector goes through the C parser and the plain Python one, whole, byte by byte and at
random cuts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from native import lib, protocol
from tests.wire import reference

VECTORS = Path(__file__).parent / "vectors" / "nats"
NATS = protocol.NAMES.index("nats")
# What each verb of NATS is to the rest of Midair.
OPS = {
    "PUB": protocol.Op.MESSAGE,
    "HPUB": protocol.Op.MESSAGE,
    "SUB": protocol.Op.SUBSCRIBE,
    "UNSUB": protocol.Op.UNSUBSCRIBE,
    "PING": protocol.Op.PING,
    "PONG": protocol.Op.NOTHING,
    "CONNECT": protocol.Op.CONNECT,
    "OK": protocol.Op.NOTHING,
    "INFO": protocol.Op.NOTHING,
}
NAMES = sorted(str(p.relative_to(VECTORS).with_suffix("")) for p in VECTORS.glob("*/*.nats"))


def verb_of(frame: Any) -> str:
    return reference.VERBS[frame.op]


def parse_c(data: bytes, limits: Any) -> tuple[int, Any]:
    """The parser in C, and what it says of a frame that can be passed on as it is.

    Which way a frame went through the parser is not for the reference to know.
    """
    status, given = protocol.parse(data, protocol.Limits(*limits), NATS)
    if given is None:
        return status, None
    assert given.op == OPS[reference.VERBS[given.verb]]
    frame = reference.Frame(
        op=given.verb, **{name: getattr(given, name) for name in reference.Frame._fields[1:]}
    )
    if not frame.flags & protocol.FLAG_USUAL:
        return status, frame
    reply = data[frame.reply : frame.reply + frame.reply_len]
    sizes = [frame.header_len, frame.total_len] if verb_of(frame) == "HPUB" else [frame.total_len]
    line = data[frame.subject + frame.subject_len : frame.body]
    assert line[:1] == b" "
    assert line[-2:] == b"\r\n"
    words = line[1:-2].split(b" ")
    assert words[: len(words) - len(sizes)] == ([reply] if reply else [])
    assert [int(word) for word in words[len(words) - len(sizes) :]] == sizes
    return status, frame._replace(flags=frame.flags & ~protocol.FLAG_USUAL)


PARSERS: dict[str, Callable[[bytes, Any], tuple[int, Any]]] = {
    "c": parse_c,
    "reference": reference.parse,
}


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    expected: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return (VECTORS / f"{name}.nats").read_bytes(), expected


def described(data: bytes, frame: Any) -> dict[str, Any]:
    """The frame at the start of data in the words of the vectors."""

    def text(at: int, length: int) -> str:
        assert at + length <= len(data)
        return data[at : at + length].decode("latin-1")

    op = verb_of(frame)
    out: dict[str, Any] = {"op": op}
    if op in ("PUB", "HPUB", "SUB"):
        out["subject"] = text(frame.subject, frame.subject_len)
        if frame.flags & reference.BAD_SUBJECT:
            out["bad_subject"] = True
    if frame.reply_len:
        out["reply"] = text(frame.reply, frame.reply_len)
    if frame.queue_len:
        out["queue"] = text(frame.queue, frame.queue_len)
    if op in ("SUB", "UNSUB"):
        out["sid"] = text(frame.sid, frame.sid_len)
    if op == "UNSUB":
        out["max_msgs"] = frame.max_msgs
    if op in ("CONNECT", "INFO"):
        out["args"] = text(frame.args, frame.args_len)
    if op == "HPUB":
        out["header"] = text(frame.body, frame.header_len)
    if op in ("PUB", "HPUB"):
        payload = frame.body + frame.header_len
        out["payload"] = text(payload, frame.total_len - frame.header_len)
        assert frame.bytes == frame.body + frame.total_len + 2
    return out


def replay(parser: str, data: bytes, limits: Any, cuts: list[int]) -> tuple[list[Any], int, int]:
    """Feeds data up to each cut in turn, as a connection would: (frames, error, bytes fed).

    Also holds the parser to its word while a frame is incomplete: a total that is announced
    must be kept, with every field as announced.
    """
    frames: list[Any] = []
    start = 0
    announced = None
    for cut in [*cuts, len(data)]:
        while start < cut:
            status, frame = PARSERS[parser](data[start:cut], limits)
            if status < 0:
                return frames, status, cut
            if announced:
                assert frame == announced
            if status == 0:
                announced = frame
                assert frame is None or frame.bytes > cut - start
                break
            assert start + frame.bytes <= cut
            frames.append(described(data[start:cut], frame))
            start += frame.bytes
            announced = None
    assert start == len(data), "bytes left over"
    return frames, 0, len(data)


def random_cuts(name: str, length: int) -> list[list[int]]:
    rng = random.Random(name)
    sets = []
    for _ in range(20):
        count = rng.randint(1, min(6, length))
        sets.append(sorted(rng.sample(range(1, length + 1), count)))
    return sets


def test_there_are_vectors_of_both_kinds() -> None:
    kinds = [name.split("/")[0] for name in NAMES]
    assert kinds.count("valid") >= 60
    assert kinds.count("invalid") >= 60


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("name", NAMES)
def test_vector(name: str, parser: str) -> None:
    data, expected = load(name)
    limits = reference.Limits(**expected["limits"])
    error = -protocol.Refusal[expected["error"]] if "error" in expected else 0
    known = expected.get("known_after_bytes", len(data))

    assert replay(parser, data, limits, []) == (expected["frames"], error, len(data))
    every_byte = list(range(1, len(data)))
    assert replay(parser, data, limits, every_byte) == (expected["frames"], error, known)
    for cuts in random_cuts(name, len(data)):
        frames, got, fed = replay(parser, data, limits, cuts)
        assert (frames, got) == (expected["frames"], error)
        assert fed == min(cut for cut in [*cuts, len(data)] if cut >= known)


@pytest.mark.parametrize("name", NAMES)
def test_both_parsers_agree_on_every_prefix_of_every_frame(name: str) -> None:
    data, expected = load(name)
    limits = reference.Limits(**expected["limits"])
    start = 0
    while start < len(data):
        for end in range(start, len(data) + 1):
            piece = data[start:end]
            assert PARSERS["c"](piece, limits) == reference.parse(piece, limits)
        status, frame = reference.parse(data[start:], limits)
        if status != 1:
            break
        assert frame is not None
        start += frame.bytes


def test_error_texts_are_those_of_the_reference() -> None:
    for error, text in reference.TEXTS.items():
        assert protocol.text(-error, NATS) == text
    assert set(reference.TEXTS) == {-n for n in range(1, lib.REFUSALS)}


def test_lines_that_no_batch_could_hold_are_refused_whatever_the_limit() -> None:
    limits = reference.Limits(max_control_line=2**32 - 1, pedantic=False)
    for subject_len in (6000, 6007, 6008, 6009, 6100, 70000):
        data = b"PUB " + b"a" * subject_len + b" 2\r\nhi\r\n"
        status, frame = PARSERS["c"](data, limits)
        assert (status, frame) == reference.parse(data, limits)
        assert status == (1 if subject_len <= 6008 else reference.CONTROL_LINE)


# Pieces of frames, right and wrong; random text alone would hardly ever pass the operation.
words = st.one_of(
    st.sampled_from([b"a", b"a.b", b"a.*", b"a.>", b">", b"*", b".", b"a..b", b"_INBOX.x.1", b"q"]),
    st.integers(0, 40).map(lambda n: str(n).encode()),
    st.sampled_from([b"-1", b"+1", b"0000000003", b"000000003", b"00000003", b"0000003", b"99"]),
    st.binary(max_size=40),
    st.integers(1, 70).map(lambda n: b"x" * n),
)
blanks = st.sampled_from([b" ", b" ", b" ", b"\t", b"  ", b" \t ", b"", b"\r", b"\x00"])
ops = st.sampled_from(
    [b"PUB", b"pub", b"HPUB", b"SUB", b"UNSUB", b"PING", b"PONG", b"CONNECT", b"INFO", b"+OK"]
)
line_ends = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\r\n", b""])


@st.composite
def frame_like(draw: st.DrawFn) -> bytes:
    """An operation, words and perhaps a body that fits the last number."""
    out = draw(ops)
    args = draw(st.lists(words, max_size=5))
    for word in args:
        out += draw(blanks) + word
    out += draw(line_ends)
    if args and args[-1].isdigit() and len(args[-1]) < 10:
        size = int(args[-1]) if int(args[-1]) < 200 else 8
        out += b"x" * max(0, size + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))
        out += draw(line_ends)
    return out


@st.composite
def mutated_vector(draw: st.DrawFn) -> bytes:
    """A vector with a few bytes changed, inserted or removed."""
    data = bytearray(load(draw(st.sampled_from(NAMES)))[0])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"\r", b"\n", b" ", b"9", b"*"]))
        )
    return bytes(data)


any_limits = st.builds(
    reference.Limits,
    max_control_line=st.sampled_from([4096, 4096, 0, 8, 17, 18, 19, 32, 64]),
    max_payload=st.sampled_from([1048576, 1048576, 0, 8, 32]),
    pedantic=st.booleans(),
    headers=st.booleans(),
)


@settings(max_examples=1500, deadline=None)
@given(
    pieces=st.lists(st.one_of(frame_like(), mutated_vector(), st.binary(max_size=12)), max_size=4),
    tail=st.sampled_from([b"", b"x" * 64]),
    limits=any_limits,
)
@example(pieces=[b"PUB a 3\r\nabc"], tail=b"", limits=reference.Limits())
def test_parsers_agree_on_anything(
    pieces: list[bytes], tail: bytes, limits: reference.Limits
) -> None:
    """Every answer equal, along the whole stream and for every cut of its first frame; and an
    answer, once given, stays when more bytes arrive."""
    data = b"".join(pieces) + tail
    start = 0
    while start < len(data):
        status, frame = reference.parse(data[start:], limits)
        assert PARSERS["c"](data[start:], limits) == (status, frame)
        if status != 1:
            break
        assert frame is not None
        start += frame.bytes
    settled: tuple[int, Any] | None = None
    for end in range(min(len(data), 160) + 1):
        answer = PARSERS["c"](data[:end], limits)
        assert answer == reference.parse(data[:end], limits)
        if settled:
            assert answer == settled
        elif answer[0]:
            settled = answer


@settings(max_examples=500, deadline=None)
@given(
    subject=st.text(alphabet="ab.*> \r\n\t", max_size=8).map(str.encode), wildcards=st.booleans()
)
def test_subject_rules_agree(subject: bytes, wildcards: bool) -> None:
    valid = reference.subject_valid(subject, wildcards)
    assert protocol.subject_valid(subject, wildcards) == valid


@pytest.mark.parametrize(
    ("subject", "literal", "pattern"),
    [
        (b"a", True, True),
        (b"a.b.c", True, True),
        (b"a.*.c", False, True),
        (b"*", False, True),
        (b">", False, True),
        (b"a.>", False, True),
        (b"a.>.c", False, False),
        (b">.a", False, False),
        (b"a*.b>", True, True),
        (b"", False, False),
        (b".", False, False),
        (b"a.", False, False),
        (b".a", False, False),
        (b"a..b", False, False),
        (b"a b", False, False),
        (b"a\tb", False, False),
        (b"a\r", False, False),
    ],
)
def test_subject_rules(subject: bytes, literal: bool, pattern: bool) -> None:
    assert protocol.subject_valid(subject, wildcards=False) is literal
    assert protocol.subject_valid(subject, wildcards=True) is pattern
