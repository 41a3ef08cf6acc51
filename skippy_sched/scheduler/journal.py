"""Records what goes into a scheduler and what it decides: one JSON line per input or decision.

A RecordingScheduler is a Scheduler that writes its calls down; without one nothing is recorded
and nothing is slower. The file holds prompts. Replaying it is simulate/replay.py's.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

from skippy_sched.config import Config
from skippy_sched.errors import RequestError, StartupError
from skippy_sched.native.facts import ModelFacts
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.iteration import Fate, Fault, Iteration, Outcome
from skippy_sched.scheduler.reconcile import Reconciled
from skippy_sched.scheduler.request import GREEDY, Request, RequestParams

FORMAT = "skippy-journal 1"
#: Gzip's fastest level: three times smaller, and cheap enough to write beside the engine.
GZIP_LEVEL = 1

#: A line's meaning is its key "is"; the rest of the record is by the functions below.
Record = dict[str, Any]
_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_PARAMS = RequestParams()
_NOTHING_RAN = Outcome(0)


class Journal:
    """A journal being written; buffered, so that a crash may cost the last lines."""

    def __init__(self, path: Path, config: Config, facts: ModelFacts) -> None:
        """Raises OSError."""
        self._file: TextIO
        # It holds prompts: only its owner may read it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._raw = os.fdopen(descriptor, "wb", buffering=1 << 16)
        if path.suffix == ".gz":
            self._file = gzip.open(  # noqa: SIM115 - closed by close()
                self._raw, "wt", compresslevel=GZIP_LEVEL, encoding="ascii"
            )
        else:
            self._file = io.TextIOWrapper(self._raw, encoding="ascii")
        self.write(
            {
                "is": FORMAT,
                "engine": config.engine.model_dump(mode="json"),
                "scheduler": config.scheduler.model_dump(mode="json"),
                "speculation": config.speculation.model_dump(mode="json"),
                "facts": {**dataclasses.asdict(facts), "chat_template": None},
            }
        )

    def write(self, record: Record) -> None:
        self._file.write(_dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()
        self._raw.close()


def open_journal(config: Config, facts: ModelFacts) -> Journal | None:
    """The journal that a configuration asks for; raises StartupError."""
    if config.scheduler.journal is None:
        return None
    path = Path(config.scheduler.journal).expanduser()
    try:
        return Journal(path, config, facts)
    except OSError as error:
        raise StartupError(
            f"scheduler.journal: cannot write {path}: {error.strerror}; name a writable file"
        ) from error


class RecordingScheduler(Scheduler):
    """A scheduler that writes down every call which can change what it decides."""

    def __init__(self, journal: Journal, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._journal = journal
        self._paused: list[int] = []
        self._decode_keys: list[int] = []

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._journal.write({"is": "submit", **request_record(request)})

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self._journal.write({"is": "cancel", "key": request.key})

    def sweep(self, now: float) -> list[Request]:
        ended = super().sweep(now)
        if ended:
            keys = [request.key for request in ended]
            self._journal.write({"is": "sweep", "now": now, "ended": keys})
        return ended

    def stop(self, request: Request, stop: str, now: float, behind: int = 0) -> bool:
        done = super().stop(request, stop, now, behind)
        record = {"is": "stop", "key": request.key, "stop": stop, "now": now, "behind": behind}
        self._journal.write(record)
        return done

    def fail(self, request: Request, error: RequestError, now: float) -> bool:
        done = super().fail(request, error, now)
        self._journal.write({"is": "fail", "key": request.key, "error": str(error), "now": now})
        return done

    def engine_lost(self, now: float) -> list[Request]:
        failed = super().engine_lost(now)
        keys = [request.key for request in failed]
        self._journal.write({"is": "lost", "now": now, "failed": keys})
        return failed

    def next_iteration(self, now: float) -> Iteration | None:
        paused = [request.key for request in self.state.decoding.values() if request.paused]
        iteration = super().next_iteration(now)
        if paused != self._paused:
            self._journal.write({"is": "paused", "keys": paused})
            self._paused = paused
        if iteration is not None:
            record = iteration_record(iteration, self._decode_keys)
            self._decode_keys = list(iteration.decode_keys)
            self._journal.write({"is": "plan", "now": now, **record})
        return iteration

    def on_outcome(self, outcome: Outcome, now: float) -> Reconciled:
        reconciled = super().on_outcome(outcome, now)
        self._journal.write({"is": "outcome", "now": now, **outcome_record(outcome)})
        return reconciled

    def learn(self, outcome: Outcome, reconciled: Reconciled) -> None:
        super().learn(outcome, reconciled)
        self._journal.write({"is": "learn", "number": outcome.number})


def is_journal(path: Path) -> bool:
    """Whether a file begins as a journal does; False for one that cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return FORMAT.encode() in file.read(len(FORMAT) + 16)
    except OSError:
        return False


def read_journal(path: Path) -> Generator[tuple[int, Record], None, bool]:
    """Line numbers and records; the first is the header. Raises ValueError naming the line.

    A last line that was cut off by a crash ends the journal; returns whether that was so.
    """
    number = 0
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return True
                record = json.loads(line)
                if number == 1 and record.get("is") != FORMAT:
                    raise ValueError(f"its first record is not {FORMAT!r}")
                yield number, record
    except EOFError:
        return True  # a compressed journal
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}:{number}: not a journal: {error}") from error
    return False


# --- records ----------------------------------------------------------------------------------


def _changed(value: Any, default: Any) -> Record:
    """The fields of a dataclass that differ from the default's, as JSON can hold them."""
    names = (field.name for field in dataclasses.fields(value))
    found = {name: getattr(value, name) for name in names}
    return {
        name: sorted(given) if isinstance(given, frozenset) else given
        for name, given in found.items()
        if given != getattr(default, name)
    }


def request_record(request: Request) -> Record:
    params = _changed(dataclasses.replace(request.params, sampling=GREEDY), _PARAMS)
    return {
        "key": request.key,
        "name": request.name,
        "prompt": request.tokens[: request.prompt_tokens],
        "token_limit": request.token_limit,
        "stop_tokens": sorted(request.stop_tokens),
        "params": params,
        "sampling": _changed(request.sampling, GREEDY),
        "arrived_at": request.arrived_at,
    }


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def recorded_request(record: Record) -> Request:
    """The request as it was when it was submitted."""
    sampling = SamplingConfig(**{k: _tuples(v) for k, v in record["sampling"].items()})
    given = {k: _tuples(v) for k, v in record["params"].items()}
    if "stop_token_ids" in given:
        given["stop_token_ids"] = frozenset(given["stop_token_ids"])
    return Request(
        key=record["key"],
        name=record["name"],
        prompt=record["prompt"],
        token_limit=record["token_limit"],
        params=RequestParams(sampling=sampling, **given),
        sampling=sampling,
        stop_tokens=frozenset(record["stop_tokens"]),
        arrived_at=record["arrived_at"],
    )


def iteration_record(iteration: Iteration, decode_keys_before: list[int]) -> Record:
    """Everything decided; the tokens of its rows follow from inputs and outcomes.

    ``decodes`` is left out when they are those of the iteration before.
    """
    record: Record = {"number": iteration.number}
    if iteration.commands:
        record["commands"] = [_command_record(command) for command in iteration.commands]
    if list(iteration.decode_keys) != decode_keys_before:
        record["decodes"] = list(iteration.decode_keys)
    if iteration.chunks:
        record["chunks"] = [
            [chunk.key, chunk.start, len(chunk.tokens), chunk.sample_last]
            for chunk in iteration.chunks
        ]
    if iteration.verifies:
        record["verifies"] = [
            [verify.key, list(verify.tokens), verify.propose] for verify in iteration.verifies
        ]
    return record


def _command_record(command: Any) -> list[Any]:
    """Its name and its fields; of tokens their number, of settings nothing: they are inputs."""
    record: list[Any] = [type(command).__name__]
    for field in dataclasses.fields(command):
        if field.name == "grammar":
            continue
        value = getattr(command, field.name)
        if isinstance(value, list | tuple):
            record.append(len(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, SamplingConfig):
            record.append(_command_record(value))
        elif isinstance(value, int | str | float | None):
            record.append(value)
    return record


def outcome_record(outcome: Outcome) -> Record:
    record = _changed(outcome, _NOTHING_RAN)
    record.pop("logprobs", None)  # nothing is decided by them
    if outcome.faults:
        record["faults"] = [
            [key, fault.fate.value, None if fault.error is None else str(fault.error)]
            for key, fault in outcome.faults.items()
        ]
    return record


def recorded_outcome(record: Record) -> Outcome:
    fields = {field.name for field in dataclasses.fields(Outcome)}
    given = {name: value for name, value in record.items() if name in fields}
    given["faults"] = {
        key: Fault(Fate(fate), None if error is None else Exception(error))
        for key, fate, error in record.get("faults", ())
    }
    return Outcome(**given)
