"""Writes what the fuzz targets start from: stages for frames.cpp, seeds for each target.

python -m tests.fuzz.models FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from skippy_sched.native import Library, find_library
from skippy_sched.split.gguf import GgufFile
from skippy_sched.split.slices import split
from tests.gguf_files import attention_bytes, gguf_bytes, recurrent_bytes

SIM_SPEC = "skippy-sim 1\nn_layer = 4\n"
STAGE_KEYS: dict[str, str | int | bool] = {
    "skippy__stage__layer_start": 0,
    "skippy__stage__layer_end": 1,
    "skippy__stage__n_layer": 3,
    "skippy__stage__model_digest": "0" * 64,
    "skippy__stage__idle_layer": True,
}
#: what the splitter looks at besides the number of layers
SPLIT_KEYS: dict[str, str | int | bool | Sequence[int]] = {
    "llama__feed_forward_length": [8, 8],
    "llama__attention__head_count_kv": [2, 2],
    "llama__leading_dense_block_count": 0,
    "split__count": 1,
    "general__alignment": 32,
}
#: offsets of a descriptor with a byte that makes another frame: tokens, parts, type, rank, axis,
#: dimensions
SHAPES = ((16, 2), (24, 2), (104, 1), (108, 1), (112, 0), (120, 8), (128, 2), (136, 3))
#: call, choices, then patches: what the first inputs of frames.cpp look like
FRAME_SEEDS = (
    [bytes([kind, choices]) for kind in range(6) for choices in (0, 1, 2, 6, 7)]
    + [bytes([0, 6, 0x22, 0, offset, 1]) for offset in range(0, 200, 4)]
    + [
        bytes([kind, 6, 0x20, 0, offset, value, 0x08])
        for kind in (0, 4)
        for offset, value in SHAPES
    ]
    + [bytes([0, 7, 0x40, 0, 1, 0x20, 0, 24, 2, 0x20, 0, 200, 1, 0x20, 0, 244, 1, 0x08])]
)


def write_models(folder: Path) -> None:
    """``sim`` and ``llama`` with the stages that frames.cpp opens."""
    for start, end in ((0, 2), (2, 3), (2, 4)):
        path = folder / "sim" / f"{start}-{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SIM_SPEC)
    whole = folder / "whole.gguf"
    whole.write_bytes(attention_bytes(width=32))
    library = Library.load(find_library("llama"))
    (folder / "llama").mkdir(exist_ok=True)
    for cuts in ([2], [2, 3]):
        slices = folder / f"slices-{len(cuts)}"
        for stage in split(whole, slices, library, cuts=cuts).stages:
            target = folder / "llama" / f"{stage.layer_start}-{stage.layer_end}"
            (slices / stage.file).replace(target)


def gguf_seeds(folder: Path, files: Sequence[bytes]) -> list[bytes]:
    """The files without their tensors' data: zeros will follow."""
    path, headers = folder / "seed.gguf", []
    for content in files:
        path.write_bytes(content)
        with GgufFile(path) as file:
            headers.append(content[: file.data_start])
    path.unlink()
    return headers


def write_seeds(folder: Path) -> None:
    """A folder per target with the inputs to start from."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = {
        "frames-sim": FRAME_SEEDS,
        "frames-llama": FRAME_SEEDS,
        "model-llama": gguf_seeds(
            folder,
            (
                attention_bytes(layers=1, width=8, vocab=264),
                attention_bytes(layers=2, width=8, vocab=264, **STAGE_KEYS),
                recurrent_bytes(layers=1, width=8, vocab=264),
            ),
        ),
        "slicer": gguf_seeds(
            folder,
            (
                attention_bytes(layers=3, width=4, vocab=262),
                attention_bytes(layers=2, width=4, vocab=262, **SPLIT_KEYS),
                gguf_bytes(
                    {
                        "general.architecture": "gemma3",
                        "gemma3.block_count": 4,
                        "gemma3.attention.sliding_window_pattern": 2,
                    },
                    {f"blk.{layer}.attn_norm.weight": bytes(32) for layer in range(4)},
                ),
            ),
        ),
        "model-sim": [
            SIM_SPEC.encode(),
            b"skippy-sim 1\nvocab = 300\ntoken = 6162\nchat_template = a\nrecurrent = true\n",
            b"skippy-sim 1\nfault = call=decode nth=2 status=RUNTIME_ERROR\nmtp_heads = 2\n",
        ],
    }
    for target, inputs in seeds.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for number, content in enumerate(inputs):
            (folder / target / f"{number}").write_bytes(content)


if __name__ == "__main__":
    write_models(Path(sys.argv[1]) / "models")
    write_seeds(Path(sys.argv[1]) / "seeds")
