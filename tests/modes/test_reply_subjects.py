"""003-79: a responder is known by its reply subject, which nobody else can make up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from midair.client.api import Client
from tests.modes.clients import clients
from tests.support.handlers import Held
from tests.support.instance import Instance, cli, eventually
from tests.support.segments import Segments
from tests.support.server import run

PREFIX = "_midair.r."
DIGITS = 16
MASK = (1 << 64) - 1


def siphash(key: tuple[int, int], data: bytes) -> int:
    """SipHash-2-4, as its authors describe it."""

    def left(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & MASK

    a, b = key[0] ^ 0x736F6D6570736575, key[1] ^ 0x646F72616E646F6D
    c, d = key[0] ^ 0x6C7967656E657261, key[1] ^ 0x7465646279746573

    def rounds(count: int) -> None:
        nonlocal a, b, c, d
        for _ in range(count):
            a, c = (a + b) & MASK, (c + d) & MASK
            b, d = left(b, 13) ^ a, left(d, 16) ^ c
            a = left(a, 32)
            c, a = (c + b) & MASK, (a + d) & MASK
            b, d = left(b, 17) ^ c, left(d, 21) ^ a
            c = left(c, 32)

    whole = len(data) // 8 * 8
    last = data[whole:].ljust(7, b"\0") + bytes([len(data) & 0xFF])
    for at in [*range(0, whole, 8), whole]:
        block = data[at : at + 8] if at < whole else last
        word = int.from_bytes(block, "little")
        d ^= word
        rounds(2)
        a ^= word
    c ^= 0xFF
    rounds(4)
    return a ^ b ^ c ^ d


def test_the_hash_of_this_test_is_that_of_the_paper() -> None:
    key = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    assert siphash(key, bytes(range(15))) == 0xA129CA6149BE45E5
    assert siphash(key, bytes(range(8))) == 0x93F5F5799A932462


def parts(subject: str) -> tuple[str, str]:
    """The id and the token of a reply subject."""
    assert subject.startswith(PREFIX)
    digits = subject.removeprefix(PREFIX)
    assert len(digits) == 2 * DIGITS
    return digits[:DIGITS], digits[DIGITS:]


async def outstanding(
    client: Client, worker: Client, subject: str
) -> tuple[asyncio.Task[bytes], str]:
    """A request that a worker has not answered: what will come of it, and its reply subject."""
    handler = Held()
    await worker.serve(subject, handler)
    await worker.flush()
    answer = asyncio.create_task(client.ask(subject, b"x"))
    request = await handler.requests.get()
    return answer, request._message.reply


def test_the_token_is_a_keyed_hash_of_the_id(server: Instance, connmgrs: int) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            answer, reply = await outstanding(client, worker, "token")
            with Segments(server.name, connmgrs) as segments:
                key = segments.routing.reply_key[0], segments.routing.reply_key[1]
                assert key[0] != key[1], "it was made at random"
            number, token = parts(reply)
            wanted = siphash(key, int(number, 16).to_bytes(8, "little"))
            assert int(token, 16) == wanted
            await worker.nats.publish(reply, b"right")
            assert await answer == b"right"

    run(test())


def test_nobody_can_answer_for_another(server: Instance) -> None:
    """One who knows everything but the key: the very id, and what its own reply subjects were."""

    async def test() -> None:
        async with clients(server, 4) as (client, worker, thief, helper):
            seen = []
            for at in range(20):  # what it was itself asked shows how ids are counted
                answer, reply = await outstanding(helper, thief, f"own.{at}")
                seen.append(parts(reply))
                await thief.nats.publish(reply, b"mine")
                assert await answer == b"mine"
            answer, reply = await outstanding(client, worker, "secret")
            number, token = parts(reply)
            guesses = {number, *(number + own for _, own in seen)}
            guesses |= {number + "0" * DIGITS, number + "f" * DIGITS, number * 2}
            guesses |= {
                number + f"{(int(own, 16) + step) & MASK:016x}"
                for _, own in seen
                for step in range(-20, 20)
            }
            guesses |= {f"{int(number, 16) + step:016x}{token}" for step in range(1, 50)}
            guesses |= {number + token[:at] + ("1" if c == "0" else "0") + token[at + 1 :]
                        for at, c in enumerate(token)}  # fmt: skip
            guesses |= {(number + token).upper(), number + token + "0", number + token[:-1]}
            guesses -= {number + token}
            for guess in guesses:
                await thief.nats.publish(PREFIX + guess, b"forged")
            await thief.flush()
            await client.flush()
            assert not answer.done()
            await worker.nats.publish(reply, b"right")
            assert await answer == b"right"

    run(test())


def test_a_reply_subject_is_not_used_twice(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            seen = set()
            for at in range(200):
                answer, reply = await outstanding(client, worker, f"again.{at}")
                assert reply not in seen
                seen.add(reply)
                for old in list(seen - {reply})[-3:]:
                    await worker.nats.publish(old, b"late")
                await worker.nats.publish(reply, b"right")
                assert await answer == b"right"

    run(test())


def test_any_connection_that_was_told_may_answer(server: Instance) -> None:
    async def test() -> None:
        async with clients(server, 3) as (client, worker, other):
            answer, reply = await outstanding(client, worker, "told")
            await other.nats.publish(reply, b"for it")
            assert await answer == b"for it"

    run(test())


@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_it_holds_for_the_next_router(
    make_midair: Callable[..., Instance], connmgrs: int, how: str
) -> None:
    server = make_midair(connmgrs=connmgrs)

    async def test() -> None:
        async with clients(server, 2) as (client, worker):
            answer, reply = await outstanding(client, worker, f"next.{how}")
            old = server.pid("router")
            if how == "kill":
                os.kill(old, signal.SIGKILL)
            else:
                assert cli("upgrade", "router", "--name", server.name).returncode == 0
            eventually(lambda: server.pid("router") != old, "there is another one")
            await worker.nats.publish(reply, b"right")
            assert await answer == b"right"

    run(test(), patience_s=60)
