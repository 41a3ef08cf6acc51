"""Splits a model: writes a slice per stage, checks them against the whole, then a manifest.

All of it in a folder beside the target that takes its place only when everything was exact.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from skippy_sched.errors import SplitError
from skippy_sched.native import Library
from skippy_sched.split.architectures import (
    Layers,
    check_cuts,
    even_cuts,
    layers_of,
    slice_entries,
)
from skippy_sched.split.gguf import GgufFile, Tensor
from skippy_sched.split.manifest import MANIFEST_FILE, VERSION, Check, Manifest, Slice, Source
from skippy_sched.split.selfcheck import DECODED_TOKENS, PROMPT_TOKENS, compare, run

_LAYER = re.compile(r"blk\.(\d+)\.")
#: Only the last stage computes logits; without this tensor it takes the token embedding.
_OUTPUT = "output."

Say = Callable[[str], None]


def split(
    model: Path,
    folder: Path,
    library: Library,
    *,
    stages: int | None = None,
    cuts: Sequence[int] | None = None,
    say: Say = lambda line: None,
) -> Manifest:
    """Split into ``stages`` even stages or at the layers ``cuts``, and check; raises SplitError.

    ``folder`` must not exist, or be empty. ``say`` gets a line per step.
    """
    try:
        taken = os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise SplitError(f"cannot write {folder}: {error.strerror}") from error
    if taken:
        raise SplitError(f"{folder} exists and is not an empty folder: remove it or name another")
    with GgufFile(model) as source:
        layers = layers_of(source)
        chosen = (
            list(cuts) if cuts is not None else even_cuts(layers, 2 if stages is None else stages)
        )
        check_cuts(layers, chosen)
        digest = _digest(model)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
            ) as name:
                # An own folder inside, since it is moved away and the outer one is removed.
                work = Path(name) / "stages"
                work.mkdir()
                written = _write(source, layers, [0, *chosen, layers.count], digest, work, say)
                manifest = _checked(source, layers, digest, written, library, say)
                manifest.save(work)
                os.replace(work, folder)
        except OSError as error:
            raise SplitError(f"cannot write {folder}: {error}") from error
    say(f"{folder / MANIFEST_FILE}")
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(
    source: GgufFile, layers: Layers, bounds: Sequence[int], digest: str, work: Path, say: Say
) -> list[tuple[Path, int, int]]:
    written = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        entries, held = slice_entries(source, layers, start, end, digest)
        path = work / f"stage-{number}.gguf"
        last = end == layers.count
        size = source.write(path, entries, _tensors(source.tensors, start, held, last))
        idle = "" if last else f" (and layer {end}, idle)"
        say(f"{path.name}: layers {start} to {end - 1}{idle}, {size:,} bytes")
        written.append((path, start, end))
    return written


def _tensors(
    tensors: Sequence[Tensor], start: int, held: int, last: bool
) -> Iterator[tuple[str, Tensor]]:
    """Those of layers [start, held) renumbered, and those of no layer."""
    for tensor in tensors:
        if (layer := _LAYER.match(tensor.name)) is not None:
            number = int(layer[1])
            if start <= number < held:
                yield f"blk.{number - start}.{tensor.name[layer.end() :]}", tensor
        elif last or not tensor.name.startswith(_OUTPUT):
            yield tensor.name, tensor


def _checked(
    source: GgufFile,
    layers: Layers,
    digest: str,
    written: Sequence[tuple[Path, int, int]],
    library: Library,
    say: Say,
) -> Manifest:
    whole = run(library, [source.path])
    split_ = run(library, [path for path, _, _ in written])
    compare(whole, split_)
    tokens = len(whole.tokens)
    say(
        f"checked: {PROMPT_TOKENS} prompt tokens and {DECODED_TOKENS} decodes, whole and split: "
        f"{tokens}/{tokens} tokens and {tokens}/{tokens} token signals bit-equal"
    )
    identities = [None, *split_.boundaries, None]
    return Manifest(
        skippy_stages=VERSION,
        source=Source(file=source.path.name, bytes=source.size, sha256=digest),
        architecture=layers.architecture,
        layers=layers.count,
        stages=[
            Slice(
                file=path.name,
                bytes=path.stat().st_size,
                layer_start=start,
                layer_end=end,
                idle_layer=end < layers.count,
                input_identity=identities[number],
                output_identity=identities[number + 1],
            )
            for number, (path, start, end) in enumerate(written)
        ],
        check=Check(
            prompt_tokens=PROMPT_TOKENS, decoded_tokens=DECODED_TOKENS, token_signals=tokens
        ),
    )
