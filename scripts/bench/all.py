"""Runs every benchmark against other servers and writes one report: report.md and report.svg.

    python scripts/bench/all.py out --rounds 5

Each step leaves its JSON in the folder; ``--only STEP...`` measures these alone and reports with
what the folder holds already. About half an hour on two cores, which must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import startup
from _gemma import gemma_model
from compare import CASES, OURS, ROOF, THEIRS, Figures, metrics_of, ratios, spread
from rich.console import Console

HERE = Path(__file__).resolve().parent
#: the second format: k-quants, which have kernels for prompts where Q4_1 has none
SECOND = "closed-16-gemma"
STEPS = ("overhead", "http_cost", "startup", *CASES, SECOND)


def command_of(step: str, folder: Path, rounds: int) -> list[str]:
    made = ["--json", str(folder / f"{step}.json"), "--rounds", str(rounds)]
    if step in CASES:
        script = ["compare.py", step]
    elif step == SECOND:
        script = ["compare.py", "closed-16", "--model", str(gemma_model())]
    else:
        script = [f"{step}.py"]
    return [sys.executable, str(HERE / script[0]), *script[1:], *made]


# --- the report ---------------------------------------------------------------------------------


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def head(*cells: str) -> list[str]:
    return [row(*cells), row(*("---" for _ in cells))]


def compared(found: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, list[Figures]]]]:
    """Step and its rounds, of those steps that compare servers."""
    return [
        (step, rounds)
        for step in (*CASES, SECOND)
        if step in found
        for rounds in found[step]["rounds"].values()
    ]


def comparison(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = head("case", "figure", OURS, THEIRS, "ratio", ROOF, "ours / bare loop")
    for step, whose in compared(found):
        for metric in metrics_of(step.removesuffix("-gemma")):
            cells = [spread([f[metric.key] for f in whose[who]], 1) for who in (OURS, THEIRS)]
            cells.append("**" + spread(ratios(metric, whose[OURS], whose[THEIRS])) + "**")
            if ROOF in whose and metric.is_rate:
                cells.append(spread([f[metric.key] for f in whose[ROOF]], 1))
                cells.append(spread(ratios(metric, whose[OURS], whose[ROOF])))
            else:
                cells += ["", ""]
            lines.append(row(step, metric.title, *cells))
    return lines


def loop_lag(found: dict[str, dict[str, Any]]) -> list[str]:
    lags = {
        step: max(f["loop_lag_p99_ms"] for f in whose[OURS])
        for step, whose in compared(found)
        if ROOF in whose
    }
    if not lags:
        return []
    told = ", ".join(f"{step}: {ms:g} ms" for step, ms in lags.items())
    return ["", f"Event-loop lag p99 of the daemon, worst round, below: {told}."]


def start_and_memory(one: dict[str, Any]) -> list[str]:
    lines = head(f"{one['lanes']} lanes", OURS, THEIRS)
    for key, title in startup.TITLES.items():
        digits = 2 if key.endswith("_s") else 0
        each = [spread([f[key] for f in one["rounds"][who]], digits) for who in (OURS, THEIRS)]
        lines.append(row(title, *each))
    return lines


def http_cost(one: dict[str, Any]) -> list[str]:
    lines = head("streams", "embedded engine", "daemon", "HTTP and SSE")
    for of in one["rows"]:
        each = (spread(of[key], 1) for key in ("engine_us", "daemon_us", "us"))
        lines.append(row(str(of["streams"]), *each))
    return lines


def overhead(one: dict[str, Any]) -> list[str]:
    lines = head("setup", "running", "waiting", "least", "median")
    for of in one["figures"]:
        cells = (of["setup"], of["running"], of["waiting"])
        times = (f"{of['cpu_us_min']:.0f}", f"{of['cpu_us_median']:.0f}")
        lines.append(row(*map(str, cells), *times))
    return lines


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The report of the steps that were measured."""
    first = next(iter(found.values()))
    lines = [f"Machine: {first['machine']}."]
    servers = [one for one in found.values() if "flags" in one]
    if servers:
        said = servers[0]["setting"]
        lines += [
            f"Engine of all three: llama.cpp as in {servers[0]['llama_cpp']}, "
            f"model {servers[0]['model']}, {said['threads']} threads.",
            f"llama-server: `-np {said['lanes']} -c {said['lanes']}*{said['context_tokens']} "
            f"-t {said['threads']} -b {said['batch_tokens']} -ub {said['batch_tokens']} "
            f"{servers[0]['flags']}`.",
            f"Requests: {said['prompt_tokens']} tokens in, {said['output_tokens']} out, greedy.",
        ]
    if "poisson" in found:
        lines.append(f"Poisson arrivals: {found['poisson']['poisson_rate']:.2f} requests/s.")
    lines.append("Figures are medians of rounds (least..most); a ratio above 1 is better for us.")
    parts = [
        ("Against llama-server and the bare engine loop", comparison(found) + loop_lag(found)),
    ]
    for step, title, write in (
        ("startup", "Start and memory", start_and_memory),
        ("http_cost", "HTTP and SSE, CPU µs per token", http_cost),
        ("overhead", "Scheduler, CPU µs an iteration", overhead),
    ):
        if step in found:
            parts.append((title, write(found[step])))
    for title, body in parts:
        lines += ["", f"## {title}", "", *body]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Tokens a second by streams, and every ratio; needs matplotlib."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    closed = [(step, whose) for step, whose in compared(found) if step in CASES and ROOF in whose]
    for offset, who in enumerate((ROOF, OURS, THEIRS)):
        rates = [[f["output_throughput"] for f in whose[who]] for _, whose in closed]
        middle = [statistics.median(values) for values in rates]
        down = [mid - min(values) for mid, values in zip(middle, rates, strict=True)]
        up = [max(values) - mid for mid, values in zip(middle, rates, strict=True)]
        at = [number + (offset - 1) * 0.27 for number in range(len(closed))]
        left.bar(at, middle, 0.25, yerr=(down, up), label=who, capsize=2)
    left.set_xticks(range(len(closed)), [step.removeprefix("closed-") for step, _ in closed])
    left.set(xlabel="streams", ylabel="output tokens/s")
    left.legend()
    bars = [
        (f"{step}: {metric.title.partition(',')[0]}", ratios(metric, whose[OURS], whose[THEIRS]))
        for step, whose in compared(found)
        for metric in metrics_of(step.removesuffix("-gemma"))
    ]
    names = [name for name, _ in reversed(bars)]
    middle = [statistics.median(values) for _, values in reversed(bars)]
    right.barh(names, middle, color=["tab:green" if m >= 1 else "tab:red" for m in middle])
    right.axvline(1.0, color="black", linewidth=0.8)
    right.set(xscale="log", xlabel="better than llama-server by (ratio, logarithmic)")
    figure.savefig(path)
    plt.close(figure)


def report(folder: Path) -> None:
    """From the JSON files that the folder holds."""
    files = {step: folder / f"{step}.json" for step in STEPS}
    found = {step: json.loads(file.read_text()) for step, file in files.items() if file.exists()}
    if not found:
        return
    (folder / "report.md").write_text(markdown(found))
    if any(step in found for step in CASES):
        plot(found, folder / "report.svg")


def run(steps: Sequence[str], folder: Path, rounds: int) -> int:
    say = Console(stderr=True, highlight=False)
    failed = 0
    for step in steps:
        say.rule(step)
        # overhead and startup have more rounds of their own where they are short
        failed += subprocess.run(command_of(step, folder, rounds)).returncode != 0
    return failed


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("folder", type=Path)
    cli.add_argument("--only", nargs="*", choices=STEPS, metavar="STEP", help="none: report only")
    cli.add_argument("--rounds", type=int, default=5)
    args = cli.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = run(STEPS if args.only is None else args.only, args.folder, args.rounds)
    report(args.folder)
    Console().print(f"{args.folder / 'report.md'}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
