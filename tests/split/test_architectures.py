"""Which models can be cut, and where."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_sched.errors import SplitError
from skippy_sched.split.architectures import (
    Layers,
    check_cuts,
    even_cuts,
    layers_of,
    slice_entries,
)
from skippy_sched.split.gguf import GgufFile
from tests.gguf_files import a_cuttable_file


def read(path: Path) -> Layers:
    with GgufFile(path) as model:
        return layers_of(model)


@given(count=st.integers(2, 100), period=st.integers(1, 7), stages=st.integers(1, 12))
def test_even_cuts_are_allowed_cuts_of_nearly_equal_stages(
    count: int, period: int, stages: int
) -> None:
    layers = Layers("llama", count, period)
    places = (count - 1) // period
    if not 2 <= stages <= places + 1:
        with pytest.raises(SplitError, match="stages"):
            even_cuts(layers, stages)
        return
    cuts = even_cuts(layers, stages)
    check_cuts(layers, cuts)
    bounds = [0, *cuts, count]
    sizes = [after - before for before, after in pairwise(bounds)]
    assert len(sizes) == stages
    assert period > 1 or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("cuts", "message"),
    [([], "no cut"), ([3, 3], "ascend"), ([0], "ascend"), ([12], "ascend"), ([10], "pattern of 6")],
)
def test_a_cut_that_cannot_be_is_refused(cuts: list[int], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        check_cuts(Layers("gemma3", 12, 6), cuts)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"architecture": "gemma3n"}, "not known to be exact"),
        ({"block_count": 2**32 - 1}, "names 4294967295 layers, but has 8 tensors"),
        ({"architecture": "gemma3", "layers": 62}, "number of layers"),
        ({"architecture": "gemma3", "attention__sliding_window_pattern": [1, 1, 0]}, "a list"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"swiglu_limits": [1, 2]}, "unknown meaning"),
        ({"attention__head_count": [4, 4]}, "2 items for 6 layers"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(SplitError, match=message):
        read(a_cuttable_file(tmp_path / "model.gguf", **model))


def test_the_period_of_gemma_is_six_or_what_the_file_says(tmp_path: Path) -> None:
    assert read(a_cuttable_file(tmp_path / "a.gguf", architecture="gemma3")).period == 6
    pattern = {"attention__sliding_window_pattern": 4}
    assert read(a_cuttable_file(tmp_path / "b.gguf", architecture="gemma3", **pattern)).period == 4


def test_a_slice_has_its_own_count_its_part_of_lists_and_the_stage_keys(tmp_path: Path) -> None:
    path = a_cuttable_file(
        tmp_path / "model.gguf", feed_forward_length=[10, 11, 12, 13, 14, 15], x=5
    )
    part = tmp_path / "part.gguf"
    with GgufFile(path) as model:
        entries, held = slice_entries(model, layers_of(model), 2, 4, "d" * 64)
        model.write(part, entries, [])
    assert held == 5
    with GgufFile(part) as model:
        assert model.number("llama.block_count") == 3
        assert model.number("llama.x") == 5
        key = model.keys["llama.feed_forward_length"]
        assert key.count == 3
        assert model.raw(key).endswith(b"\x0c\0\0\0\x0d\0\0\0\x0e\0\0\0")
        stage = {
            name: model.number(f"skippy.stage.{name}") for name in ("layer_start", "layer_end")
        }
        assert stage == {"layer_start": 2, "layer_end": 4}
        assert model.number("skippy.stage.n_layer") == 6
        assert model.text("skippy.stage.model_digest") == "d" * 64
        assert model.number("skippy.stage.idle_layer") is True
        with pytest.raises(SplitError, match="a slice already"):
            layers_of(model)
