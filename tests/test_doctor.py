"""The doctor command: what it says of libraries and models, good and bad, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skippy_sched.cli import main
from skippy_sched.native import Library, find_library
from skippy_sched.split.slices import split

from .conftest import SimModel
from .gguf_files import attention_bytes
from .native.conftest import a_foreign_library

Doctor = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def doctor(sim_model: SimModel, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs it; gives the exit code, what was said by heading, and the errors."""

    def run(*arguments: str, model: Path | None = None) -> tuple[int, dict[str, str], str]:
        code = main(["doctor", "--model", str(model or sim_model()), *arguments])
        printed = capsys.readouterr()
        said: dict[str, str] = {}
        for line in printed.out.splitlines():
            heading, value = line[:16].strip(), line[16:]
            said[heading] = f"{said[heading]}\n{value}" if heading in said else value
        return code, said, printed.err

    return run


def test_it_tells_the_library_and_the_model_that_serve_would_use(doctor: Doctor) -> None:
    code, said, errors = doctor("--library", "sim", "--lanes", "3")
    assert (code, errors) == (0, "")
    assert said["library"].endswith("libskippy-sim.so")
    assert said["ABI"] == "0.1.63 (0.1.63 is expected)"
    assert "ITERATION_BATCH" in said["features"].split(", ")
    assert said["device"].startswith("CPU (simulated device)")
    assert said["architecture"] == "skippy-sim"
    assert said["layers"] == "4, of width 8"
    assert said["vocabulary"] == "512 tokens"
    assert said["context"].endswith("2,048 in each of 3 lanes")
    assert said["KV cache"] == "a fixed share per lane, 6,144 cells"
    assert said["chat template"] == "yes"


def test_it_tells_what_a_model_cannot_do(doctor: Doctor, sim_model: SimModel) -> None:
    model = sim_model(recurrent=True, chat_template="")
    code, said, _ = doctor("--library", "sim", model=model)
    assert code == 0
    assert said["chat template"] == "no"
    assert said["KV cache"].startswith("a fixed share per lane, recurrent")
    assert "the prefix cache: a recurrent memory" in said["unavailable"]
    assert "the model's own chat format" in said["unavailable"]


def test_another_patch_version_is_shown_and_ends_as_serve_does(
    doctor: Doctor, tmp_path: Path
) -> None:
    library = a_foreign_library(tmp_path / "libskippy-other.so", version=(0, 1, 64))
    code, said, errors = doctor("--library", str(library))
    assert code == 69
    assert said["ABI"] == "0.1.64 (0.1.63 is expected)"
    assert said["features"] == "it tells none"
    assert "log-probabilities: the library lacks skippyx_session_logprobs" in said["unavailable"]
    (line,) = errors.splitlines()
    assert "speaks skippy ABI 0.1.64, but 0.1.63 is expected exactly" in line


def test_another_version_that_the_configuration_expects_is_no_fault(
    doctor: Doctor, tmp_path: Path
) -> None:
    """It ends later, where this library, which can do nothing, opens the model."""
    library = a_foreign_library(tmp_path / "libskippy-other.so", version=(0, 1, 64))
    config = tmp_path / "config.toml"
    config.write_text('[engine]\nexpected_abi = "0.1.64"\n')
    code, said, errors = doctor("--library", str(library), "--config", str(config))
    assert code == 69
    assert said["ABI"] == "0.1.64 (0.1.64 is expected)"
    assert said["device"].startswith("cannot be listed: skippy_backend_device_count: Unsupported")
    assert "skippy_model_open: Unsupported" in errors


def test_missing_symbols_are_shown_with_what_they_are_for(doctor: Doctor, tmp_path: Path) -> None:
    lacking = ("skippy_trim_session", "skippy_session_save_prefix", "skippy_tokenize")
    library = a_foreign_library(tmp_path / "libskippy-less.so", lacking=lacking)
    code, said, errors = doctor("--library", str(library))
    assert code == 69
    lines = said["unavailable"].splitlines()
    assert "the prefix cache: the library lacks skippy_session_save_prefix" in lines
    assert (
        "recovery of the other requests when one fails: the library lacks skippy_trim_session"
        in lines
    )
    assert "everything: the library lacks skippy_tokenize" in lines
    (line,) = errors.splitlines()
    assert "lacks 3 required symbol(s)" in line


def test_a_feature_that_is_not_advertised_takes_its_function_away(
    doctor: Doctor, tmp_path: Path
) -> None:
    code = "uint64_t skippy_abi_features(void) { return (uint64_t)1 << 28; }\n"
    library = a_foreign_library(tmp_path / "libskippy-few.so", code=code)
    _, said, _ = doctor("--library", str(library))
    assert said["features"] == "ITERATION_BATCH"
    assert "split models: the library does not have the feature ACTIVATION_BOUNDARY" in (
        said["unavailable"].splitlines()
    )
    assert "continuous batching" not in said["unavailable"]


CODE_THAT_OPENS = r"""
struct skippy_model { int open; };
enum skippy_status skippy_model_open(const char *path, const struct skippy_runtime_config *config,
                                     struct skippy_model **out, struct skippy_error **error) {
    *out = calloc(1, sizeof **out);
    return 0;
}
enum skippy_status skippy_model_free(struct skippy_model *model, struct skippy_error **error) {
    free(model);
    return 0;
}
bool skippy_model_output_activation_boundary(const struct skippy_model *model,
                                             struct skippy_activation_boundary_desc *out) {
    return false;
}
bool skippy_model_input_activation_boundary(const struct skippy_model *model,
                                            struct skippy_activation_boundary_desc *out) {
    return false;
}
"""


def test_a_library_that_tells_nothing_of_its_model_cannot_serve(
    doctor: Doctor, tmp_path: Path
) -> None:
    library = a_foreign_library(tmp_path / "libskippy-mute.so", code=CODE_THAT_OPENS)
    code, _, errors = doctor("--library", str(library))
    assert code == 69
    assert "does not tell what it has opened" in errors


@pytest.mark.parametrize("arguments", [["--library", "absent"], ["--library", "sim"]])
def test_what_is_missing_is_one_line_and_69(
    doctor: Doctor, tmp_path: Path, arguments: list[str]
) -> None:
    code, _, errors = doctor(*arguments, model=tmp_path / "absent.gguf")
    assert code == 69
    assert len(errors.splitlines()) == 1


def test_a_broken_chat_template_ends_as_serve_does(doctor: Doctor, sim_model: SimModel) -> None:
    model = sim_model(chat_template="{% for %}")
    code, said, errors = doctor("--library", "sim", model=model)
    assert code == 69
    assert said["chat template"] == "yes"
    assert "does not compile" in errors


def test_a_wrong_flag_is_a_configuration_error(doctor: Doctor) -> None:
    assert doctor("--lanes", "0")[0] == 78


def test_a_split_model_is_told_as_one_and_a_stage_alone_refused(
    doctor: Doctor, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(attention_bytes(width=32))
    folder = tmp_path / "stages"
    split(whole, folder, Library.load(find_library("llama")), stages=2)
    code, said, _ = doctor("--lanes", "1", model=folder / "manifest.json")
    assert code == 0
    assert said["layers"] == "4, of width 32"
    assert said["model"].splitlines()[1] == f"{folder / 'stage-1.gguf'} (stage 1)"
    code, _, errors = doctor("--lanes", "1", model=folder / "stage-1.gguf")
    assert code == 69
    assert "holds some layers of a model only" in errors


@pytest.mark.llama
def test_it_tells_the_default_model(default_model: Path, doctor: Doctor) -> None:
    code, said, _ = doctor("--library", "llama", "--lanes", "1", model=default_model)
    assert code == 0
    assert said["architecture"] == "llama"
    assert said["layers"] == "30, of width 576"
    assert said["vocabulary"] == "49,152 tokens"
    assert 'speculation.method = "mtp"' in said["unavailable"]


@pytest.mark.parametrize(
    ("name", "what"), [("missing.gguf", "does not exist"), (".", "is not a file")]
)
def test_a_model_that_is_no_file_is_named_with_what_it_is(
    doctor: Doctor, tmp_path: Path, name: str, what: str
) -> None:
    code, _, errors = doctor(model=tmp_path / name)
    assert code != 0
    assert f"model.path: {tmp_path / name} {what}" in errors
