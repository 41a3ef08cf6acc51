"""Where a batch call puts its frames.

Knows the arrays that the two batch calls share: descriptors, payload pointers, sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

from .activation import ActivationDesc, ActivationFrame
from .cdef import DESC_BYTES, DESC_HEAD_BYTES, address_of, ffi
from .errors import ErrorSlot, Status
from .growth import BUFFER_BYTES_MAX, GROWTHS_MAX

_ALIGNMENT = 64  # of one row's payload in the buffer of all: a cache line

Frames = list[ActivationFrame] | Callable[[], list[ActivationFrame]]

# A descriptor's head as the library is given it: zeros, and no producer.
_EMPTY_HEAD = np.frombuffer(
    bytes(ffi.buffer(ActivationDesc.for_output().raw, DESC_HEAD_BYTES)), dtype=np.uint8
)


def array_address(array: np.ndarray[Any, Any]) -> int:
    return address_of(ffi.from_buffer(array))


class Outputs:
    """Where one native call puts its frames: descriptors, payloads, sizes.

    Rows that export nothing share descriptors that live as long as this object, and one spare
    byte as payload: to be asked for a size, a library needs a pointer that is not NULL.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.needed = np.zeros(rows, dtype=np.uint64)
        self.capacities = np.zeros(rows, dtype=np.uint64)
        self.pointers = np.zeros(rows, dtype=np.uint64)
        self._spare = np.zeros(8, dtype=np.uint8)
        self._shared = np.zeros((rows, DESC_BYTES), dtype=np.uint8)
        self._descs = self._shared
        self._payload = self._spare
        self._offsets = self.needed
        self._shared_address = array_address(self._shared)
        self._desc_address = self._shared_address

    def _prepare(self, rows: int, capacities: np.ndarray[Any, Any] | None) -> None:
        """Room for `rows` frames of these many bytes; None: no row exports anything."""
        self.needed[:rows] = 0
        if capacities is None:
            self.capacities[:rows] = 0
            self.pointers[:rows] = array_address(self._spare)
            self._descs, self._desc_address = self._shared, self._shared_address
        else:
            # The frames keep these arrays: they are the caller's from now on.
            spans = -(-capacities // _ALIGNMENT) * _ALIGNMENT
            ends = np.cumsum(spans)
            self._offsets = ends - spans
            self._payload = np.empty(int(ends[-1]) or 1, dtype=np.uint8)
            self._descs = np.zeros((rows, DESC_BYTES), dtype=np.uint8)
            self._desc_address = array_address(self._descs)
            self.capacities[:rows] = capacities
            self.pointers[:rows] = self._offsets + array_address(self._payload)
        self._descs[:rows, :DESC_HEAD_BYTES] = _EMPTY_HEAD

    def execute(
        self,
        name: str,
        rows: int,
        capacities: np.ndarray[Any, Any] | None,
        slot: ErrorSlot,
        invoke: Callable[[Any], int],
    ) -> None:
        """Make the native call `name`, which gets the descriptors and answers a status; again
        while it asks for larger buffers, of which it may name one row's at a time."""
        for growths in count():
            self._prepare(rows, capacities)
            raw_descs = ffi.cast("struct skippy_activation_desc *", self._desc_address)
            status = invoke(raw_descs)
            if status == Status.BUFFER_TOO_SMALL and growths < rows + GROWTHS_MAX:
                capacities = self._larger(rows)
                if capacities is not None:
                    slot.discard()
                    continue
            slot.check(name, status)
            return

    def _larger(self, rows: int) -> np.ndarray[Any, Any] | None:
        """The larger capacities that the library asks for; None when it asks for no more, or for
        more than there can be."""
        larger = np.maximum(self.needed[:rows], self.capacities[:rows])
        if (larger == self.capacities[:rows]).all() or larger.max() > BUFFER_BYTES_MAX // rows:
            return None
        return larger.astype(np.int64)

    def frames(self, rows: int) -> Frames:
        """The frames of a call that succeeded; empty ones as a function that makes them."""
        if self._descs is self._shared:
            heads = self._shared[:rows, :DESC_HEAD_BYTES].copy()
            return lambda: [_empty_frame(head) for head in heads]
        descs, base = self._descs, self._desc_address
        frames = []
        for index in range(rows):
            raw = ffi.cast("struct skippy_activation_desc *", base + index * DESC_BYTES)
            start = int(self._offsets[index])
            end = start + int(min(self.needed[index], self.capacities[index]))
            frames.append(ActivationFrame(ActivationDesc(raw, descs), self._payload[start:end]))
        return frames


def _empty_frame(head: np.ndarray[Any, Any]) -> ActivationFrame:
    desc = ActivationDesc()
    ffi.buffer(desc.raw, DESC_HEAD_BYTES)[:] = head.tobytes()
    return ActivationFrame(desc, np.empty(0, dtype=np.uint8))
