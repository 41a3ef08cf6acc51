"""What a stage refuses of a frame, before anything runs; each row of the rules for input frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from skippy_sched.native import (
    ActivationDesc,
    ActivationFrame,
    InvalidArgument,
    IterationEntry,
    StageSession,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import ACTIVATION_PART_OPTIONAL, GGML_TYPE_I32, ffi

from .conftest import Engine, a_stage

PROMPT = [301, 302, 303]


@dataclass(slots=True)
class Edge:
    """A downstream session and a frame that it would take."""

    session: StageSession
    frame: ActivationFrame

    def changed(self, change: Callable[[Any], object]) -> ActivationFrame:
        desc = ActivationDesc.from_bytes(self.frame.desc.to_bytes())
        change(desc.raw)
        return ActivationFrame(desc, self.frame.payload)


@pytest.fixture
def edge(cut_engine: Engine) -> Iterator[Edge]:
    frame = a_stage(cut_engine, 0, 2).create_session().prefill_chunk_frame(PROMPT)
    edge = Edge(a_stage(cut_engine, 2, 4).create_session(), frame)
    yield edge
    assert edge.session.token_count == edge.session.position


def setter(path: str, value: Any) -> Callable[[Any], None]:
    """Sets a field of the descriptor: "version", "parts.0.rank", "parts.0.dimensions.1"."""
    *steps, last = path.split(".")

    def change(raw: Any) -> None:
        for step in steps:
            raw = raw[int(step)] if step.isdigit() else getattr(raw, step)
        if last.isdigit():
            raw[int(last)] = value
        else:
            setattr(raw, last, value)

    return change


def second_part(raw: Any) -> None:
    """A second part with the identity of the first, and half of its bytes each."""
    raw.part_count = 2
    ffi.memmove(ffi.addressof(raw.parts[1]), ffi.addressof(raw.parts[0]), 128)


def unknown_identity(flags: int) -> Callable[[Any], None]:
    def change(raw: Any) -> None:
        raw.parts[0].identity[0] ^= 1
        raw.parts[0].flags = flags

    return change


WRONG = {
    "version": setter("version", 1),
    "reserved": setter("reserved", 1),
    "no parts": setter("part_count", 0),
    "sequences": setter("sequence_count", 2),
    "tokens": setter("token_count", 2),
    "layer": setter("layer_end", 3),
    "frontier": setter("frontier_identity.0", 7),
    "flags": setter("parts.0.flags", 2),
    "rank 0": setter("parts.0.rank", 0),
    "rank 5": setter("parts.0.rank", 5),
    "axis -1": setter("parts.0.token_axis", -1),
    "axis beyond rank": setter("parts.0.token_axis", 2),
    "type": setter("parts.0.ggml_type", 99),
    "type of the boundary": setter("parts.0.ggml_type", GGML_TYPE_I32),
    "same identity twice": second_part,
    "dimension 0": setter("parts.0.dimensions.0", 0),
    "fixed dimension": setter("parts.0.dimensions.0", 4),
    "token dimension": setter("parts.0.dimensions.1", 2),
    "negative dimension": setter("parts.0.dimensions.1", -3),
    "stride 0": setter("parts.0.byte_strides.0", 8),
    "stride 1": setter("parts.0.byte_strides.1", 4),
    "part bytes": setter("parts.0.payload_bytes", 4),
    "huge part": setter("parts.0.payload_bytes", 2**64 - 1),
    "identity": unknown_identity(0),
    "missing boundary part": unknown_identity(ACTIVATION_PART_OPTIONAL),
    "offset": setter("parts.0.payload_offset", 4),
    "offset beyond payload": setter("parts.0.payload_offset", 2**63),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_frame_that_breaks_one_rule_is_refused_and_moves_nothing(edge: Edge, name: str) -> None:
    frame = edge.changed(WRONG[name])
    with pytest.raises(InvalidArgument):
        edge.session.prefill_chunk_frame_sampled(PROMPT, None, frame)
    if name != "no parts" and not frame.desc.has_optional_parts:
        with pytest.raises(InvalidArgument):
            iteration_batch_sampled([IterationEntry(edge.session, PROMPT, (), None, frame)])
    assert edge.session.position == 0
    edge.session.prefill_chunk_frame_sampled(PROMPT, None, edge.frame)


def test_more_parts_than_a_frame_holds_are_refused_unread(edge: Edge) -> None:
    frame = edge.changed(setter("part_count", 17))
    with pytest.raises(InvalidArgument):
        edge.session.prefill_chunk_frame(PROMPT, frame)
    assert edge.session.position == 0


def test_a_downstream_stage_needs_a_frame(edge: Edge) -> None:
    empty = ActivationFrame(ActivationDesc(), b"")
    for frame in (None, empty):
        with pytest.raises(InvalidArgument):
            edge.session.prefill_chunk_frame(PROMPT, frame)
        with pytest.raises(InvalidArgument):
            iteration_batch_sampled([IterationEntry(edge.session, PROMPT, (), None, frame)])
    assert edge.session.position == 0


def test_frames_of_one_batch_are_not_read_in_the_next(edge: Edge) -> None:
    """The reusable arrays point at no frame that the entries do not carry."""
    entry = IterationEntry(edge.session, PROMPT, (), None, edge.frame)
    iteration_batch_sampled([entry])
    edge.session.reset()
    entry.input = None
    with pytest.raises(InvalidArgument):
        iteration_batch_sampled([entry])
    assert edge.session.position == 0


def test_tokens_other_than_those_of_the_frame_are_refused(edge: Edge) -> None:
    with pytest.raises(InvalidArgument):
        edge.session.prefill_chunk_frame(PROMPT[:2], edge.frame)
    with pytest.raises(InvalidArgument):
        edge.session.decode_step_frame(PROMPT[0], edge.frame)


def test_positions_on_a_stage_with_input_must_be_as_many_as_tokens(edge: Edge) -> None:
    with pytest.raises(InvalidArgument):
        edge.session.prefill_chunk_frame_with_positions(PROMPT, [0, 1], edge.frame)
    edge.session.prefill_chunk_frame_with_positions(PROMPT, [0, 1, 2], edge.frame)
    assert edge.session.position == 3
