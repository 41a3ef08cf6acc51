"""Runs many seeds of the whole-system simulation and prints a command for each that fails.

python scripts/simulation_storm.py --seeds 10000
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track

from skippy_sched.simulate.storm import run_seed

#: Seeds that one task runs: starting a task costs little beside them.
BLOCK = 25


def run_block(first: int, count: int, library: str) -> list[str]:
    """The failures among some seeds, in words."""
    failures = []
    with TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            try:
                run_seed(seed, Path(folder), library)
            except AssertionError as error:
                failures.append(str(error))
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (10,000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--library", default="sim", help="a simulated libskippy")
    options = parser.parse_args()
    console = Console(stderr=True)
    failures = 0
    firsts = range(options.first, options.first + options.seeds, BLOCK)
    with ProcessPoolExecutor(options.jobs) as pool:
        blocks = [
            pool.submit(
                run_block,
                first,
                min(BLOCK, options.first + options.seeds - first),
                options.library,
            )
            for first in firsts
        ]
        for block in track(blocks, "seeds", console=console, disable=not sys.stderr.isatty()):
            for failure in block.result():
                failures += 1
                sys.stdout.write(f"{failure}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{options.seeds:,} runs, {failures:,} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
