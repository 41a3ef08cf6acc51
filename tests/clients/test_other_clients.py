"""Other clients, unmodified, each in a program of its own: ``pytest -m clients`` (needs a network).

They are kept apart from the suite's environment, whose packages theirs might conflict with.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from skippy_sched.default_model import cache_directory

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="session")
def python() -> str:
    """An interpreter that has what the extra ``clients`` names; made at first use."""
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["clients"]
    home = cache_directory() / "clients"
    interpreter = home / "bin" / "python"
    stamp = home / "installed"
    if not stamp.is_file() or stamp.read_text() != str(wanted):
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *wanted], check=True)
        stamp.write_text(str(wanted))
    return str(interpreter)


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A folder in which ``import "openai"`` works for node; made at first use."""
    home = cache_directory() / "clients-npm"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "node_modules" / "openai").is_dir():
        subprocess.run(["npm", "install", "openai"], cwd=home, check=True, capture_output=True)
    return home


@pytest.mark.parametrize("program", ["litellm_client", "langchain_client", "llm_client"])
def test_the_python_client_sees_what_it_expects(program, python, url):
    _run([python, str(PROGRAMS / f"{program}.py"), url, "sk-test"])


def test_the_npm_client_sees_what_it_expects(node_modules, url):
    program = node_modules / "openai_client.mjs"  # node looks for packages beside the program
    shutil.copy(PROGRAMS / "openai_client.mjs", program)
    _run(["node", str(program), url, "sk-test"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
