"""The top command: what a daemon does right now, on a terminal, redrawn each second.

Knows how to draw what ``/admin/live`` tells; see server/live_facts.py for its shape.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from skippy_sched.errors import RemoteError
from skippy_sched.remote import get

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

#: As often as the daemon takes samples.
EVERY_S = 1.0
QUEUE_LINES_MAX = 3
TENANT_LINES_MAX = 3
BARS = "▁▂▃▄▅▆▇█"

Facts = dict[str, Any]


def top(url: str) -> int:
    """Show until interrupted; once, where there is no terminal. Raises RemoteError at first only:
    a daemon that goes away later is waited for."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    screen = Screen(url)
    screen.take(_ask(url))
    if not sys.stdout.isatty():
        console.print(screen.draw(console.width, 1000))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen.draw(console.width, console.height), refresh=True)
            time.sleep(EVERY_S)
            try:
                screen.take(_ask(url))
            except RemoteError as error:
                screen.trouble = f"{error}; trying again"


def _ask(url: str) -> Facts:
    facts: Facts = get(url, "/admin/live")
    return facts


class Screen:
    """The last facts, drawn to fit; ``trouble`` is why there are no newer ones."""

    def __init__(self, url: str) -> None:
        self.trouble = ""
        self._url = url
        self._facts: Facts = {}

    def take(self, facts: Facts) -> None:
        self._facts, self.trouble = facts, ""

    def draw(self, width: int, height: int) -> RenderableType:
        """Of what does not fit, lanes are left out last."""
        from rich.console import Group

        facts = self._facts
        queue = facts["queue"]["first"][:QUEUE_LINES_MAX]
        tenants = facts["tenants"][:TENANT_LINES_MAX]
        head = self._head(width)
        below = [_queue(queue)] if queue else []
        below += [_tenants(facts, tenants)] if tenants else []
        used = len(head) + (len(queue) + 1 if queue else 0) + (len(tenants) + 1 if tenants else 0)
        columns = 2 if width >= 150 or (width >= 78 and facts["lanes"] > 8) else 1
        return Group(*head, *_lanes(facts, width, columns, height - used), *below)

    def _head(self, width: int) -> list[RenderableType]:
        from rich.text import Text

        facts, rates = self._facts, self._facts["rates"] or {}
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append("skippy-sched", "bold")
        title.append(f"  {facts['model']}  ")
        if self.trouble:
            title.append(self.trouble, "bold red")
        else:
            title.append(facts["state"], "green" if facts["state"] == "ready" else "bold red")
            title.append(f"  {self._url}", "dim")
        counted, kv, queue = facts["counted"], facts["kv"], facts["queue"]
        latency = facts["latency"]
        return [
            title,
            _line(
                ("lanes", f"{len(facts['running'])}/{facts['lanes']}"),
                ("waiting", f"{queue['requests']:,} ({queue['tokens']:,} tokens)"),
                ("finished", f"{counted['finished']:,}"),
                ("cancelled", f"{counted['cancelled']:,}"),
                ("failed", f"{counted['failed']:,}"),
            ),
            _line(
                ("tokens/s", _shown(rates.get("generated_tokens_per_s"))),
                ("prefill/s", _shown(rates.get("prefill_tokens_per_s"))),
                ("requests/s", _shown(rates.get("requests_per_s"), 1)),
                ("iterations/s", _shown(rates.get("iterations_per_s"), 1)),
            ),
            _line(
                ("TTFT ms", _times(latency["ttft_ms"])),
                ("ITL ms", _times(latency["itl_ms"])),
                ("", "p50 p95 p99"),
            ),
            _line(
                ("KV", f"{_bar(kv['tokens'], kv['tokens_max'], 10)} {_share(kv)}"),
                ("prefixes", f"{kv['prefixes']}"),
                ("cached", _percent(rates.get("cached_share"))),
                ("preempted", f"{counted['preemptions']:,}"),
            ),
            _line(
                ("batch", f"{_shown(rates.get('decodes_per_iteration'), 1)} decodes"),
                ("", f"{_shown(rates.get('tokens_per_iteration'))} tokens"),
                (f"of {facts['budget_tokens']}", f"latest {_latest(facts, max(8, width - 60))}"),
            ),
        ]


def _line(*pairs: tuple[str, str]) -> RenderableType:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in pairs:
        line.append(f"{name} " if name else "", "cyan")
        line.append(f"{value}   ")
    return line


def _table(columns: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """Columns whose name begins with ``>`` are numbers; those with ``*`` share what is left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="cyan", expand=True)
    for index, column in enumerate(columns):
        name = column.lstrip(">*")
        gives_way = column.startswith("*")
        table.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if gives_way else None,
            min_width=None
            if gives_way
            else max([len(name), *(row[index].cell_len for row in rows)]),
        )
    for row in rows:
        table.add_row(*row)
    return table


def _lanes(facts: Facts, width: int, columns: int, height: int) -> Iterable[RenderableType]:
    """In one or two columns, as many as there is height for."""
    from rich.table import Table
    from rich.text import Text

    running = facts["running"]
    lines = -(-len(running) // columns)
    if lines > height - 1:
        lines = max(1, height - 2)  # below the header, above "and so many more"
    told = running[: lines * columns]
    side = Table.grid(padding=(0, 2, 0, 0), expand=True)
    tables = []
    for column in range(columns):
        part = told[column * lines : (column + 1) * lines]
        if part or not column:
            side.add_column(ratio=1)
            tables.append(_lane_table(part, width // columns))
    side.add_row(*tables)
    yield side
    if len(told) < len(running):
        yield Text(f"and {len(running) - len(told)} more", "dim")
    elif not running:
        yield Text("all lanes are free", "dim")


def _lane_table(running: list[Facts], width: int) -> Table:
    wide = width >= 70
    rows = []
    for request in running:
        if request["state"] == "prefill":
            done, of, style = request["computed_tokens"], request["prompt_tokens"], "yellow"
        else:
            done, of = request["completion_tokens"], request["completion_tokens_max"]
            style = "green" if request["state"] == "decode" else "red"
        row = [
            _text(request["lane"]),
            _text(request["state"], style),
            _text(_bar(done, of, 12 if wide else 5), style),
            _text(f"{done}/{of}"),
            _text(request["id"]),
        ]
        rows.append([*row, _text(request["tenant"])] if wide else row)
    return _table([">", "phase", "", ">tokens", "*request", *(["*tenant"] if wide else [])], rows)


def _queue(first: list[Facts]) -> Table:
    rows = [
        [
            _text(request["position"]),
            _text(request["id"]),
            _text(request["tenant"]),
            _text(f"{request['prompt_tokens']:,}"),
            _text(f"{request['age_s']:.1f} s"),
            _text(request["waits_for"]),
        ]
        for request in first
    ]
    return _table([">", "*waiting", "*tenant", ">prompt", ">waited", "for"], rows)


def _tenants(facts: Facts, first: list[Facts]) -> Table:
    more = len(facts["tenants"]) - len(first)
    rows = [
        [
            _text(tenant["tenant"]),
            _text(tenant["running"]),
            _text(f"{tenant['waiting']:,}"),
            _text(_shown(tenant["tokens_per_s"], 1)),
        ]
        for tenant in first
    ]
    name = f"*tenant (+{more} more)" if more else "*tenant"
    return _table([name, ">running", ">waiting", ">tokens/s"], rows)


def _text(value: object, style: str = "") -> Text:
    """A client's text too, without meaning to the terminal."""
    from rich.text import Text

    return Text("".join(each if each.isprintable() else "?" for each in str(value)), style)


def _shown(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _times(of: Facts) -> str:
    return " ".join(_shown(of[name], 0 if (of[name] or 0) >= 10 else 1) for name in of)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _share(kv: Facts) -> str:
    return _percent(kv["tokens"] / kv["tokens_max"] if kv["tokens_max"] else None)


def _bar(done: float, of: float, width: int) -> str:
    filled = round(width * min(1.0, done / of)) if of else 0
    return "█" * filled + "░" * (width - filled)


def _latest(facts: Facts, width: int) -> str:
    """Tokens of the latest iterations, against the fullest of them: time limits most of them."""
    tokens = [iteration[5] for iteration in facts["iterations"][-width:]]
    most = max(tokens, default=1)
    return "".join(BARS[max(0, round(each / most * len(BARS)) - 1)] for each in tokens)
