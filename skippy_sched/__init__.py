"""Continuous batching of text-generation requests on one native model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "Event", "RequestParams", "SamplingConfig", "Usage"]

if TYPE_CHECKING:
    from skippy_sched.config import Config
    from skippy_sched.native.sampling import SamplingConfig
    from skippy_sched.scheduler.engine import Engine
    from skippy_sched.scheduler.request import Event, RequestParams, Usage

_HOMES = {
    "Config": "skippy_sched.config",
    "Engine": "skippy_sched.scheduler.engine",
    "Event": "skippy_sched.scheduler.request",
    "RequestParams": "skippy_sched.scheduler.request",
    "SamplingConfig": "skippy_sched.native.sampling",
    "Usage": "skippy_sched.scheduler.request",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that the command line starts quickly."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
