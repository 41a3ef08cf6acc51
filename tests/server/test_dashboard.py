"""The Grafana dashboard asks only for metrics that the daemon exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DASHBOARD = Path(__file__).parents[2] / "config" / "grafana-dashboard.json"


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def expressions() -> Iterator[str]:
    yield from (t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", ()))
    yield from (v["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query")


async def test_each_metric_and_each_label_of_the_dashboard_is_exported(serving):
    async with serving() as client:
        await client.complete("hello", max_tokens=3)
        await client.complete("hello", max_tokens=-1)  # refused
        text = (await client.get("/metrics")).body.decode()
    exported: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)\{(.*)\} ", text, re.MULTILINE):
        exported.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    asked = 0
    for expression in expressions():
        for name in re.findall(r"skippy:\w+", expression):
            assert name in exported, expression
            asked += 1
            for labels in re.findall(r"by \(([\w, ]+)\)", expression):
                assert set(labels.split(", ")) <= exported[name], expression
    assert asked > 30


def test_no_panel_hides_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


@pytest.mark.parametrize("kind", ["time_to_first_token", "inter_token_latency", "e2e_request"])
def test_what_users_feel_is_on_it(kind: str) -> None:
    assert any(f"skippy:{kind}" in expression for expression in expressions())
