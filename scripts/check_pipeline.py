"""Compares split models with whole ones, bit by bit, and prints the numbers.

python scripts/check_pipeline.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from _gemma import gemma_model
from rich.console import Console
from rich.table import Table

from skippy_sched.default_model import default_model
from skippy_sched.native import Library, find_library
from skippy_sched.split.manifest import MANIFEST_FILE, read_manifest
from skippy_sched.split.selfcheck import Run, run
from skippy_sched.split.slices import split

PROMPT_TOKENS, DECODED_TOKENS, SEQUENCES = 50, 30, 3
#: gemma's layers repeat a pattern of six, so it is cut at multiples of six.
CUTS = {"SmolLM2-135M": ([15], [10, 20]), "gemma-3-270m": ([6], [6, 12])}
#: One graph for all rows of a prefill, and several.
MICROBATCHES = (512, 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(CUTS), choices=list(CUTS))
    parser.add_argument("--library", default="llama", help="a libskippy that runs GGUF files")
    options = parser.parse_args()
    library = Library.load(find_library(options.library))
    table = Table(
        title=f"{SEQUENCES} sequences batched, prompts of {PROMPT_TOKENS} tokens, "
        f"{DECODED_TOKENS} decodes, 1 thread, KV per lane"
    )
    for column in ("model", "stages", "cut at", "n_ubatch", "equal tokens", "equal signals", "s"):
        table.add_column(column)
    equal = True
    for name in options.models:
        path = default_model() if name.startswith("Smol") else gemma_model()
        equal &= compare_model(name, path, library, table)
    Console().print(table)
    sys.stdout.write("all bit-equal\n" if equal else "NOT EQUAL\n")
    return 0 if equal else 1


def compare_model(name: str, path: Path, library: Library, table: Table) -> bool:
    equal = True
    with TemporaryDirectory() as folder:
        split_files = [split_at(path, cuts, Path(folder), library) for cuts in CUTS[name]]
        for microbatch in MICROBATCHES:
            whole = measure(library, [path], microbatch)
            for cuts, files in zip(CUTS[name], split_files, strict=True):
                began = time.perf_counter()
                parts = measure(library, files, microbatch)
                tokens = sum(a == b for a, b in zip(whole.tokens, parts.tokens, strict=True))
                signals = sum(a == b for a, b in zip(whole.signals, parts.signals, strict=True))
                count = len(whole.tokens)
                equal &= tokens == signals == count
                table.add_row(
                    name,
                    str(len(files)),
                    ", ".join(map(str, cuts)),
                    str(microbatch),
                    f"{tokens}/{count}",
                    f"{signals}/{count}",
                    f"{time.perf_counter() - began:.1f}",
                )
    return equal


def split_at(path: Path, cuts: list[int], folder: Path, library: Library) -> list[Path]:
    target = folder / "-".join(map(str, cuts))
    split(path, target, library, cuts=cuts)
    return read_manifest(target / MANIFEST_FILE)[1]


def measure(library: Library, files: Sequence[Path], microbatch: int) -> Run:
    return run(
        library,
        files,
        prompt_tokens=PROMPT_TOKENS,
        decoded_tokens=DECODED_TOKENS,
        sequences=SEQUENCES,
        n_ubatch=microbatch,
    )


if __name__ == "__main__":
    sys.exit(main())
