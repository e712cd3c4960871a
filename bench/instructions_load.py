"""The fixed work whose instructions are counted: run under valgrind by bench/instructions.py.

    python -m bench.instructions_load FILE

Each workload is set up, goes round a few times unmeasured, and then ROUNDS times: a read of
MESSAGES PUBs of about 128 bytes, a turn of the router, a turn of the connection manager that
carries out its orders and writes. Every turn is a call of connmgr_turn() or router_turn(); FILE
gets a line for each, in their order: the workload and the stage, or a dash if it is not measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.rig import Rig

MESSAGES = 200
ROUNDS = 10
WARM_ROUNDS = 3
BODY = bytes(range(32, 128)) + bytes(range(64, 96))

# How many connections get each message, and the sizes of those that follow each other: messages of
# one size are a run, those of different sizes are not.
WORKLOADS = {
    "1to1-128": (1, (128, 127)),
    "fan10-128": (10, (128, 127)),
    "run1to1-128": (1, (128,)),
    "runfan10-128": (10, (128,)),
}
STAGES = ("read", "route", "deliver")
UNMEASURED = "-"


class Counted(Rig):
    """A rig that notes whose turn it was."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.label = UNMEASURED
        super().__init__()

    def turn_connmgr(self) -> None:
        self.turns.append(self.label)
        super().turn_connmgr()

    def turn_router(self) -> None:
        self.turns.append(self.label)
        super().turn_router()


def frames(verb: bytes, sizes: tuple[int, ...]) -> bytes:
    some = b"".join(b"%s %d\r\n%s\r\n" % (verb, size, BODY[:size]) for size in sizes)
    return some * (MESSAGES // len(sizes))


def work(name: str, fan: int, sizes: tuple[int, ...]) -> list[str]:
    sent, wanted = frames(b"PUB load.one", sizes), frames(b"MSG load.one 1", sizes)
    with Counted() as rig:
        subscribers = [rig.open(b"SUB load.one 1") for _ in range(fan)]
        publisher = rig.open()
        for number in range(WARM_ROUNDS + ROUNDS):
            measured = number >= WARM_ROUNDS
            rig.send(publisher, sent)
            for stage in STAGES:
                rig.label = f"{name} {stage}" if measured else UNMEASURED
                if stage == "route":
                    rig.turn_router()
                else:
                    rig.turn_connmgr()
            rig.label = UNMEASURED
            # What one turn did not finish is finished unmeasured, so that every round is alike.
            rig.drain()
            for subscriber in subscribers:
                assert rig.receive(subscriber, len(wanted)) == wanted
        return rig.turns


def main() -> int:
    turns = [turn for name, load in WORKLOADS.items() for turn in work(name, *load)]
    Path(sys.argv[1]).write_text("".join(f"{turn}\n" for turn in turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
