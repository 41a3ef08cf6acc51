"""The fuzz targets, briefly: their seeds, what fuzzing has found, and seeded mutations of both.

scripts/fuzz.sh runs the same targets with coverage guidance, for as long as one likes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import skippy_sched.native as native
from skippy_sched.native import find_library

from .models import write_models, write_seeds

HERE = Path(__file__).parent
MUTATIONS = {"frames-sim": 3000, "frames-llama": 1000, "model-sim": 1000, "model-llama": 300}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_models(folder / "models")
    write_seeds(folder / "seeds")
    return folder


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The targets and the driver, compiled once for both engines."""
    folder = tmp_path_factory.mktemp("objects")
    for name in ("frames", "model", "replay"):
        command = ["c++", "-std=c++17", f"-I{Path(native.__file__).parent}", "-c"]
        subprocess.run([*command, HERE / f"{name}.cpp", "-o", folder / f"{name}.o"], check=True)
    return folder


@pytest.mark.parametrize("target", MUTATIONS)
def test_no_input_breaks_a_target(inputs: Path, objects: Path, target: str) -> None:
    source, engine = target.split("-")
    program, library = objects / target, find_library(engine)
    parts = [objects / f"{source}.o", objects / "replay.o", library]
    subprocess.run(
        ["c++", "-o", program, *parts, f"-Wl,-rpath,{library.absolute().parent}"], check=True
    )
    files = sorted((inputs / "seeds" / target).iterdir())
    files += sorted((HERE / "found" / target).glob("*"))
    last = inputs / f"{target}.last"
    done = subprocess.run(
        [program, "1", str(MUTATIONS[target]), *files],
        env={
            **os.environ,
            "SKIPPY_FUZZ_MODELS": str(inputs / "models" / engine),
            "SKIPPY_FUZZ_LAST": str(last),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr[-2000:]}\nthe input: {last.read_bytes().hex()}"
    assert done.stdout == f"{len(files)} inputs, {MUTATIONS[target]} mutations\n"
