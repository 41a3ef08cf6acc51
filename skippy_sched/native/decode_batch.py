"""One native call for one token each of many sessions: the decode batch, with frames.

Knows how its entries become C arrays. An iteration, which takes prompts too, is batch.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .batch import iteration_batch_sampled, refuse_closed, sampling_addresses
from .cdef import address_of, ffi
from .iteration import DecodeFrameBatchEntry, DecodeFrameBatchOutput, IterationEntry
from .outputs import Outputs
from .serial import decode_one_at_a_time, requires_one_at_a_time
from .state import added, int32_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .session import StageSession


def decode_step_frame_batch_sampled(
    entries: Sequence[DecodeFrameBatchEntry],
) -> list[DecodeFrameBatchOutput]:
    """Run one token of every entry as one native batch, or one entry at a time where a batch is
    not possible. Raises as `IterationBatch.run`.

    On an exporting stage it is an iteration batch: there the native decode batch would fail for
    want of samples, after it had advanced every session.
    """
    if not entries:
        return []
    if any(map(requires_one_at_a_time, entries)):
        return decode_one_at_a_time(entries)
    if not all(entry.session.terminal_stage for entry in entries):
        return _decode_as_iteration(entries)
    sessions = [entry.session for entry in entries]
    if not all(session.address for session in sessions):
        refuse_closed(sessions)
    return _decode_batch(entries, sessions)


def _decode_as_iteration(
    entries: Sequence[DecodeFrameBatchEntry],
) -> list[DecodeFrameBatchOutput]:
    output = iteration_batch_sampled(
        [
            IterationEntry(entry.session, [entry.token_id], (), entry.sampling, entry.input)
            for entry in entries
        ]
    )
    predicted = dict(output.samples)
    return [
        DecodeFrameBatchOutput(predicted.get(index, -1), frame)
        for index, frame in enumerate(output.request_outputs)
    ]


def _decode_batch(
    entries: Sequence[DecodeFrameBatchEntry], sessions: Sequence[StageSession]
) -> list[DecodeFrameBatchOutput]:
    rows = len(entries)
    model = sessions[0].model
    sampling = np.array(sampling_addresses(entries), dtype=np.uint64)
    handles = np.array([session.address for session in sessions], dtype=np.uint64)
    tokens = int32_array([entry.token_id for entry in entries], "token_id")
    kept = [(None, None) if e.input is None else e.input.pointers() for e in entries]
    descs = np.array([0 if d is None else address_of(d) for d, _ in kept], dtype=np.uint64)
    payloads = np.array([0 if p is None else address_of(p) for _, p in kept], dtype=np.uint64)
    updated = [added(session.token_count, 1) for session in sessions]
    outputs = Outputs(rows)
    predicted: np.ndarray[Any, Any] = np.zeros(rows, dtype=np.int32)
    slot = model.library.error_slot()
    outputs.execute(
        "skippy_decode_step_frame_batch_sampled",
        rows,
        None,
        slot,
        lambda raw_descs: model.lib.skippy_decode_step_frame_batch_sampled(
            ffi.from_buffer("struct skippy_session *[]", handles),
            ffi.from_buffer("int32_t[]", tokens),
            ffi.from_buffer("struct skippy_sampling_config *[]", sampling),
            ffi.from_buffer("struct skippy_activation_desc *[]", descs),
            ffi.from_buffer("void *[]", payloads),
            raw_descs,
            ffi.from_buffer("void *[]", outputs.pointers),
            ffi.from_buffer("size_t[]", outputs.capacities),
            ffi.from_buffer("size_t[]", outputs.needed),
            ffi.from_buffer("int32_t[]", predicted),
            rows,
            rows,
            slot.out,
        ),
    )
    for session, count in zip(sessions, updated, strict=True):
        session.token_count = count
    frames = outputs.frames(rows)
    frames = frames() if callable(frames) else frames
    return list(map(DecodeFrameBatchOutput, predicted.tolist(), frames))
