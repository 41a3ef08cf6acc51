"""Who arrives when, with how many tokens: read from a trace file, one request at a time.

Knows the formats. Does not make prompts (prompts.py) and never holds a whole file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from skippy_sched.errors import SkippySchedError


class TraceError(SkippySchedError):
    """A trace file is not what it should be; the message names file and line."""

    exit_code = 65


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; ``at_s`` counts from the trace's first.

    Of two prompts with the same ``prefix`` the shorter is the beginning of the longer. Equal
    ``blocks`` stand for equal pieces of BLOCK_TOKENS tokens.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    priority: int = 0
    prefix: str | None = None
    blocks: tuple[int, ...] = ()


#: Tokens behind each of Mooncake's hash_ids, as its authors publish it.
BLOCK_TOKENS = 512

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length")
_OWN = ("arrival_s", "prompt_tokens", "output_tokens")

Row = Mapping[str, Any]


def read_trace(path: Path) -> Iterator[Arrival]:
    """The arrivals of a file, in order; its format is told by its first line.

    Raises TraceError, also while it is read: a bad line, or one that goes back in time.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _from_zero(path, _arrivals(path, file))
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file: {error}") from error


def _arrivals(path: Path, file: TextIO) -> Iterator[tuple[int, Arrival]]:
    first = file.readline()
    file.seek(0)
    if first.lstrip().startswith("{"):
        rows, keys = _json_rows(path, file), set(_json_object(path, 1, first))
    else:
        rows, keys = _csv_rows(file), {name.strip() for name in first.split(",")}
    make: Callable[[Row], Arrival]
    if keys.issuperset(_AZURE):
        make = _azure
    elif keys.issuperset(_MOONCAKE):
        make = _mooncake
    elif keys.issuperset(_OWN):
        make = _own
    else:
        known = "; ".join(", ".join(names) for names in (_OWN, _AZURE, _MOONCAKE))
        raise TraceError(
            f"{path}:1: neither a header line nor a JSON object with the columns of a known "
            f"format ({known}); found {first.strip()[:80]!r}"
        )
    for number, row in rows:
        try:
            arrival = make(row)
            if arrival.prompt_tokens < 0 or arrival.output_tokens < 0:
                raise ValueError("a number of tokens is negative")
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}:{number}: {reason}") from error
        yield number, arrival


def _from_zero(path: Path, rows: Iterable[tuple[int, Arrival]]) -> Iterator[Arrival]:
    """Times counted from the first, empty prompts and outputs taken as one token."""
    start: float | None = None
    last = 0.0
    for number, arrival in rows:
        start = arrival.at_s if start is None else start
        at_s = arrival.at_s - start
        if at_s < last:
            raise TraceError(
                f"{path}:{number}: arrives {last - at_s:g} s before the line above it; "
                "sort the file by arrival"
            )
        last = at_s
        yield replace(
            arrival,
            at_s=at_s,
            prompt_tokens=max(1, arrival.prompt_tokens),
            output_tokens=max(1, arrival.output_tokens),
        )


def _csv_rows(file: TextIO) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(file, skipinitialspace=True)
    for row in reader:
        yield reader.line_num, row


def _json_rows(path: Path, file: TextIO) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _json_object(path, number, line)


def _json_object(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{path}:{number}: expected a JSON object, found {line[:40]!r}")
    return row


def _azure(row: Row) -> Arrival:
    instant = datetime.fromisoformat(row["TIMESTAMP"])
    seconds = (instant - datetime(2000, 1, 1, tzinfo=instant.tzinfo)).total_seconds()
    return Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(row: Row) -> Arrival:
    return Arrival(
        float(row["timestamp"]) / 1000,
        int(row["input_length"]),
        int(row["output_length"]),
        blocks=tuple(int(block) for block in row.get("hash_ids", ())),
    )


def _own(row: Row) -> Arrival:
    return Arrival(
        float(row["arrival_s"]),
        int(row["prompt_tokens"]),
        int(row["output_tokens"]),
        tenant=row.get("tenant") or "default",
        priority=int(row.get("priority") or 0),
        prefix=str(row["prefix"]) if row.get("prefix") not in (None, "") else None,
    )


@dataclass(slots=True)
class Fitting:
    """Makes arrivals fit a what-if: stretched in time, cut in number, clipped to the context."""

    context_tokens: int
    time_scale: float = 1.0
    limit: int | None = None
    clipped: int = 0

    def __call__(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        for arrival in islice(arrivals, self.limit):
            prompt, output = arrival.prompt_tokens, arrival.output_tokens
            if prompt + output > self.context_tokens:
                self.clipped += 1
                # A long answer gives way first: half of the context is left to it.
                output = min(output, max(self.context_tokens // 2, self.context_tokens - prompt))
                prompt = min(prompt, self.context_tokens - output)
            elif self.time_scale == 1.0:
                yield arrival
                continue
            yield replace(
                arrival,
                at_s=arrival.at_s * self.time_scale,
                prompt_tokens=prompt,
                output_tokens=output,
            )
