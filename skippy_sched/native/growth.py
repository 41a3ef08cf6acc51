"""The one rule of when a call is repeated with a larger buffer.

A library that finds a buffer too small has executed nothing and says how many bytes (or tokens)
it needs, so the repetition is safe.
"""

from __future__ import annotations

from .errors import Status

# A size that grows again and again is a fault of the library: four times is more than any frame,
# which is measured before it is computed, can need.
GROWTHS_MAX = 4

# A larger buffer is never allocated: no frame or state comes near it, and a size beyond it is a
# library's mistake that must end as an error of this call, not as a lack of memory elsewhere.
BUFFER_BYTES_MAX = 1 << 36


def must_grow(status: int, needed: int, capacity: int, growths: int) -> bool:
    """Whether to call again with `needed`, after this many growths."""
    return (
        status == Status.BUFFER_TOO_SMALL
        and capacity < needed <= BUFFER_BYTES_MAX
        and growths < GROWTHS_MAX
    )
