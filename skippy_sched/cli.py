"""The skippy-sched command: serve, check-config, doctor, generate, explain.

More of it is in simulate/commands.py and split/command.py.

Imports what a command needs only when it runs: the command line must answer at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from skippy_sched.errors import SkippySchedError
from skippy_sched.simulate import commands as simulate
from skippy_sched.split import command as split

if TYPE_CHECKING:
    from skippy_sched.config import Config
    from skippy_sched.default_model import Progress

#: flag -> (section, key) of the configuration
FLAGS = {
    "model": ("model", "path"),
    "library": ("engine", "library"),
    "lanes": ("engine", "lanes"),
    "host": ("server", "host"),
    "port": ("server", "port"),
    "log_level": ("log", "level"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one line, not a traceback."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except SkippySchedError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"skippy-sched: error: {line}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more at exit.
        sys.stdout = None
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skippy-sched",
        description="Serve many text-generation requests on one model by continuous batching.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon")
    _add_config(serve)
    serve.add_argument("--host", help="address to listen on")
    serve.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
    serve.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check-config", help="check a file, print what it comes to")
    check.add_argument("config", type=Path, metavar="FILE", help="TOML configuration")
    check.set_defaults(run=_check_config)

    doctor = commands.add_parser(
        "doctor", help="show the library and the model that serve would use, and what they lack"
    )
    _add_config(doctor)
    doctor.set_defaults(run=_doctor)

    generate = commands.add_parser("generate", help="generate once, to the terminal")
    generate.add_argument("prompt", help="what to say to the model; - reads standard input")
    _add_config(generate)
    generate.add_argument("--max-tokens", type=int, metavar="N", help="tokens at most")
    generate.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy")
    generate.add_argument("--seed", type=int, metavar="N", help="repeatable samples")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="as a chat message (the default)")
    form.add_argument("--raw", action="store_true", help="continue the text, without a template")
    generate.set_defaults(run=_generate)

    explain = commands.add_parser("explain", help="why a request waits, or what it got")
    explain.add_argument("id", help="an answer's id, or its x-request-id")
    explain.add_argument("--url", default="http://127.0.0.1:8080", help="the daemon's address")
    explain.add_argument("--json", action="store_true", help="the daemon's answer as it is")
    explain.set_defaults(run=_explain)

    hash_key = commands.add_parser("hash-key", help="what configuration holds in place of a key")
    hash_key.add_argument("--generate", action="store_true", help="make a new key, not ask for one")
    hash_key.set_defaults(run=_hash_key)

    top = commands.add_parser("top", help="what a daemon does right now, live")
    top.add_argument("--url", default="http://127.0.0.1:8080", help="the daemon's address")
    top.set_defaults(run=_top)
    split.add_parser(commands)
    simulate.add_parsers(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"skippy-sched {version('skippy-sched')}\n")
        parser.exit()


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="TOML configuration")
    parser.add_argument("--model", metavar="GGUF", help="model file; without it a small default")
    parser.add_argument("--library", metavar="LIB", help='"llama", "sim", or a libskippy\'s path')
    parser.add_argument("--lanes", type=int, metavar="N", help="requests that run at once")


def _load(options: argparse.Namespace, **more: tuple[tuple[str, str], object]) -> Config:
    from skippy_sched.config_file import load_config

    flags: Mapping[str, tuple[tuple[str, str], object]] = {
        f"--{name.replace('_', '-')}": (place, value)
        for name, place in FLAGS.items()
        if (value := getattr(options, name, None)) is not None
    }
    return load_config(options.config, flags={**flags, **more})


def _serve(options: argparse.Namespace) -> int:
    config = _load(options)
    from skippy_sched import logs
    from skippy_sched.server.daemon import serve

    logs.configure(config.log)
    with ExitStack() as stack:
        return serve(config, partial(_load, options), _download_bar(stack))


def _check_config(options: argparse.Namespace) -> int:
    from skippy_sched.config_file import to_toml

    sys.stdout.write(to_toml(_load(options)))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    config = _load(options)
    from skippy_sched import logs
    from skippy_sched.doctor import doctor

    logs.configure(config.log.model_copy(update={"level": "warning"}))
    with ExitStack() as stack:
        return doctor(config, _say, _download_bar(stack))


def _generate(options: argparse.Namespace) -> int:
    more = {} if options.lanes else {"one request": (("engine", "lanes"), 1)}
    config = _load(options, **more)
    from skippy_sched import logs
    from skippy_sched.generate import generate

    logs.configure(config.log.model_copy(update={"level": "warning"}))
    with ExitStack() as stack:
        return generate(
            config,
            sys.stdin.read() if options.prompt == "-" else options.prompt,
            is_chat=not options.raw,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            progress=_download_bar(stack),
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # in order with errors, also where both are written to one file


def _top(options: argparse.Namespace) -> int:
    from skippy_sched.top import top

    return top(options.url)


def _hash_key(options: argparse.Namespace) -> int:
    import getpass
    import secrets

    from skippy_sched.server.keys import check_strength, hash_key

    if options.generate:
        key = f"sk-{secrets.token_urlsafe(32)}"
        sys.stderr.write(f"the key, which is shown this once: {key}\n")
    elif sys.stdin.isatty():
        key = getpass.getpass("key: ")
    else:
        key = sys.stdin.readline().strip()
    check_strength(key)
    sys.stdout.write(hash_key(key) + "\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    from skippy_sched.explain import explain

    return explain(options.url, options.id, as_json=options.json)


def _download_bar(stack: ExitStack) -> Progress | None:
    """A progress bar on a terminal, begun when the first bytes come."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("fetching the default model", total=None)
    stack.callback(bar.stop)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    return show
