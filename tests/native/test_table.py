"""The tables of docs/native.md are whole: no empty cell, and each test that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import skippy_sched.native as native
from skippy_sched.native import Model, StageSession

from .conftest import Engine

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "native.md"
SYMBOL = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_no_cell_is_empty() -> None:
    assert all(all(cells) for cells in rows())


def test_every_named_test_exists() -> None:
    named = [match.groups() for cells in rows() for match in SYMBOL.finditer(cells[-1])]
    assert len(named) > 60
    for file, test in named:
        assert f"def {test}(" in (HERE / file).read_text(), f"{file}::{test}"


def test_every_row_about_the_seed_names_a_test() -> None:
    start = DOCUMENT.read_text().index("## The seed, row by row")
    lines = DOCUMENT.read_text()[start:].splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    bodies = [line for line in table if not line.endswith("| test |")]
    assert bodies
    assert all(SYMBOL.search(line) for line in bodies)


def test_all_public_methods_of_sessions_are_in_the_document() -> None:
    text = DOCUMENT.read_text()
    public = {name for name in dir(StageSession) if not name.startswith("_")}
    own = {"address", "closed", "close", "raw", "abandon", "output_capacity"}
    missing = {name for name in public - own if name not in text}
    assert not missing


def test_what_is_exported_is_there() -> None:
    assert all(hasattr(native, name) for name in native.__all__)
    assert Model.create_session_from_resident_prefix.__doc__


def test_the_first_example_runs(sim: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    code = code.replace('find_library("llama")', 'find_library("sim")')
    exec(code.replace("model.gguf", str(sim.path)), {})
    assert capsys.readouterr().out.startswith("b'")
