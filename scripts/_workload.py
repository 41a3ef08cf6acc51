"""What a load test sends and when: arrival times, trace files, synthetic prompts.

Pure: everything follows from the arguments and a seed. Knows nothing of connections.
"""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: prompt tokens behind each of Mooncake's hash_ids
MOONCAKE_BLOCK_TOKENS = 512

#: frequent in every English vocabulary, so that each is about one token
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot right "
    "study book eye job word business issue side kind head house service friend father power "
    "hour game line end member law car city community name president team minute idea body "
    "information back"
)
WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send ``at_s`` after the start; equal ``blocks`` mean a shared prefix."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def arrivals(rate: float, burstiness: float, generator: random.Random) -> Iterator[float]:
    """Endless arrival times at ``rate`` per second; gaps are gamma distributed.

    ``burstiness`` is the gamma shape: 1 is a Poisson process, below 1 comes in bursts, above 1
    is more even.
    """
    now = 0.0
    while True:
        now += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now


class TraceError(Exception):
    """A trace file is not what it should be; the message names the line."""


def read_trace(lines: Iterable[str], *, name: str = "trace") -> list[Planned]:
    """Read either trace format, told apart by the first line; times start at 0."""
    rows = iter(lines)
    first = next(rows, "")
    if first.lstrip().startswith("{"):
        planned = list(_mooncake_rows([first, *rows], name))
    elif first.strip().startswith("TIMESTAMP,"):
        planned = list(_azure_rows([first, *rows], name))
    else:
        raise TraceError(
            f"{name}:1: expected the header TIMESTAMP,ContextTokens,GeneratedTokens or a JSON "
            f"object with timestamp, input_length and output_length, found {first[:80]!r}"
        )
    if not planned:
        raise TraceError(f"{name}: holds no requests")
    planned.sort(key=lambda row: row.at_s)
    start = planned[0].at_s
    return [replace(row, at_s=row.at_s - start) for row in planned]


def _azure_rows(lines: Sequence[str], name: str) -> Iterator[Planned]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # seven digits of a second: fromisoformat drops what is below the microsecond
            at = datetime.fromisoformat(row["TIMESTAMP"])
            seconds = (at - datetime(2000, 1, 1, tzinfo=at.tzinfo)).total_seconds()
            prompt_tokens, output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{name}:{number}: {error!r} in {str(row)[:120]}") from error
        yield Planned(seconds, prompt_tokens, output_tokens)


def _mooncake_rows(lines: Sequence[str], name: str) -> Iterator[Planned]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            planned = Planned(
                float(row["timestamp"]) / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(int(block) for block in row.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{name}:{number}: {error!r} in {line[:120]!r}") from error
        yield planned


def fit_trace(
    trace: Sequence[Planned],
    *,
    time_scale: float,
    length_scale: float,
    context_tokens: int | None,
    duration_s: float | None,
    requests_max: int | None,
) -> tuple[list[Planned], int]:
    """Scale times and lengths, cut to the first seconds or requests, and to what a context holds.

    Returns the requests and how many of them had to be shortened to ``context_tokens``.
    """
    fitted: list[Planned] = []
    shortened = 0
    for row in trace:
        at_s = row.at_s * time_scale
        if len(fitted) == requests_max or (duration_s is not None and at_s > duration_s):
            break
        output_tokens = max(1, round(row.output_tokens * length_scale))
        prompt_tokens = max(1, round(row.prompt_tokens * length_scale))
        if context_tokens is not None and prompt_tokens + output_tokens > context_tokens:
            shortened += 1
            output_tokens = min(output_tokens, context_tokens // 2)
            prompt_tokens = min(prompt_tokens, context_tokens - output_tokens)
        fitted.append(Planned(at_s, prompt_tokens, output_tokens, row.blocks))
    return fitted, shortened


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of an exact number of pieces, each piece a token id or a word.

    The same seed and index give the same prompt; different indexes share nothing but the first
    ``shared_prefix_tokens`` pieces, or the pieces of equal blocks.
    """

    seed: int
    form: Literal["ids", "words"]
    token_ids: range
    shared_prefix_tokens: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def pieces(self, index: int, planned: Planned) -> list[int] | list[str]:
        """The token ids or words of one prompt."""
        count = planned.prompt_tokens
        choices: list[int] = []
        if planned.blocks:
            for block in planned.blocks:
                if len(choices) >= count:
                    break
                choices += self._draw(f"block {block}", self.block_tokens)
        elif self.shared_prefix_tokens:
            choices = self._draw("prefix", self.shared_prefix_tokens)
        if len(choices) < count:
            choices += self._draw(f"request {index}", count - len(choices))
        del choices[count:]
        if self.form == "ids":
            return choices
        return [WORDS[choice % len(WORDS)] for choice in choices]

    def _draw(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self.seed} {name}").choices(self.token_ids, k=count)
