"""Draws queue, running requests and TTFT over time; the only module that needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippy_sched.errors import SkippySchedError

if TYPE_CHECKING:
    from collections.abc import Sequence

_HTML = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>skippy-sched: {title}</title>
<style>body {{ margin: 2em }} svg {{ max-width: 100%; height: auto }}</style>
<body>{svg}</body></html>
"""


#: Points of a plot: enough for its shape, few enough that each is the mean of some requests.
POINTS_MAX = 200


class PlotError(SkippySchedError):
    """The plot cannot be drawn; the message says what to do."""

    exit_code = 64


def check(path: Path) -> None:
    """Raise PlotError now rather than after the simulation."""
    if path.suffix not in (".png", ".html"):
        raise PlotError(f"--plot {path}: name a file ending in .png or .html")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: {path.parent} is not a directory")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise PlotError(
            "--plot needs matplotlib: install it with `pip install 'skippy-sched[plot]'`, "
            "or take the numbers from --json"
        ) from None
    matplotlib.use("agg")
    return matplotlib


def draw(path: Path, rows: Sequence[dict[str, float | None]], title: str) -> None:
    """``rows`` as in Timeline.rows."""
    _matplotlib()
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(11, 7), layout="constrained")
    counts, latency = figure.subplots(2, 1, sharex=True)
    seconds = [row["at_s"] for row in rows]
    for key, label, alpha in (("queue", "waiting", 0.25), ("running", "running", 0.5)):
        values = [row[key] for row in rows]
        (line,) = counts.step(seconds, values, where="post", label=label)
        counts.fill_between(seconds, values, step="post", alpha=alpha, color=line.get_color())
    counts.set_ylabel("requests, the most at a time")
    counts.set_title(title)
    seen = [row for row in rows if row["mean_ttft_ms"] is not None]
    seconds = [row["at_s"] for row in seen]
    mean = [row["mean_ttft_ms"] for row in seen]
    highest = [row["max_ttft_ms"] for row in seen]
    latency.fill_between(seconds, mean, highest, alpha=0.25, label="up to the highest")
    latency.plot(seconds, mean, label="mean")
    latency.set_ylabel("time to first token, ms")
    latency.set_xlabel("seconds")
    for axes in (counts, latency):
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(loc="upper left")
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    path.write_text(_HTML.format(title=title, svg=svg[svg.index("<svg") :]), encoding="utf-8")
