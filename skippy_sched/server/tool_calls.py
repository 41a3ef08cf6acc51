"""Calls of tools: what the model may write, and reading it.

Knows one notation, which most open models are trained for (that of the Hermes models, which Qwen
took over): ``<tool_call>`` around a JSON object with ``name`` and ``arguments``. Does not know how
a template tells the model of its tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skippy_sched.scheduler.grammar import styled

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` as the JSON text that clients get."""

    name: str
    arguments: str


def calls_grammar(
    tools: Sequence[dict[str, Any]],
    *,
    required: bool,
    parallel: bool,
    otherwise: dict[str, Any] | None = None,
) -> str:
    """A grammar in Lark's notation: one call, or with ``parallel`` several.

    ``tools`` are objects with ``name`` and perhaps ``parameters``, a JSON schema, and ``strict``.
    Not ``required``: any text may come before the calls or in their place; with ``otherwise``,
    JSON of that schema in their place.
    """
    more = '("\\n" call)*' if parallel else ""
    choices = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules = [
        f'call: "{OPEN}" body',
        f'body: NEWLINE? ({choices}) NEWLINE? "{CLOSE}"',
        "NEWLINE: /\\n/",
    ]
    for index, tool in enumerate(tools):
        before = json.dumps('{"name": ' + json.dumps(tool["name"]) + ', "arguments": ')
        rules.append(f'call_{index}: {before} arguments_{index} "}}"')
        schema = styled(arguments_schema(tool), lenient=is_lenient(tool))
        rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
    if required:
        start = f"start: call {more}"
    elif otherwise is not None:
        start = f"start: call {more} | other"
        rules.append(f"other: %json {json.dumps(styled(otherwise))}")
    else:
        # The opening ends the text lazily: what follows it can only be a call.
        start = f"start: opened body {more} | TEXT"
        rules += [f'opened[lazy]: TEXT "{OPEN}"', "TEXT: /(.|\\n)*/"]
    return "\n".join(["%llguidance {}", start, *rules, ""])


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A function that says nothing of parameters has none."""
    none = {"properties": {}, "additionalProperties": False}
    return {"type": "object", **(tool.get("parameters") or none)}


def is_lenient(tool: dict[str, Any]) -> bool:
    """What a schema says beyond what can be held to is left to the model, unless it is strict."""
    return tool.get("strict") is not True


class CallReader:
    """Takes an answer's text as it comes and tells text and calls apart.

    Text that could still become an opening is held back. What is between opening and closing but
    is no call stays text.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._is_inside = False

    def read(self, text: str) -> Iterator[str | Call]:
        """Pieces of text, never empty, and calls."""
        self._held += text
        while True:
            if self._is_inside:
                body, found, rest = self._held.partition(CLOSE)
                if not found:
                    return
                self._is_inside, self._held = False, rest
                yield self._call(body) or OPEN + body + CLOSE
                continue
            before, found, rest = self._held.partition(OPEN)
            if not found:
                keep = _could_open(self._held)
                before, self._held = before[: len(before) - keep], before[len(before) - keep :]
            else:
                self._is_inside, self._held = True, rest
            if before and not (self.calls and before.isspace()):
                yield before
            if not found:
                return

    def end(self) -> Iterator[str]:
        """What was held back, at the end of the answer: it has become no call."""
        rest = OPEN + self._held if self._is_inside else self._held
        self._held, self._is_inside = "", False
        if rest and not (self.calls and rest.isspace()):
            yield rest

    def _call(self, body: str) -> Call | None:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        self.calls += 1
        arguments = found.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(found["name"], arguments)


def _could_open(text: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of the opening."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return length
    return 0
