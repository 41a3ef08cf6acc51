"""Splitting a real model, and what is refused or taken back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.cli import main
from skippy_sched.errors import SplitError
from skippy_sched.native import Library, TokenSignal, find_library
from skippy_sched.split.manifest import MANIFEST_FILE, read_manifest
from skippy_sched.split.selfcheck import Run, compare, run
from skippy_sched.split.slices import split
from tests.gguf_files import a_cuttable_file
from tests.native.conftest import a_foreign_library


@pytest.mark.llama
@pytest.mark.timeout(180)
def test_the_command_splits_checks_and_says_the_numbers(
    default_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stages"
    assert main(["split", str(default_model), "--at", "10,20", "-o", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "17/17 tokens and 17/17 token signals bit-equal" in said
    manifest, files = read_manifest(folder / MANIFEST_FILE)
    assert [(s.layer_start, s.layer_end) for s in manifest.stages] == [(0, 10), (10, 20), (20, 30)]
    assert manifest.source.sha256.startswith("b179c952")
    identities = [stage.output_identity for stage in manifest.stages]
    assert [len(identity or "") for identity in identities] == [64, 64, 0]
    # The stages of another cut are of the same model but not of the same place.
    library = Library.load(find_library("llama"))
    with pytest.raises(SplitError, match="could not run"):
        run(library, [files[0], files[2]])
    assert main(["split", str(default_model), "--stages", "2", "-o", str(folder)]) == 65
    assert "not an empty folder" in capsys.readouterr().err


def test_nothing_is_kept_when_the_check_fails(tmp_path: Path) -> None:
    library = Library.load(a_foreign_library(tmp_path / "refuses.so"))
    model = a_cuttable_file(tmp_path / "model.gguf")
    before = set(tmp_path.iterdir())
    said: list[str] = []
    with pytest.raises(SplitError, match="could not run"):
        split(model, tmp_path / "stages", library, stages=3, say=said.append)
    assert said[0].startswith("stage-0.gguf: layers 0 to 1 (and layer 2, idle)")
    assert set(tmp_path.iterdir()) == before


def a_run(*signals: float) -> Run:
    return Run(
        [5] * len(signals), [TokenSignal(1, value, -2, 1, 5, 6) for value in signals], ["id"]
    )


def test_runs_that_differ_in_one_signal_are_not_equal() -> None:
    compare(a_run(-1, -0.5), a_run(-1, -0.5))
    with pytest.raises(SplitError, match=r"of 2 tokens 2 .* signals 1 .* up to 0\.25"):
        compare(a_run(-1, -0.5), a_run(-1, -0.75))


def test_a_number_of_stages_or_a_folder_that_cannot_be_is_refused_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(a_cuttable_file(tmp_path / "model.gguf"))
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for stages, folder, message in [
        ("0", tmp_path / "x", "0 stages: "),
        ("-1", tmp_path / "x", "-1 stages: "),
        ("2", tmp_path / ("x" * 300), "File name too long"),
        ("2", dangling, "remove it or name another"),
    ]:
        assert main(["split", model, "--stages", stages, "-o", str(folder)]) == 65
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def test_a_damaged_vocabulary_list_costs_no_more_than_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF")
    assert main(["split", str(path), "--stages", "2", "-o", str(tmp_path / "x")]) == 65
    assert capsys.readouterr().err.count("\n") == 1


Change = Callable[[dict[str, Any]], object]
CHANGES: list[tuple[Change, str]] = [
    (lambda m: m.update(skippy_stages=2), "version 2"),
    (lambda m: m.pop("source"), "source: Field required"),
    (lambda m: m["stages"].pop(0), "do not cover"),
    (lambda m: m["stages"][1].update(layer_start=3), "do not cover"),
    (lambda m: m["stages"][1].update(input_identity="ff"), "not what the next one takes"),
    (lambda m: m["stages"][1].update(bytes=5), "has 3 bytes, not 5"),
    (lambda m: m["stages"][1].update(file="gone.gguf"), "is missing"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_manifest_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    def a_slice(start: int, identities: tuple[str | None, str | None]) -> dict[str, Any]:
        (tmp_path / f"{start}.gguf").write_bytes(b"abc")
        return {
            "file": f"{start}.gguf",
            "bytes": 3,
            "layer_start": start,
            "layer_end": start + 2,
            "idle_layer": start == 0,
            "input_identity": identities[0],
            "output_identity": identities[1],
        }

    manifest = {
        "skippy_stages": 1,
        "source": {"file": "m.gguf", "bytes": 9, "sha256": "0"},
        "architecture": "llama",
        "layers": 4,
        "stages": [a_slice(0, (None, "aa")), a_slice(2, ("aa", None))],
        "check": {"prompt_tokens": 16, "decoded_tokens": 16, "token_signals": 17},
    }
    path = tmp_path / MANIFEST_FILE
    path.write_text(json.dumps(manifest))
    assert read_manifest(path)[1] == [tmp_path / "0.gguf", tmp_path / "2.gguf"]
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(SplitError, match=message):
        read_manifest(path)
