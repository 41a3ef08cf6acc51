"""The second real model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from _gemma import gemma_model as fetch_gemma  # type: ignore[import-not-found]


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    try:
        path: Path = fetch_gemma()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no gemma model: {error}")
    return path
