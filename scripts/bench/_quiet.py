"""How much processor time others took while something was measured. Linux only.

A neighbour on the same cores disturbs one server more than another; a round with one says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

#: seconds per unit of /proc
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def busy_s(stat: str) -> float:
    """Time that all processors were not idle, from the text of /proc/stat.

    Guests' time is part of user time; time stolen by the hypervisor counts as a neighbour's.
    """
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split()[1:9])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def process_s(stat: str) -> float:
    """A process's time of all threads, from the text of its /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


class Neighbours:
    """Counts from its making on; ``pids`` are the processes that are measured."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = [*pids, os.getpid()]
        self._since = self._read()

    def cores(self) -> float:
        """The mean number of cores that others kept busy."""
        before, now = self._since, self._read()
        others_s = (now[1] - before[1]) - (now[2] - before[2])
        return max(0.0, others_s / (now[0] - before[0]))

    def _read(self) -> tuple[float, float, float]:
        ours_s = sum(process_s(Path(f"/proc/{pid}/stat").read_text()) for pid in self._pids)
        return perf_counter(), busy_s(Path("/proc/stat").read_text()), ours_s
