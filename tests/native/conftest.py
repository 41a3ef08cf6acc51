"""Engines under test, and builders of what the native layer takes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy_sched.native as native
from skippy_sched.default_model import default_model
from skippy_sched.errors import StartupError
from skippy_sched.native import (
    ABI,
    ActivationDesc,
    ActivationFrame,
    ActivationPartDesc,
    Library,
    Model,
    ModelOptions,
    StageSession,
    find_library,
)
from skippy_sched.native.cdef import ACTIVATION_PART_OPTIONAL, REQUIRED_SYMBOLS, ffi

SimModel = Callable[..., Path]
CUT_A, CUT_B = "a" * 64, "b" * 64  # identities of what crosses the two cuts of a split model


@dataclass(slots=True)
class Engine:
    """One engine with a model file; every model opened through it is closed with the test."""

    name: str
    library: Library
    path: Path
    opened: list[Model] = field(default_factory=list)

    def open(self, path: Path | None = None, **options: Any) -> Model:
        given: dict[str, Any] = {"ctx_size": 256, "lanes": 4, "n_batch": 64, "n_ubatch": 64}
        given |= {"n_threads": 1} | options
        model = Model.open(self.library, path or self.path, ModelOptions(**given))
        self.opened.append(model)
        return model

    def close(self) -> None:
        for model in self.opened:
            model.close()


@pytest.fixture(scope="session")
def sim_library() -> Library:
    return Library.load(find_library("sim"))


@pytest.fixture
def sim(sim_library: Library, sim_model: SimModel) -> Iterator[Engine]:
    """The simulated engine with a plain model."""
    engine = Engine("sim", sim_library, sim_model())
    yield engine
    engine.close()


@pytest.fixture(params=["sim", pytest.param("llama", marks=pytest.mark.llama)])
def engine(request: pytest.FixtureRequest, sim_model: SimModel) -> Iterator[Engine]:
    """Each engine in turn; llama only where its default model is or can be fetched."""
    if request.param == "sim":
        engine = Engine("sim", Library.load(find_library("sim")), sim_model())
    else:
        try:
            path = default_model()
        except StartupError as error:
            pytest.skip(f"no default model: {error}")
        engine = Engine("llama", Library.load(find_library("llama")), path)
    yield engine
    engine.close()


def add_fault(model: Model, rule: str) -> None:
    """Arm a fault of the simulated engine."""
    slot = model.library.error_slot()
    slot.check("add_fault", model.lib.skippyx_sim_add_fault(model.raw, rule.encode(), slot.out))


def clear_faults(model: Model) -> None:
    model.lib.skippyx_sim_clear_faults(model.raw)


def live_objects(library: Library) -> tuple[int, int, int]:
    """Errors, sessions and models of the simulated engine that were not freed."""
    out = ffi.new("uint64_t[3]")
    library.lib.skippyx_sim_live_objects(out, out + 1, out + 2)
    return int(out[0]), int(out[1]), int(out[2])


def a_stage(engine: Engine, start: int, end: int, *, n_layer: int = 4, **options: Any) -> Model:
    """Layers [start, end) of the simulated model, whose cuts are at layers 2 and 3."""
    cuts = {2: CUT_A, 3: CUT_B}
    return engine.open(
        stage_index=start,
        layer_start=start,
        layer_end=end,
        resident_tensor_names=("blk",),
        import_identities=(cuts[start],) if start else (),
        export_identities=(cuts[end],) if end < n_layer else (),
        **options,
    )


def a_null_session(
    model: Model,
    token_count: int = 0,
    *,
    terminal_stage: bool = True,
    batched_activation_exports: bool = True,
) -> StageSession:
    """A session whose native handle is NULL, of a stage of any kind."""
    return StageSession(
        model,
        ffi.NULL,
        token_count,
        terminal_stage=terminal_stage,
        batched_activation_exports=batched_activation_exports,
    )


def a_frame(
    payload_bytes: int = 1, payload: Any = b"\x01", *, optional: bool = False
) -> ActivationFrame:
    """A frame of one 1 x 1 F32 part that claims so many bytes."""
    part = ActivationPartDesc(
        rank=2,
        token_axis=1,
        flags=ACTIVATION_PART_OPTIONAL if optional else 0,
        dimensions=(1, 1, 0, 0),
        byte_strides=(4, 4, 0, 0),
        payload_bytes=payload_bytes,
    )
    desc = ActivationDesc.build([part], layer_end=1, token_count=1)
    return ActivationFrame(desc, payload)


def tokens_of(model: Model, count: int, first: int = 300) -> list[int]:
    """Some tokens that every engine's vocabulary has."""
    return [first + (7 * index) % 97 for index in range(count)]


def as_array(values: list[int]) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


def a_foreign_library(
    path: Path,
    *,
    version: tuple[int, int, int] = ABI,
    lacking: tuple[str, ...] = (),
    code: str = "",
) -> Path:
    """A tiny libskippy: `code` defines some calls, every other required one is UNSUPPORTED.

    Apart from those it lacks.
    """
    own, rest = path.with_suffix(".c"), path.with_suffix(".rest.c")
    numbers = ", ".join(map(str, version))
    own.write_text(
        '#include "skippy.h"\n#include <stdlib.h>\n'
        "struct skippy_abi_version skippy_abi_version(void) "
        f"{{ return (struct skippy_abi_version){{{numbers}}}; }}\n" + code
    )
    defined = {"skippy_abi_version", *lacking, *re.findall(r"\b(skippyx?_\w+)\(", code)}
    names = [name for name in REQUIRED_SYMBOLS if name not in defined]
    rest.write_text("".join(f"int {name}(void) {{ return 3; }}\n" for name in names))
    include = f"-I{Path(native.__file__).parent}"
    command = ["cc", "-std=c11", "-shared", "-fPIC", include, "-o", *map(str, (path, own, rest))]
    subprocess.run(command, check=True)
    return path
