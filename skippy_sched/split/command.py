"""The split command: arguments in, lines out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "split", help="split a model into stages that each hold a range of its layers"
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--stages", type=int, metavar="K", help="this many stages, as even as can be"
    )
    where.add_argument(
        "--at", type=_layers, metavar="L,L,...", help="a stage starts at each of these layers"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder to make; MODEL-stages by default"
    )
    parser.add_argument("--library", default="llama", metavar="LIB", help="the engine that checks")
    parser.set_defaults(run=_split)


def _layers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no list of layers such as 10,20"
        ) from None


def _split(options: argparse.Namespace) -> int:
    from skippy_sched.errors import StartupError
    from skippy_sched.native import Library, SkippyNativeError, find_library
    from skippy_sched.split.slices import split

    model: Path = options.model
    folder = options.output or Path(f"{model.stem}-stages")
    try:
        library = Library.load(find_library(options.library))
    except SkippyNativeError as error:
        raise StartupError(str(error)) from error
    split(
        model,
        folder,
        library,
        stages=options.stages,
        cuts=options.at,
        say=lambda line: _say(line),
    )
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
