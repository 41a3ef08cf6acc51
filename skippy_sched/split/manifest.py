"""The manifest of a split model: which file holds which layers, and what crosses the cuts.

Written beside the slices as manifest.json; a configuration may name it in place of a model.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from skippy_sched.errors import SplitError

MANIFEST_FILE = "manifest.json"
VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(_Record):
    """The model that was split."""

    file: str
    bytes: int
    sha256: str


class Slice(_Record):
    """Layers [layer_start, layer_end); identities in hex name what comes in and goes out."""

    file: str
    bytes: int
    layer_start: int
    layer_end: int
    idle_layer: bool
    input_identity: str | None
    output_identity: str | None


class Check(_Record):
    """What the self-check compared: whole and split, all equal."""

    prompt_tokens: int
    decoded_tokens: int
    token_signals: int


class Manifest(_Record):
    skippy_stages: int
    source: Source
    architecture: str
    layers: int
    stages: list[Slice]
    check: Check

    def save(self, folder: Path) -> None:
        (folder / MANIFEST_FILE).write_text(self.model_dump_json(indent=2) + "\n")


def read_manifest(path: Path) -> tuple[Manifest, list[Path]]:
    """The manifest at ``path`` and its slices' files, in order. Raises SplitError."""
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SplitError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise SplitError(
            f"{path} is no manifest of a split model: {place}: {first['msg']}"
        ) from None
    if manifest.skippy_stages != VERSION:
        raise SplitError(
            f"{path} has version {manifest.skippy_stages}, this package reads {VERSION}: split "
            "the model again"
        )
    stages = manifest.stages
    bounds = [(stage.layer_start, stage.layer_end) for stage in stages]
    joined = all(a[1] == b[0] for a, b in pairwise(bounds))
    if not bounds or not joined or bounds[0][0] != 0 or bounds[-1][1] != manifest.layers:
        raise SplitError(f"{path}: its stages do not cover layers 0 to {manifest.layers}")
    if any(a.output_identity != b.input_identity for a, b in pairwise(stages)):
        raise SplitError(f"{path}: what a stage gives is not what the next one takes")
    files = []
    for stage in stages:
        file = path.parent / stage.file
        found = file.stat().st_size if file.is_file() else None
        if found != stage.bytes:
            state = "is missing" if found is None else f"has {found} bytes, not {stage.bytes}"
            raise SplitError(f"{path}: {file} {state}; split the model again")
        files.append(file)
    return manifest, files
