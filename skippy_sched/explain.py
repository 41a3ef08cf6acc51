"""The explain command: a request's story, as a daemon tells it, on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import quote

from skippy_sched.remote import get


def explain(url: str, request_id: str, *, as_json: bool = False) -> int:
    """Print why a request waits, or what it got; raises RemoteError."""
    story = get(url, f"/admin/requests/{quote(request_id, safe='')}")
    if as_json:
        sys.stdout.write(json.dumps(story, indent=2) + "\n")
    else:
        _show(story)
    return 0


def _show(story: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    say = Console(highlight=False, soft_wrap=True)
    say.print(f"{story['id']}: {story['why']}", markup=False)
    facts = Table.grid(padding=(0, 2))
    spent = ", ".join(f"{where} {seconds:.3f} s" for where, seconds in story["seconds"].items())
    facts.add_row("arrived", f"{story['arrived']} (tenant {story['tenant']!r})")
    facts.add_row("time", spent)
    if story["first_token_s"] is not None:
        facts.add_row("first token", f"after {story['first_token_s']:.3f} s")
    facts.add_row(
        "prompt", f"{story['prompt_tokens']} tokens, {story['cached_tokens']} of them cached"
    )
    generated = f"{story['completion_tokens']} of at most {story['completion_tokens_max']} tokens"
    facts.add_row("generated", generated)
    facts.add_row("priority", str(story["priority"]))
    facts.add_row("preempted", f"{story['preemptions']} times")
    say.print(facts)
    if story["steps"]:
        steps = Table("after", "what", "tokens", box=None, pad_edge=False)
        for step in story["steps"]:
            steps.add_row(f"{step['at_s']:.3f} s", step["what"], f"{step['tokens']}")
        say.print(steps)
    if story["steps_dropped"]:
        say.print(f"({story['steps_dropped']} earlier steps are not kept)")
