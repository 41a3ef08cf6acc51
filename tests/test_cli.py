"""The command line: exit codes, one-line errors, what it prints."""

from __future__ import annotations

import hashlib
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from skippy_sched.cli import main


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers
    structlog.reset_defaults()


def test_the_version_is_printed_without_loading_anything_heavy() -> None:
    heavy = "numpy", "pydantic", "asyncio", "cffi"
    script = (
        "import sys\nfrom skippy_sched.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit as end:\n"
        f"    sys.exit(end.code or [name for name in {heavy} if name in sys.modules] or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skippy-sched 0")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["serve", "--port", "x"], ["check-config"]])
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_check_config_prints_what_the_file_comes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[engine]\nlanes = 3\n")
    assert main(["check-config", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "lanes = 3" in printed
    assert "port = 8080" in printed


def test_check_config_ends_with_78_and_a_line_for_each_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[engine]\nlanes = 0\nlane = 1\n")
    assert main(["check-config", str(path)]) == 78
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"skippy-sched: error: {path}:") for line in lines)


def test_a_wrong_flag_is_named_as_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 78
    assert capsys.readouterr().err == (
        "skippy-sched: error: --port: server.port: 70000 is above 65535\n"
    )


# --- generate -------------------------------------------------------------------------------------

Generate = Callable[..., int]


@pytest.fixture
def generate(sim_model: Callable[..., Path]) -> Generate:
    template = "{{ messages[0].content }}<|script|>Hi there<|end|>"
    model = str(sim_model(chat_template=template))

    def run(prompt: str, *arguments: str) -> int:
        return main(["generate", prompt, "--library", "sim", "--model", model, *arguments])

    return run


def test_generate_writes_the_answer(generate: Generate, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("hello") == 0
    assert capsys.readouterr().out == "Hi there\n"


def test_generate_takes_the_prompt_from_standard_input(
    generate: Generate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("<|script|>from a pipe<|end|>"))
    assert generate("-", "--raw") == 0
    assert capsys.readouterr().out == "from a pipe\n"


def test_generate_obeys_limit_and_seed(
    generate: Generate, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for _ in range(2):
        assert generate("abc", "--raw", "--max-tokens", "5", "--seed", "3") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-tokens", "0"], "max_tokens"),
        (["--temperature", "3"], "temperature: 3.0 is above 2"),
        (["--max-tokens", "100000"], "context"),
    ],
)
def test_generate_refuses_as_the_server_would(
    generate: Generate, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert generate("hello", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("skippy-sched: error: ")
    assert said in error


def test_generate_refuses_a_prompt_that_is_no_text(
    generate: Generate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("\udc80") == 1
    assert "not valid UTF-8" in capsys.readouterr().err


def test_hash_key_prints_what_the_configuration_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "a key of a good length, at least"
    monkeypatch.setattr(sys, "stdin", io.StringIO(key + "\n"))
    assert main(["hash-key"]) == 0
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert capsys.readouterr().out == f"sha256:{digest}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("short\n"))
    assert main(["hash-key"]) == 78
    assert "could be guessed" in capsys.readouterr().err


def test_a_generated_key_is_shown_once_and_fits_its_hash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["hash-key", "--generate"]) == 0
    printed = capsys.readouterr()
    key = printed.err.split()[-1]
    assert printed.out == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"
