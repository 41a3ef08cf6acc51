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
    SamplingConfig,
    StageSession,
    find_library,
)
from skippy_sched.native.cdef import ACTIVATION_PART_OPTIONAL, REQUIRED_SYMBOLS, ffi
from skippy_sched.split.slices import split
from tests.gguf_files import attention_bytes, recurrent_bytes

SimModel = Callable[..., Path]
SAMPLED = SamplingConfig(enabled=True, temperature=0.9, top_k=40, seed=11)
FIRST_PREFIX = 8  # twice the four lanes
CUT_A, CUT_B = "a" * 64, "b" * 64  # identities of what crosses the two cuts of a split model


@dataclass(slots=True)
class Engine:
    """One engine with a model file; every model opened through it is closed with the test."""

    name: str
    library: Library
    path: Path
    slices: dict[tuple[int, int], Path] = field(default_factory=dict)
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


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with attention.gguf and recurrent.gguf, which the llama engine opens in no time."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "attention.gguf").write_bytes(attention_bytes())
    (folder / "recurrent.gguf").write_bytes(recurrent_bytes())
    return folder


@pytest.fixture(scope="session")
def small_slices(small_models: Path) -> dict[tuple[int, int], Path]:
    """The slices of attention.gguf by their layers, cut at layer 2 and at layers 2 and 3."""
    library = Library.load(find_library("llama"))
    slices: dict[tuple[int, int], Path] = {}
    for cuts in ([2], [2, 3]):
        folder = small_models / f"{len(cuts)}-cuts"
        manifest = split(small_models / "attention.gguf", folder, library, cuts=cuts)
        for stage in manifest.stages:
            slices[stage.layer_start, stage.layer_end] = folder / stage.file
    return slices


@pytest.fixture(params=["sim", "llama", pytest.param("default", marks=pytest.mark.llama)])
def engine(
    request: pytest.FixtureRequest, sim_model: SimModel, small_models: Path
) -> Iterator[Engine]:
    """Each engine in turn; llama with a small model and, where it is to be had, the default one."""
    if request.param == "sim":
        engine = Engine("sim", Library.load(find_library("sim")), sim_model())
    elif request.param == "llama":
        library = Library.load(find_library("llama"))
        engine = Engine("llama", library, small_models / "attention.gguf")
    else:
        try:
            path = default_model()
        except StartupError as error:
            pytest.skip(f"no default model: {error}")
        engine = Engine("llama", Library.load(find_library("llama")), path)
    yield engine
    engine.close()


@pytest.fixture(params=["sim", "llama"])
def cut_engine(
    request: pytest.FixtureRequest,
    sim_model: SimModel,
    small_models: Path,
    small_slices: dict[tuple[int, int], Path],
) -> Iterator[Engine]:
    """Each engine in turn, with a model of 4 layers that `a_stage` opens parts of."""
    path = sim_model() if request.param == "sim" else small_models / "attention.gguf"
    slices = {} if request.param == "sim" else small_slices
    engine = Engine(request.param, Library.load(find_library(request.param)), path, slices)
    yield engine
    engine.close()


@pytest.fixture(params=["sim", "llama"])
def recurrent_engine(
    request: pytest.FixtureRequest, sim_model: SimModel, small_models: Path
) -> Iterator[Engine]:
    """Each engine in turn, with a model whose memory is recurrent."""
    is_sim = request.param == "sim"
    path = sim_model(recurrent=True) if is_sim else small_models / "recurrent.gguf"
    engine = Engine(request.param, Library.load(find_library(request.param)), path)
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
    """Layers [start, end) of a model that is cut at layer 2, or at layers 2 and 3."""
    if engine.slices:
        return engine.open(engine.slices[start, end], stage_index=start, **options)
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


def a_session(model: Model, tokens: int = 6) -> StageSession:
    session = model.create_session()
    if tokens:
        session.prefill_chunk_frame(tokens_of(model, tokens))
    return session


def continuation(session: StageSession, count: int = 5, first: int = 310) -> list[int]:
    """Greedy tokens from here on."""
    token = first
    said = []
    for _ in range(count):
        token, _ = session.decode_step_frame(token)
        said.append(token)
    return said


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
