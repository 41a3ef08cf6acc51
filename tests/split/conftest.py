"""Small GGUF files from a few lines, and the second real model."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from _gemma import gemma_model as fetch_gemma  # type: ignore[import-not-found]

Value = str | int | bool | float | Sequence[int] | Sequence[str]
ALIGNMENT = 32


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    try:
        path: Path = fetch_gemma()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no gemma model: {error}")
    return path


def packed(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def an_entry(name: str, value: Value) -> bytes:
    """A key entry: numbers are u32, floats f32, lists of numbers i32."""
    match value:
        case bool():
            return packed(name) + struct.pack("<I?", 7, value)
        case int():
            return packed(name) + struct.pack("<II", 4, value)
        case float():
            return packed(name) + struct.pack("<If", 6, value)
        case str():
            return packed(name) + struct.pack("<I", 8) + packed(value)
    if value and isinstance(value[0], str):
        head = struct.pack("<IIQ", 9, 8, len(value))
        return packed(name) + head + b"".join(packed(str(text)) for text in value)
    return packed(name) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf_bytes(
    keys: Mapping[str, Value], tensors: Mapping[str, bytes], *, version: int = 3
) -> bytes:
    """A whole file; tensors are one-dimensional F32 with these bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(an_entry(name, value) for name, value in keys.items())
    offset, data = 0, b""
    for name, content in tensors.items():
        head += packed(name) + struct.pack("<IQIQ", 1, len(content) // 4, 0, offset)
        data += content + bytes(-len(content) % ALIGNMENT)
        offset = len(data)
    return head + bytes(-len(head) % ALIGNMENT) + data


def a_model(path: Path, *, architecture: str = "llama", layers: int = 6, **keys: Value) -> Path:
    """A model file with one tensor a layer; ``keys`` are of the architecture, dots as ``__``."""
    own = {f"{architecture}.{name.replace('__', '.')}": value for name, value in keys.items()}
    tensors = {"token_embd.weight": b"E" * 64, "output.weight": b"O" * 36}
    tensors |= {f"blk.{layer}.attn_norm.weight": bytes([layer]) * 40 for layer in range(layers)}
    all_keys: dict[str, Value] = {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": ["a", "bc", "\u00e9"],
        f"{architecture}.block_count": layers,
        **own,
    }
    path.write_bytes(gguf_bytes(all_keys, tensors))
    return path
