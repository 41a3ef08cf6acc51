"""The examples in the documentation run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skippy_sched.native import find_library

from .conftest import SimModel

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/embedding.md"])
def test_the_python_example_runs(sim_model: SimModel, page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert '"model.gguf"' in code
    code = code.replace("model.gguf", str(sim_model(words_only=True)))
    environment = {**os.environ, "SKIPPY_SCHED_LIBRARY": str(find_library("sim"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 40
    assert done.stderr == ""


def test_every_page_that_the_readme_names_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = re.findall(r"`((?:docs|scripts|config)/[^`]*)`", readme)
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []
