"""Fuzz target for atheris: whatever a file is, splitting it ends in slices or in a SplitError.

What is written can be read again. Run by scripts/fuzz.sh.
"""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import pairwise
from pathlib import Path

import atheris  # type: ignore[import-not-found]

from skippy_sched.errors import SplitError
from skippy_sched.split.architectures import even_cuts, layers_of, slice_entries
from skippy_sched.split.gguf import GgufFile
from skippy_sched.split.slices import _tensors

DATA_BYTES = 64 << 10  # as model.cpp
WHOLE = Path(f"/dev/shm/skippy-fuzz-{os.getpid()}.gguf")
SLICE = WHOLE.with_suffix(".slice")


def split_file(content: bytes) -> None:
    WHOLE.write_bytes(content + bytes(DATA_BYTES))
    with contextlib.suppress(SplitError), GgufFile(WHOLE) as model:
        layers = layers_of(model)
        bounds = [0, *even_cuts(layers, 2), layers.count]
        for start, end in pairwise(bounds):
            entries, held = slice_entries(model, layers, start, end, "0" * 64)
            last = end == layers.count
            model.write(SLICE, entries, _tensors(model.tensors, start, held, last))
            check_slice(start)


def check_slice(start: int) -> None:
    try:
        with GgufFile(SLICE) as written:
            assert written.number("skippy.stage.layer_start") == start
    except SplitError as error:
        raise AssertionError(f"a slice that was written cannot be read: {error}") from error


if __name__ == "__main__":
    atheris.instrument_all()  # the loader of an editable install is none that it can hook into
    atheris.Setup(sys.argv, split_file)
    try:
        atheris.Fuzz()
    finally:
        for path in (WHOLE, SLICE):
            path.unlink(missing_ok=True)
