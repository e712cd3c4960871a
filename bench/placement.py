"""On which cores processes ran: sampled while a load runs.

A sample reads, for every thread, the core it ran on last (field 39 of /proc/PID/task/TID/stat) and
the CPU time it has used; what it used since the sample before is put down to that core. The kernel
counts that time in hundredths of a second, so a load of a few milliseconds shows only where its
threads were. (psutil knows the last core of a process, not of a thread.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def span(cores: Iterable[int]) -> str:
    """The text `0-3,8` of {0, 1, 2, 3, 8}."""
    parts: list[str] = []
    ordered = sorted(cores)
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        parts.append(str(ordered[at]) if at == end else f"{ordered[at]}-{ordered[end]}")
        at = end + 1
    return ",".join(parts)


class Placement:
    """The cores of a load generator and of a server's processes."""

    def __init__(self, **groups: list[int]) -> None:
        self._groups = groups
        self._used: dict[tuple[int, int], int] = {}
        self._ticks: dict[str, dict[int, int]] = {name: {} for name in groups}
        self._seen: dict[str, set[int]] = {name: set() for name in groups}
        self._allowed: dict[str, set[int]] = {name: set() for name in groups}
        self.sample()
        for ticks in self._ticks.values():
            ticks.clear()  # what was used before the load

    def sample(self) -> None:
        for name, pids in self._groups.items():
            for pid in pids:
                self._sample_process(name, pid)

    def _sample_process(self, name: str, pid: int) -> None:
        try:
            self._allowed[name] |= os.sched_getaffinity(pid)
            tasks = os.listdir(f"/proc/{pid}/task")
        except (ProcessLookupError, FileNotFoundError):
            return
        for task in tasks:
            try:
                text = Path(f"/proc/{pid}/task/{task}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The name may have spaces; what follows its parenthesis does not. Field 3 is first.
            fields = text.rpartition(")")[2].split()
            used, core = int(fields[11]) + int(fields[12]), int(fields[36])
            before = self._used.get((pid, int(task)), 0)
            self._used[(pid, int(task))] = used
            if used > before:
                self._ticks[name][core] = self._ticks[name].get(core, 0) + used - before
            self._seen[name].add(core)

    def report(self) -> dict[str, Any]:
        """For each group: the cores it may use, and the share of its time on each it used."""
        result: dict[str, Any] = {}
        for name in self._groups:
            ticks = self._ticks[name]
            total = sum(ticks.values())
            shares = {str(core): round(ticks[core] / total, 2) for core in sorted(ticks)}
            if not shares:  # too short to be counted: where they were
                shares = {str(core): 0.0 for core in sorted(self._seen[name])}
            result[name] = {"allowed": span(self._allowed[name]), "share": shares}
        return result


def summary(reports: Iterable[dict[str, Any]], group: str) -> str:
    """Like `0+1 of 0-1`: the cores with a tenth of the time or more, over several reports."""
    sums: dict[str, float] = {}
    allowed = ""
    for report in reports:
        part = report.get(group)
        if not part:
            continue
        allowed = part["allowed"] or allowed
        for core, share in part["share"].items():
            sums[core] = sums.get(core, 0.0) + share
    total = sum(sums.values())
    cores = [core for core, share in sums.items() if not total or share / total >= 0.1]
    if not cores:
        return "?"
    return f"{'+'.join(sorted(cores, key=int))} of {allowed}"
