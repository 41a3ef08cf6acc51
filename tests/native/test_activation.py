"""Frames and descriptors without a library: views, sizes, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from skippy_sched.native import (
    ActivationBoundary,
    ActivationDesc,
    ActivationFrame,
    ActivationPartDesc,
    HostCheckError,
)
from skippy_sched.native.activation import input_pointers, optional_bytes
from skippy_sched.native.cdef import GGML_TYPE_BF16, GGML_TYPE_F16, ffi

from .conftest import a_frame


def a_matrix_part(tokens: int, width: int = 3, **changes: object) -> ActivationPartDesc:
    values: dict[str, object] = {
        "rank": 2,
        "token_axis": 1,
        "dimensions": (width, tokens, 1, 1),
        "byte_strides": (4, 4 * width, 0, 0),
        "payload_bytes": 4 * width * tokens,
    }
    return ActivationPartDesc(**(values | changes))  # type: ignore[arg-type]


def test_a_part_is_a_token_major_view_of_the_payload() -> None:
    payload = np.arange(6, dtype=np.float32).view(np.uint8)
    frame = ActivationFrame(ActivationDesc.build([a_matrix_part(2)], token_count=2), payload)
    rows = frame.part(0)
    assert rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(rows, payload)


def test_a_descriptor_survives_the_wire() -> None:
    desc = ActivationDesc.build(
        [a_matrix_part(2, identity=b"i" * 32), a_matrix_part(2, identity=b"j" * 32, flags=1)],
        producer_stage_index=3,
        layer_start=4,
        layer_end=9,
        token_count=2,
        frontier_identity=b"f" * 32,
    )
    copy = ActivationDesc.from_bytes(desc.to_bytes())
    assert copy == desc
    assert copy.parts() == desc.parts()
    assert (copy.version, copy.producer_stage_index, copy.sequence_count) == (2, 3, 1)
    assert (copy.layer_start, copy.layer_end, copy.token_count) == (4, 9, 2)
    assert (copy.part_count, copy.payload_bytes) == (2, 48)
    assert copy.frontier_identity == b"f" * 32
    assert [part.is_optional for part in copy.parts()] == [False, True]
    with pytest.raises(HostCheckError, match="2120 bytes"):
        ActivationDesc.from_bytes(b"short")


def test_an_impossible_part_count_counts_as_optional_parts_and_is_not_read() -> None:
    frame = a_frame()
    frame.desc.raw.part_count = 17
    assert frame.desc.has_optional_parts
    assert optional_bytes(frame) == 0
    with pytest.raises(HostCheckError, match="17 parts"):
        frame.desc.parts()


def test_a_descriptor_for_output_is_zeroed_without_a_producer() -> None:
    desc = ActivationDesc.for_output()
    assert (desc.version, desc.producer_stage_index, desc.part_count) == (0, -1, 0)


def test_what_does_not_fit_a_descriptor_is_refused() -> None:
    with pytest.raises(HostCheckError, match="17 parts"):
        ActivationDesc.build([ActivationPartDesc()] * 17)
    with pytest.raises(HostCheckError, match="identity has 3 bytes"):
        ActivationDesc.build([ActivationPartDesc(identity=b"abc")])
    with pytest.raises(HostCheckError, match="frontier identity has 1 bytes"):
        ActivationDesc.build(frontier_identity=b"x")


def test_no_frame_is_two_null_pointers() -> None:
    assert input_pointers(None) == (ffi.NULL, ffi.NULL)


def test_payloads_of_any_buffer_type_are_taken() -> None:
    for payload in (b"\x01", bytearray(b"\x01"), np.ones(1, np.uint8), memoryview(b"\x01")):
        input_pointers(a_frame(payload=payload))


def test_boundaries_predict_bytes_per_token_from_fixed_dimensions() -> None:
    part = a_matrix_part(0, width=8)
    half = a_matrix_part(0, width=8, ggml_type=GGML_TYPE_F16)
    brain = a_matrix_part(0, width=8, ggml_type=GGML_TYPE_BF16)
    dynamic = a_matrix_part(0, width=0)
    boundary = ActivationBoundary(2, bytes(32), (part, half, brain, dynamic))
    assert boundary.bytes_per_token == 32 + 16 + 16


def test_a_boundary_of_another_version_is_refused() -> None:
    raw = ffi.new("struct skippy_activation_boundary_desc *", {"version": 1})
    with pytest.raises(HostCheckError, match="version 1"):
        ActivationBoundary.of(raw)
