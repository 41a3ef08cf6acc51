"""The load test's command line: options, their bounds, and which go together."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from _report import parse_goodput


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        description="Load test for any OpenAI-compatible server.",
        epilog="Without --rate or --trace the loop is closed: --concurrency users who each send "
        "their next request when the last one ended.",
    )
    cli.add_argument("url", help="http://HOST:PORT, with or without /v1")
    cli.add_argument("--model", help="default: the first that the server lists")
    cli.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    cli.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    cli.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key")
    cli.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="per request")
    cli.add_argument("--seed", type=int, help="default: a random one, printed")

    load = cli.add_argument_group("load")
    load.add_argument("--concurrency", type=_count, default=16, metavar="N")
    load.add_argument("--requests", type=_count, metavar="M", help="stop after M requests")
    load.add_argument("--duration", type=_positive, metavar="S", help="send none after S seconds")
    load.add_argument("--rate", type=_positive, metavar="R", help="open loop: requests per second")
    load.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="gamma shape of the gaps: 1 is Poisson, below 1 comes in bursts",
    )
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="open loop: Azure CSV or Mooncake JSONL"
    )
    load.add_argument(
        "--time-scale", type=_positive, default=1.0, help="times of the trace are multiplied by it"
    )
    load.add_argument(
        "--length-scale", type=_positive, default=1.0, help="lengths of the trace likewise"
    )
    load.add_argument(
        "--context-tokens", type=_context, metavar="N", help="shorten longer requests of the trace"
    )
    load.add_argument(
        "--cancel-fraction",
        type=_fraction,
        default=0.0,
        metavar="F",
        help="share of requests whose connection is closed at a random moment",
    )
    load.add_argument("--warmup", type=_count, default=2, metavar="K", help="requests before")

    prompt = cli.add_argument_group("requests")
    prompt.add_argument("--prompt-tokens", type=_count, default=128, metavar="N")
    prompt.add_argument("--output-tokens", type=_count, default=64, metavar="N")
    prompt.add_argument("--shared-prefix-tokens", type=int, default=0, metavar="N")
    prompt.add_argument(
        "--prompt-form",
        choices=["ids", "words"],
        help="token ids (exact; default for completions) or words (about one token each)",
    )
    prompt.add_argument(
        "--token-ids",
        type=_id_range,
        default=(261, 511),
        metavar="LOW:HIGH",
        help="ids to draw from; the default suits any vocabulary of at least 512",
    )

    result = cli.add_argument_group("result")
    result.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    result.add_argument("--detailed", action="store_true", help="per-request lists in the JSON")
    result.add_argument("--label", help="kept in the JSON")
    result.add_argument("--quiet", action="store_true", help="no progress bar")
    result.add_argument(
        "--strict", action="store_true", help="exit 1 on any failure or wrong token count"
    )
    return cli


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _context(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value} is below 2: no room for prompt and output")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 1")
    return value


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not 0 <= int(low) < int(high):
        raise argparse.ArgumentTypeError(f"{text}: LOW must be below HIGH")
    return int(low), int(high)


def check(args: argparse.Namespace) -> None:
    """Fill in what depends on other arguments; refuse what does not go together."""
    args.goodput = parse_goodput(args.goodput)
    if args.trace and args.rate:
        raise ValueError("--trace and --rate both say when to send: give one of them")
    if args.rate and not (args.duration or args.requests):
        raise ValueError("--rate needs --duration or --requests, else it never ends")
    if not 0 <= args.shared_prefix_tokens <= args.prompt_tokens:
        raise ValueError(
            f"--shared-prefix-tokens {args.shared_prefix_tokens} is not within 0 and "
            f"--prompt-tokens = {args.prompt_tokens}"
        )
    if args.endpoint == "chat" and args.prompt_form == "ids":
        raise ValueError("--prompt-form ids: the chat endpoint takes text only; use words")
    if args.prompt_form is None:
        args.prompt_form = "words" if args.endpoint == "chat" else "ids"
    if args.seed is None:
        args.seed = secrets.randbelow(2**32)
    if not (args.requests or args.duration or args.trace):
        args.requests = 10 * args.concurrency
