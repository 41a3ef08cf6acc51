"""Do answers that have to fit a JSON schema fit it? Random schemas and prompts, greedy and sampled.

    python scripts/structured_output.py --schemas 200 [--config FILE] [--seed N]

Prints a line per failure and one line of totals; exits with 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from _schemas import random_schema

from skippy_sched.config import Config
from skippy_sched.config_file import load_config
from skippy_sched.default_model import default_model
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

PROMPTS = (
    "Describe a person as JSON:",
    "Once upon a time",
    "{",
    "The weather of today, as a record:",
    'Answer with "yes" or "no".',
    "1, 2, 3,",
)
#: Enough for every schema that random_schema makes, but not for a model that never stops.
TOKENS_MAX = 1200


@dataclass(slots=True)
class Totals:
    answers: int = 0
    cut: int = 0
    failures: list[str] = field(default_factory=list)


async def check(engine: Engine, seeds: range, at_once: int = 8) -> Totals:
    """Two answers for the schema of each seed: a greedy one and a sampled one."""
    totals, room = Totals(), asyncio.Semaphore(at_once)

    async def one(seed: int, sampling: SamplingConfig) -> None:
        rng = random.Random(seed)
        schema, prompt = random_schema(rng), rng.choice(PROMPTS)
        async with room:
            text, reason = await answer(engine, schema, prompt, sampling)
        totals.answers += 1
        if reason == "length":
            totals.cut += 1
            return
        problem = what_is_wrong(text, schema)
        if problem:
            totals.failures.append(f"seed {seed}: {problem}: {text!r} for {json.dumps(schema)}")

    async with asyncio.TaskGroup() as tasks:
        for seed in seeds:
            tasks.create_task(one(seed, SamplingConfig()))
            sampled = SamplingConfig(enabled=True, temperature=1.0, seed=seed + 1)
            tasks.create_task(one(seed, sampled))
    return totals


async def answer(
    engine: Engine, schema: dict[str, Any], prompt: str, sampling: SamplingConfig
) -> tuple[str, str | None]:
    grammar = await engine.compile_schema(schema)
    params = RequestParams(max_tokens=TOKENS_MAX, sampling=sampling, grammar=grammar)
    text, reason = "", None
    async for event in engine.generate(prompt, params):
        text += event.text
        reason = event.finish_reason
    return text, reason


def what_is_wrong(text: str, schema: dict[str, Any]) -> str | None:
    try:
        jsonschema.validate(json.loads(text), schema)
    except ValueError as error:
        return f"no JSON ({error})"
    except jsonschema.ValidationError as error:
        return f"not valid ({error.message})"
    return None


def _config(path: str | None) -> Config:
    if path is not None:
        return load_config(Path(path))
    engine = {"lanes": 8, "context_tokens": 2048}
    return Config.model_validate({"model": {"path": str(default_model())}, "engine": engine})


async def main(arguments: argparse.Namespace) -> int:
    async with Engine.open(_config(arguments.config), seed=arguments.seed) as engine:
        totals = await check(engine, range(arguments.seed, arguments.seed + arguments.schemas))
        await engine.drain(5)
    sys.stdout.writelines(f"{failure}\n" for failure in totals.failures)
    sys.stdout.write(
        f"{arguments.schemas} schemas, {totals.answers} answers, {totals.cut} cut by the limit of "
        f"{TOKENS_MAX} tokens, {len(totals.failures)} failures\n"
    )
    return 1 if totals.failures else 0


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cli.add_argument("--schemas", type=int, default=200)
    cli.add_argument("--seed", type=int, default=1, help="of the first schema")
    cli.add_argument("--config", help="a daemon's configuration; default: the default model")
    sys.exit(asyncio.run(main(cli.parse_args())))
