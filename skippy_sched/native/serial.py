"""Batches that have to run one entry at a time, and the rules that choose them.

Knows which entries a native batch cannot take. It decides before anything runs: a native error is
never answered by trying this path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import HostCheckError, PartialBatchExecution
from .iteration import (
    DecodeFrameBatchEntry,
    DecodeFrameBatchOutput,
    IterationBatchOutput,
    IterationEntry,
    IterationSample,
    Phase,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activation import ActivationFrame


def frame_has_optional_parts(frame: ActivationFrame | None) -> bool:
    """Whether a frame carries parts that the batched frontier does not concatenate; an impossible
    part count counts as yes."""
    return frame is not None and frame.desc.has_optional_parts


def requires_one_at_a_time(entry: IterationEntry | DecodeFrameBatchEntry) -> bool:
    """Whether this entry makes its whole batch run one entry at a time."""
    return entry.session.runs_alone or frame_has_optional_parts(entry.input)


def emits_sample(entry: IterationEntry) -> bool:
    """Whether running the entry yields a sample: asked for, and on a terminal stage."""
    return entry.sample_last and entry.session.terminal_stage


def validate_serial_decode(entry: IterationEntry) -> None:
    """Raise HostCheckError unless the entry is a decode that one decode step can run.

    The session has tokens already, or has none and starts from a frame at position 0 (a
    downstream stage of a recurrent model); one token; sampled; at most one position, its own.
    """
    count = entry.session.token_count
    positions = [int(position) for position in entry.positions]
    starts_from_frame = count == 0 and entry.input is not None and positions in ([], [0])
    if count == 0 and not starts_from_frame:
        raise HostCheckError(
            "a decode run on its own needs a session with tokens, or an input frame at position "
            "0: prefill the session first"
        )
    if len(entry.token_ids) != 1:
        raise HostCheckError(
            f"a decode run on its own takes exactly one token, not {len(entry.token_ids)}"
        )
    if not entry.sample_last:
        raise HostCheckError("a decode run on its own has to sample: set sample_last")
    if len(positions) > 1:
        raise HostCheckError(
            f"a decode run on its own takes at most one position, not {len(positions)}"
        )
    if positions and positions[0] != count:
        raise HostCheckError(
            f"decode position {positions[0]} does not match the session's position {count}"
        )


def execute_one(entry: IterationEntry) -> tuple[int, ActivationFrame]:
    """Run one entry through the single-request call of its phase; -1 when nothing is sampled."""
    session = entry.session
    if entry.phase is Phase.DECODE:
        validate_serial_decode(entry)
        return session.decode_step_frame_sampled(
            int(entry.token_ids[0]), entry.sampling, entry.input
        )
    if entry.sample_last:
        return session.prefill_chunk_frame_sampled_with_positions(
            entry.token_ids, entry.positions, entry.sampling, entry.input
        )
    frame = session.prefill_chunk_frame_with_positions(
        entry.token_ids, entry.positions, entry.input
    )
    return -1, frame


def iteration_one_at_a_time(entries: Sequence[IterationEntry]) -> IterationBatchOutput:
    """Run the entries in order. Raises PartialBatchExecution at the first that fails."""
    frames: list[ActivationFrame] = []
    samples: list[IterationSample] = []
    for index, entry in enumerate(entries):
        try:
            predicted, frame = execute_one(entry)
        except Exception as error:  # whatever it was, the entries before it have moved
            done = IterationBatchOutput(frames, samples)
            raise PartialBatchExecution(index, error, done) from error
        if emits_sample(entry):
            samples.append(IterationSample(index, predicted))
        frames.append(frame)
    return IterationBatchOutput(frames, samples)


def decode_one_at_a_time(
    entries: Sequence[DecodeFrameBatchEntry],
) -> list[DecodeFrameBatchOutput]:
    """Run the decode steps in order. Raises PartialBatchExecution at the first that fails."""
    outputs: list[DecodeFrameBatchOutput] = []
    for index, entry in enumerate(entries):
        try:
            answer = entry.session.decode_step_frame_sampled(
                entry.token_id, entry.sampling, entry.input
            )
        except Exception as error:  # whatever it was, the entries before it have moved
            raise PartialBatchExecution(index, error, outputs) from error
        outputs.append(DecodeFrameBatchOutput(*answer))
    return outputs
