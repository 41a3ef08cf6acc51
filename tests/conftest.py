"""What all tests share: simulated models from a few lines, and configurations for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.config import Config
from skippy_sched.default_model import default_model as fetch_default_model

SimModel = Callable[..., Path]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched at first use."""
    return fetch_default_model()


@pytest.fixture
def sim_model(tmp_path: Path) -> SimModel:
    """Writes a specification for the simulated engine and returns its path.

    Keys with several values (``token``, ``fault``) take a list.
    """
    written = 0

    def write(**keys: Any) -> Path:
        nonlocal written
        written += 1
        lines = ["skippy-sim 1"]
        for key, value in keys.items():
            values = value if isinstance(value, list | tuple) else [value]
            shown = (str(v).lower() if isinstance(v, bool) else v for v in values)
            lines += [f"{key} = {v}" for v in shown]
        path = tmp_path / f"model-{written}.sim"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


@pytest.fixture
def sim_config(sim_model: SimModel) -> Callable[..., Config]:
    """A configuration on the simulated engine; sections are given as dicts."""

    def make(
        model: dict[str, Any] | None = None,
        *,
        engine: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
        template: Path | None = None,
    ) -> Config:
        return Config.model_validate(
            {
                "model": {
                    "path": str(sim_model(**(model or {}))),
                    "name": "sim",
                    "chat_template": None if template is None else str(template),
                },
                "engine": {
                    "library": "sim",
                    "lanes": 4,
                    "context_tokens": 512,
                    "batch_tokens": 64,
                    **(engine or {}),
                },
                "scheduler": scheduler or {},
                "speculation": speculation or {},
                "server": server or {},
                "metrics": metrics or {},
            }
        )

    return make
