"""Finding, loading and refusing libraries; what each message names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from skippy_sched.native import Library, LibraryError, find_library

from .conftest import a_foreign_library


def test_another_patch_version_is_refused_naming_both(tmp_path: Path) -> None:
    path = a_foreign_library(tmp_path / "libskippy-other.so", version=(0, 1, 64))
    with pytest.raises(LibraryError, match=r"ABI 0\.1\.64, but 0\.1\.63 is expected") as caught:
        Library.load(path)
    assert str(path) in str(caught.value)


def test_the_expected_version_is_a_choice(tmp_path: Path) -> None:
    path = a_foreign_library(tmp_path / "libskippy-other.so", version=(0, 1, 64))
    assert Library.load(path, (0, 1, 64)).version == (0, 1, 64)
    assert Library.load(path, None).version == (0, 1, 64)


def test_all_missing_symbols_are_named_at_once(tmp_path: Path) -> None:
    lacking = ("skippy_trim_session", "skippy_iteration_batch_sampled")
    path = a_foreign_library(tmp_path / "libskippy-less.so", lacking=lacking)
    with pytest.raises(LibraryError, match="lacks 2 required") as caught:
        Library.load(path)
    assert all(name in str(caught.value) for name in lacking)


def test_a_library_without_extensions_and_features_is_accepted(tmp_path: Path) -> None:
    library = Library.load(a_foreign_library(tmp_path / "libskippy-plain.so"))
    assert library.features == 0
    assert not library.offers("skippyx_model_facts")
    assert not library.offers("skippy_decode_step_frame_sampled_mtp")
    assert not library.has("ITERATION_BATCH")


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    path = tmp_path / "libempty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(LibraryError, match="not a libskippy"):
        Library.load(path)
    cut = tmp_path / "libcut.so"
    cut.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(LibraryError, match="cut short at 3000 bytes"):
        Library.load(cut)
    noise = tmp_path / "libnoise.so"
    noise.write_bytes(b"noise" * 100)
    with pytest.raises(LibraryError, match=re.escape(str(noise))):
        Library.load(noise)


def test_the_search_names_every_place_it_looked() -> None:
    with pytest.raises(LibraryError, match=r"libskippy-absent\.so") as caught:
        find_library("absent")
    assert "SKIPPY_SCHED_LIBRARY" in str(caught.value)


def test_the_environment_names_another_default_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libmine.so"
    path.touch()
    monkeypatch.setenv("SKIPPY_SCHED_LIBRARY", str(path))
    assert find_library() == path
    assert find_library("sim") != path
    monkeypatch.setenv("SKIPPY_SCHED_LIBRARY", str(tmp_path / "gone.so"))
    with pytest.raises(LibraryError, match="from SKIPPY_SCHED_LIBRARY"):
        find_library()


def test_features_answer_by_name_and_number(sim_library: Library) -> None:
    assert sim_library.has("iteration_batch")
    assert sim_library.has(28)
    assert "ITERATION_BATCH" in sim_library.feature_names()
    with pytest.raises(KeyError, match="unknown feature"):
        sim_library.has("TELEPATHY")


def test_there_is_a_device_with_a_name(sim_library: Library) -> None:
    devices = sim_library.devices()
    assert devices
    assert devices[0].name
