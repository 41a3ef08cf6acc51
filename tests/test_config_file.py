"""Configuration: where values come from, and what is said about wrong ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from skippy_sched.config import Config
from skippy_sched.config_file import load_config, reference_toml, to_toml
from skippy_sched.config_page import page
from skippy_sched.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parent.parent / "config").glob("*.toml"))

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write_file


def problems(path: Path | None = None, **environ: str) -> list[str]:
    """The lines of the ConfigError that loading must raise, without the file's directory."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ=environ)
    text = str(caught.value)
    return text.replace(f"{path.parent}/" if path else "\0", "").splitlines()


def test_without_anything_the_defaults_hold() -> None:
    assert load_config(environ={}) == Config()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(write: Write) -> None:
    path = write("[server]\nport = 1\nhost = 'file'\n[engine]\nlanes = 2\n")
    environ = {"SKIPPY_SCHED__SERVER__PORT": "2", "SKIPPY_SCHED__SERVER__HOST": "environ"}
    config = load_config(path, environ=environ, flags={"--port": (("server", "port"), 3)})
    assert (config.server.port, config.server.host, config.engine.lanes) == (3, "environ", 2)


def test_environment_values_take_the_type_of_their_key() -> None:
    environ = {
        "SKIPPY_SCHED__MODEL__NAME": "123",
        "SKIPPY_SCHED__ENGINE__DETERMINISTIC": "true",
        "SKIPPY_SCHED__ENGINE__THREADS": "1",
        "SKIPPY_SCHED__ENGINE__KV_TYPE": "q8_0",
        "SKIPPY_SCHED__SERVER__DRAIN_TIMEOUT_S": "2.5",
        "SKIPPY_SCHED__SERVER__API_KEYS": "first, second",
        "SKIPPY_SCHED_CACHE": "not ours",
    }
    config = load_config(environ=environ)
    assert config.model.name == "123"
    assert config.engine.deterministic is True
    assert (config.engine.threads, config.engine.kv_type) == (1, "q8_0")
    assert config.server.drain_timeout_s == 2.5
    assert [key.get_secret_value() for key in config.server.api_keys] == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[engine]\nlanes = 0\n", "config.toml:2: engine.lanes: 0 is below 1"),
        ("[engine]\n\nlanes = 999 # many\n", "config.toml:3: engine.lanes: 999 is above 256"),
        (
            '[engine]\nlanes = "8"\n',
            'config.toml:2: engine.lanes: expected an integer, found "8"',
        ),
        ("engine.lanes = true\n", "config.toml:1: engine.lanes: expected an integer, found true"),
        (
            "engine = {kv = 'all'}\n",
            "config.toml:1: engine.kv: expected 'per_lane' or 'shared', found \"all\"",
        ),
        (
            "[scheduler]\nwaiting_request_max = 1\n",
            "config.toml:2: scheduler.waiting_request_max: unknown key; "
            "did you mean waiting_requests_max?",
        ),
        ("[servers]\nport = 1\n", "config.toml:1: servers: unknown section; did you mean server?"),
        ("server = 5\n", "config.toml:1: server: expected a table of keys, found 5"),
        ("[scheduler]\nwatchdog_s = 0\n", "config.toml:2: scheduler.watchdog_s: 0 is not above 0"),
        (
            "[server]\ndrain_timeout_s = nan\n",
            "config.toml:2: server.drain_timeout_s: nan is below 0",
        ),
        ("[server]\nhost = ''\n", "config.toml:2: server.host: expected a text that is not empty"),
    ],
)
def test_a_wrong_value_is_one_line_with_place_bound_and_finding(
    write: Write, text: str, line: str
) -> None:
    assert problems(write(text)) == [line]


def test_all_problems_are_told_at_once(write: Write) -> None:
    text = "[engine]\nlanes = 0\nkw = 1\n\n[server]\nport = -1\n\n[log]\nlevel = 3\n"
    found = problems(write(text), SKIPPY_SCHED__SCHEDULER__WATCHDOG_S="fast")
    assert {line.partition(": ")[0] for line in found} == {
        "config.toml:2",
        "config.toml:3",
        "config.toml:6",
        "config.toml:9",
        "SKIPPY_SCHED__SCHEDULER__WATCHDOG_S",
    }


def test_a_contradiction_between_keys_is_explained(write: Write) -> None:
    (line,) = problems(write("[engine]\nlanes = 64\nbatch_tokens = 32\n"))
    assert line.startswith("config.toml:1: engine: batch_tokens is 32, below lanes = 64")
    assert "raise batch_tokens" in line


def test_lines_are_counted_through_multi_line_texts(write: Write) -> None:
    text = '[model]\nname = """\n[engine]\nlanes = 1\n"""\n\n["engine"]\n"lanes" = 0\n'
    assert problems(write(text)) == ["config.toml:8: engine.lanes: 0 is below 1"]


def test_a_long_finding_is_cut(write: Write) -> None:
    (line,) = problems(write(f'[engine]\nlanes = "{"x" * 5000}"\n'))
    assert len(line) < 200


def test_an_api_key_is_never_shown(write: Write) -> None:
    assert "secret" not in "".join(problems(write('[server]\napi_keys = {a = "secret"}\n')))
    shown = to_toml(load_config(write('[server]\napi_keys = ["secret"]\n'), environ={}))
    assert "secret" not in shown
    assert "api_keys: 1 set" in shown


@pytest.mark.parametrize("text", ["[engine\n", "lanes = \n", "a = 1\na = 2\n", "[engine]\n\x00"])
def test_a_file_that_is_no_toml_says_where(write: Write, text: str) -> None:
    (line,) = problems(write(text))
    assert line.startswith("config.toml: not valid TOML: ")
    assert "line" in line


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "No such file" in problems(tmp_path / "missing.toml")[0]
    assert "directory" in problems(tmp_path)[0]
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    assert "not UTF-8 at byte 2" in problems(latin)[0]


@pytest.mark.parametrize("name", ["SKIPPY_SCHED__LANES", "SKIPPY_SCHED__"])
def test_a_variable_of_another_form_is_refused(name: str) -> None:
    (line,) = problems(**{name: "1"})
    assert line.startswith(f"{name}: the form is ")


def test_an_unknown_variable_is_refused() -> None:
    (line,) = problems(SKIPPY_SCHED__ENGINE__LANE="1")
    assert line == "SKIPPY_SCHED__ENGINE__LANE: engine.lane: unknown key; did you mean lanes?"


def test_what_is_printed_loads_to_the_same(write: Write) -> None:
    text = '[model]\nname = "a \\"b\\" ü\\n"\n[engine]\nthreads = 3\n'
    text += '[scheduler]\nwatchdog_s = 1e9\ntenant_weights = {"a b" = 2.0, c = 1.5}\n'
    config = load_config(write(text), environ={})
    assert load_config(write(to_toml(config)), environ={}) == config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    load_config(path, environ={})


def test_the_reference_file_is_the_one_that_the_models_give() -> None:
    path = EXAMPLES[0].parent / "reference.toml"
    assert path.read_text() == reference_toml()
    assert load_config(path, environ={}) == Config()
    assert set(tomllib.loads(reference_toml())) == set(Config.model_fields)


def test_the_page_of_the_configuration_is_the_one_that_the_models_give() -> None:
    """Otherwise: ``python -m skippy_sched.config_page`` writes it and the reference file anew."""
    text = (EXAMPLES[0].parents[1] / "docs" / "configuration.md").read_text()
    assert text == page()
    for name in Config.model_fields:
        assert f"## `[{name}]`" in text
        for key in getattr(Config(), name).model_dump():
            assert f"\n| `{key}`" in text


def test_every_key_is_described() -> None:
    text = reference_toml().splitlines()
    keys = [number for number, line in enumerate(text) if re.match(r"(# )?\w+ =", line)]
    assert keys
    undescribed = [text[n] for n in keys if not text[n - 1].startswith("# ")]
    assert undescribed == []


def test_every_dependency_is_explained() -> None:
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    named = project["build-system"]["requires"] + project["project"]["dependencies"]
    named += [
        name for extra in project["project"]["optional-dependencies"].values() for name in extra
    ]
    explained = (root / "docs" / "dependencies.md").read_text()
    missing = [name for name in named if re.split(r"[^\w-]", name)[0] not in explained]
    assert missing == []
