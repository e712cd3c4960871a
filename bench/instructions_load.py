"""The fixed work whose instructions are counted: run under valgrind by bench/instructions.py.

    python -m bench.instructions_load FILE

Each workload is set up, goes round a few times unmeasured, and then ROUNDS times: a read of
MESSAGES PUBs of about 128 bytes, a turn of the router, a turn of the connection manager that
carries out its orders and writes. In a flow the router is not asked: the read delivers and writes
too. Every turn is a call of connmgr_turn() or router_turn(); FILE
gets a line for each, in their order: the workload and the stage, or a dash if it is not measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.rig import Rig

MESSAGES = 200
ROUNDS = 10
WARM_ROUNDS = 3
BODY = bytes(range(32, 128)) + bytes(range(64, 96))
STAGES = ("read", "route", "deliver")


@dataclass(frozen=True)
class Load:
    """How many connections get each message, and the sizes of those that follow each other.

    Messages of one size are a run, those of different sizes are not.
    """

    fan: int
    sizes: tuple[int, ...]
    flows: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES[:1] if self.flows else STAGES


WORKLOADS = {
    "1to1-128": Load(1, (128, 127)),
    "fan10-128": Load(10, (128, 127)),
    "run1to1-128": Load(1, (128,)),
    "runfan10-128": Load(10, (128,)),
    "flow1to1-128": Load(1, (128, 127), flows=True),
    "flowrun1to1-128": Load(1, (128,), flows=True),
    "flowrunfan10-128": Load(10, (128,), flows=True),
}
UNMEASURED = "-"


class Counted(Rig):
    """A rig that notes whose turn it was."""

    def __init__(self, flow_leases: bool) -> None:
        self.turns: list[str] = []
        self.label = UNMEASURED
        super().__init__(flow_leases)

    def turn_connmgr(self, index: int | None = None) -> None:
        self.turns.append(self.label)
        super().turn_connmgr(index)

    def turn_router(self) -> None:
        self.turns.append(self.label)
        super().turn_router()


def frames(verb: bytes, sizes: tuple[int, ...]) -> bytes:
    some = b"".join(b"%s %d\r\n%s\r\n" % (verb, size, BODY[:size]) for size in sizes)
    return some * (MESSAGES // len(sizes))


def work(name: str, load: Load) -> list[str]:
    sent, wanted = frames(b"PUB load.one", load.sizes), frames(b"MSG load.one 1", load.sizes)
    with Counted(load.flows) as rig:
        subscribers = [rig.open(b"SUB load.one 1") for _ in range(load.fan)]
        publisher = rig.open()
        for number in range(WARM_ROUNDS + ROUNDS):
            measured = number >= WARM_ROUNDS
            rig.send(publisher, sent)
            for stage in load.stages:
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
    turns = [turn for name, load in WORKLOADS.items() for turn in work(name, load)]
    Path(sys.argv[1]).write_text("".join(f"{turn}\n" for turn in turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
