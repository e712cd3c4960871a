"""The fixed work whose instructions are counted: run under valgrind by bench/instructions.py.

    python -m bench.instructions_load FILE

Each workload is set up, goes round a few times unmeasured, and then ROUNDS times: a read of
MESSAGES PUBs of 128 bytes, a turn of the router, a turn of the connection manager that carries out
its orders and writes. Every turn is a call of connmgr_turn() or router_turn(); FILE gets a line for
each, in their order: the workload and the stage, or a dash where it is not measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.rig import Rig

MESSAGES = 200
ROUNDS = 10
WARM_ROUNDS = 3
BODY = bytes(range(32, 128)) + bytes(range(64, 96))
FRAME = b"PUB load.one 128\r\n" + BODY + b"\r\n"
DELIVERY = b"MSG load.one 1 128\r\n" + BODY + b"\r\n"

# How many connections get each message.
WORKLOADS = {"1to1-128": 1, "fan10-128": 10}
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


def work(name: str, fan: int) -> list[str]:
    with Counted() as rig:
        subscribers = [rig.open(b"SUB load.one 1") for _ in range(fan)]
        publisher = rig.open()
        for number in range(WARM_ROUNDS + ROUNDS):
            measured = number >= WARM_ROUNDS
            rig.send(publisher, FRAME * MESSAGES)
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
                assert rig.receive(subscriber, len(DELIVERY) * MESSAGES) == DELIVERY * MESSAGES
        return rig.turns


def main() -> int:
    turns = [turn for name, fan in WORKLOADS.items() for turn in work(name, fan)]
    Path(sys.argv[1]).write_text("".join(f"{turn}\n" for turn in turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
