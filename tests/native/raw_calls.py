"""Raw calls, where the Python side cannot even ask the wrong question."""

from __future__ import annotations

from typing import Any

from skippy_sched.native import Model, StageSession, Status
from skippy_sched.native.cdef import ffi


def raw_status(model: Model, call: str, *arguments: Any) -> Status:
    """The status of a raw call; its error object is there exactly when it failed, and says why."""
    slot = model.library.error_slot()
    status = Status(getattr(model.lib, call)(*arguments, slot.out))
    assert bool(slot.out[0]) == (status is not Status.OK)
    if status is not Status.OK:
        assert slot.out[0].status == status
        assert ffi.string(slot.out[0].message)
    slot.discard()
    return status


def raw_request(of: StageSession, tokens: Any, **changes: Any) -> tuple[Any, list[Any]]:
    """A one-row request array for a raw iteration, and what it points into."""
    requests = ffi.new("struct skippy_iteration_request[1]")
    row = requests[0]
    row.session, row.token_ids, row.token_count = of.raw, tokens, len(tokens)
    row.sample_last = True
    for name, value in changes.items():
        setattr(row, name, value)
    return requests, [tokens, changes]


def raw_iteration(model: Model, requests: Any, rows: int, **changes: Any) -> Status:
    payload = ffi.new("char[8]")
    out = {
        "descs": ffi.new("struct skippy_activation_desc[1]"),
        "payloads": ffi.new("void *[1]", [payload]),
        "capacities": ffi.new("size_t[1]"),
        "bytes": ffi.new("size_t[1]"),
        "indexes": ffi.new("size_t[1]"),
        "predicted": ffi.new("int32_t[1]"),
        "capacity": 1,
        "count": ffi.new("size_t *"),
    } | changes
    return raw_status(model, "skippy_iteration_batch_sampled", requests, rows, *out.values())
