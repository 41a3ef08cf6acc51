"""Whole GGUF files from a few lines: any keys and tensors, and two models small enough to run.

The small models have random weights: what they say means nothing, but it repeats.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Value = str | int | bool | float | Sequence[int] | Sequence[float] | Sequence[str]
Array = np.ndarray[Any, Any]
ALIGNMENT = 32
F32 = 0
UNKNOWN, NORMAL, CONTROL, BYTE = 2, 1, 3, 6  # token types
SPECIAL = ("<unk>", "<s>", "</s>")


def packed(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def an_entry(name: str, value: Value) -> bytes:
    """A key entry: numbers are u32, floats f32, lists of numbers i32 or f32."""
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
    if value and isinstance(value[0], float):
        return packed(name) + struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return packed(name) + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf_bytes(
    keys: Mapping[str, Value], tensors: Mapping[str, bytes | Array], *, version: int = 3
) -> bytes:
    """A whole file; tensors are F32, those given as bytes have one dimension."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(an_entry(name, value) for name, value in keys.items())
    data = b""
    for name, content in tensors.items():
        shape = (len(content) // 4,) if isinstance(content, bytes) else content.shape[::-1]
        raw = content if isinstance(content, bytes) else content.astype("<f4").tobytes()
        head += packed(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", F32, len(data))
        data += raw + bytes(-len(raw) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + data


def vocabulary(size: int) -> dict[str, Value]:
    """Keys of a SentencePiece vocabulary: specials, all bytes, a space, pairs of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [first + second for first in letters for second in letters]
    pieces = ["\u2581", *pairs][: size - len(SPECIAL) - 256]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0 if kind != NORMAL else -1.0 for kind in types],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def attention_bytes(
    *, layers: int = 4, width: int = 64, vocab: int = 512, seed: int = 7, **more: Value
) -> bytes:
    """A plain transformer of the architecture "llama"; ``more`` are keys, dots as ``__``."""
    random = np.random.default_rng(seed)

    def weight(rows: int, columns: int) -> Array:
        return random.standard_normal((rows, columns)) / np.sqrt(columns)

    tensors: dict[str, bytes | Array] = {"token_embd.weight": 4 * weight(vocab, width)}
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": np.ones(width),
            f"blk.{layer}.attn_q.weight": weight(width, width),
            f"blk.{layer}.attn_k.weight": weight(width, width),
            f"blk.{layer}.attn_v.weight": weight(width, width),
            f"blk.{layer}.attn_output.weight": weight(width, width),
            f"blk.{layer}.ffn_norm.weight": np.ones(width),
            f"blk.{layer}.ffn_gate.weight": weight(2 * width, width),
            f"blk.{layer}.ffn_up.weight": weight(2 * width, width),
            f"blk.{layer}.ffn_down.weight": weight(width, 2 * width),
        }
    tensors |= {"output_norm.weight": np.ones(width), "output.weight": 4 * weight(vocab, width)}
    keys: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": 2 * width,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": width // 2,
        "llama.vocab_size": vocab,
        **vocabulary(vocab),
    }
    keys |= {name.replace("__", "."): value for name, value in more.items()}
    return gguf_bytes(keys, tensors)


def recurrent_bytes(*, layers: int = 2, width: int = 32, vocab: int = 512, seed: int = 7) -> bytes:
    """A state-space model of the architecture "mamba": its memory is recurrent."""
    random = np.random.default_rng(seed)
    inner, states, rank, kernel = 2 * width, 8, 4, 4

    def weight(rows: int, columns: int) -> Array:
        return random.standard_normal((rows, columns)) / np.sqrt(columns)

    tensors: dict[str, bytes | Array] = {"token_embd.weight": 4 * weight(vocab, width)}
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": np.ones(width),
            f"blk.{layer}.ssm_in.weight": weight(2 * inner, width),
            f"blk.{layer}.ssm_conv1d.weight": weight(inner, kernel),
            f"blk.{layer}.ssm_conv1d.bias": np.zeros(inner),
            f"blk.{layer}.ssm_x.weight": weight(rank + 2 * states, inner),
            f"blk.{layer}.ssm_dt.weight": weight(inner, rank),
            f"blk.{layer}.ssm_dt.bias": np.zeros(inner),
            f"blk.{layer}.ssm_a": -np.ones((inner, states)),
            f"blk.{layer}.ssm_d": np.ones(inner),
            f"blk.{layer}.ssm_out.weight": weight(width, inner),
        }
    tensors |= {"output_norm.weight": np.ones(width), "output.weight": 4 * weight(vocab, width)}
    keys: dict[str, Value] = {
        "general.architecture": "mamba",
        "mamba.context_length": 4096,
        "mamba.embedding_length": width,
        "mamba.block_count": layers,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.ssm.conv_kernel": kernel,
        "mamba.ssm.inner_size": inner,
        "mamba.ssm.state_size": states,
        "mamba.ssm.time_step_rank": rank,
        "mamba.vocab_size": vocab,
        **vocabulary(vocab),
    }
    return gguf_bytes(keys, tensors)


def a_cuttable_file(
    path: Path, *, architecture: str = "llama", layers: int = 6, **keys: Value
) -> Path:
    """A file with one tensor a layer; ``keys`` are of the architecture, dots as ``__``."""
    own = {f"{architecture}.{name.replace('__', '.')}": value for name, value in keys.items()}
    tensors: dict[str, bytes | Array] = {
        "token_embd.weight": b"E" * 64,
        "output.weight": b"O" * 36,
    }
    tensors |= {f"blk.{layer}.attn_norm.weight": bytes([layer]) * 40 for layer in range(layers)}
    all_keys: dict[str, Value] = {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": ["a", "bc", "\u00e9"],
        f"{architecture}.block_count": layers,
        **own,
    }
    path.write_bytes(gguf_bytes(all_keys, tensors))
    return path
