"""Activation frames: descriptors, boundaries and payloads, without copies.

Knows the layout of frames and what can be read from it. Does not check a frame against a model:
the library does, before it executes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .cdef import (
    ACTIVATION_BOUNDARY_DESC_VERSION,
    ACTIVATION_FRAME_VERSION,
    ACTIVATION_IDENTITY_BYTES,
    ACTIVATION_MAX_DIMS,
    ACTIVATION_MAX_PARTS,
    ACTIVATION_PART_OPTIONAL,
    DESC_BYTES,
    GGML_TYPE_BF16,
    GGML_TYPE_F16,
    GGML_TYPE_F32,
    GGML_TYPE_I32,
    ffi,
)
from .errors import HostCheckError

if TYPE_CHECKING:
    from collections.abc import Buffer, Iterable  # type: ignore[attr-defined]

# numpy has no bfloat16: such parts are seen as their 16-bit patterns.
_NUMPY_TYPES: dict[int, Any] = {
    GGML_TYPE_F32: np.float32,
    GGML_TYPE_F16: np.float16,
    GGML_TYPE_I32: np.int32,
    GGML_TYPE_BF16: np.uint16,
}


def ggml_type_bytes(ggml_type: int) -> int | None:
    """Bytes of one element of a type that crosses stages (F32, F16, I32, BF16); else None."""
    dtype = _NUMPY_TYPES.get(ggml_type)
    return None if dtype is None else np.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class ActivationPartDesc:
    """One value crossing a stage edge.

    `dimensions` are in ggml order (the first is the fastest), in elements; in a boundary one that
    is <= 0 is dynamic. `byte_strides`, `payload_offset` and `payload_bytes` are in bytes.
    """

    identity: bytes = bytes(ACTIVATION_IDENTITY_BYTES)
    ggml_type: int = GGML_TYPE_F32
    rank: int = 0
    token_axis: int = 0
    flags: int = 0
    dimensions: tuple[int, int, int, int] = (0, 0, 0, 0)
    byte_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    payload_offset: int = 0
    payload_bytes: int = 0

    @property
    def is_optional(self) -> bool:
        """Whether the part lies beyond what the planned frontier requires."""
        return bool(self.flags & ACTIVATION_PART_OPTIONAL)

    def store(self, raw: Any) -> None:
        """Write the part into a C structure."""
        if len(self.identity) != ACTIVATION_IDENTITY_BYTES:
            raise HostCheckError(
                f"part identity has {len(self.identity)} bytes, but must have "
                f"{ACTIVATION_IDENTITY_BYTES}"
            )
        ffi.buffer(raw.identity)[:] = self.identity
        for name in ("ggml_type", "rank", "token_axis", "flags", "payload_offset"):
            setattr(raw, name, getattr(self, name))
        raw.payload_bytes = self.payload_bytes
        for axis in range(ACTIVATION_MAX_DIMS):
            raw.dimensions[axis] = self.dimensions[axis]
            raw.byte_strides[axis] = self.byte_strides[axis]

    @classmethod
    def of(cls, raw: Any) -> ActivationPartDesc:
        """The part that a C structure describes."""
        return cls(
            identity=bytes(ffi.buffer(raw.identity)),
            ggml_type=raw.ggml_type,
            rank=raw.rank,
            token_axis=raw.token_axis,
            flags=raw.flags,
            dimensions=tuple(raw.dimensions),
            byte_strides=tuple(raw.byte_strides),
            payload_offset=raw.payload_offset,
            payload_bytes=raw.payload_bytes,
        )


class ActivationDesc:
    """The descriptor of a frame: the 2120-byte C structure itself, seen through properties.

    `raw` points into memory that this object keeps alive (`owner`, for one of an array).
    """

    __slots__ = ("_owner", "raw")

    def __init__(self, raw: Any = None, owner: Any = None) -> None:
        self.raw: Any = ffi.new("struct skippy_activation_desc *") if raw is None else raw
        self._owner = owner

    @classmethod
    def for_output(cls) -> ActivationDesc:
        """What a native call is given to fill: zeros, and no producer."""
        desc = cls()
        desc.raw.producer_stage_index = -1
        return desc

    @classmethod
    def build(
        cls,
        parts: Iterable[ActivationPartDesc] = (),
        *,
        producer_stage_index: int = 0,
        layer_start: int = 0,
        layer_end: int = 0,
        token_count: int = 0,
        sequence_count: int = 1,
        payload_bytes: int | None = None,
        frontier_identity: bytes = bytes(ACTIVATION_IDENTITY_BYTES),
        version: int = ACTIVATION_FRAME_VERSION,
    ) -> ActivationDesc:
        """A descriptor of these parts; `payload_bytes` None is the sum over them."""
        parts = tuple(parts)
        if len(parts) > ACTIVATION_MAX_PARTS:
            raise HostCheckError(f"{len(parts)} parts, but a frame holds {ACTIVATION_MAX_PARTS}")
        if len(frontier_identity) != ACTIVATION_IDENTITY_BYTES:
            raise HostCheckError(
                f"frontier identity has {len(frontier_identity)} bytes, but must have "
                f"{ACTIVATION_IDENTITY_BYTES}"
            )
        desc = cls()
        raw = desc.raw
        raw.version = version
        raw.producer_stage_index = producer_stage_index
        raw.layer_start, raw.layer_end = layer_start, layer_end
        raw.token_count, raw.sequence_count = token_count, sequence_count
        raw.part_count = len(parts)
        total = sum(part.payload_bytes for part in parts)
        raw.payload_bytes = total if payload_bytes is None else payload_bytes
        ffi.buffer(raw.frontier_identity)[:] = frontier_identity
        for index, part in enumerate(parts):
            part.store(raw.parts[index])
        return desc

    @classmethod
    def from_bytes(cls, data: Buffer) -> ActivationDesc:
        """The descriptor whose C structure is `data`."""
        view = memoryview(data).cast("B")
        if len(view) != DESC_BYTES:
            raise HostCheckError(f"a descriptor has {DESC_BYTES} bytes, not {len(view)}")
        desc = cls()
        ffi.buffer(desc.raw)[:] = view
        return desc

    def to_bytes(self) -> bytes:
        """The C structure as bytes, to send it elsewhere."""
        return bytes(ffi.buffer(self.raw, DESC_BYTES))

    @property
    def version(self) -> int:
        return int(self.raw.version)

    @property
    def producer_stage_index(self) -> int:
        return int(self.raw.producer_stage_index)

    @property
    def layer_start(self) -> int:
        return int(self.raw.layer_start)

    @property
    def layer_end(self) -> int:
        return int(self.raw.layer_end)

    @property
    def token_count(self) -> int:
        return int(self.raw.token_count)

    @property
    def sequence_count(self) -> int:
        return int(self.raw.sequence_count)

    @property
    def part_count(self) -> int:
        return int(self.raw.part_count)

    @property
    def payload_bytes(self) -> int:
        return int(self.raw.payload_bytes)

    @property
    def frontier_identity(self) -> bytes:
        return bytes(ffi.buffer(self.raw.frontier_identity))

    def parts(self) -> tuple[ActivationPartDesc, ...]:
        """The described parts. Raises HostCheckError when part_count is beyond the structure."""
        count = self.raw.part_count
        if count > ACTIVATION_MAX_PARTS:
            raise HostCheckError(
                f"activation descriptor counts {count} parts, but holds at most "
                f"{ACTIVATION_MAX_PARTS}"
            )
        return tuple(ActivationPartDesc.of(self.raw.parts[index]) for index in range(count))

    @property
    def has_optional_parts(self) -> bool:
        """Whether a part is OPTIONAL; an impossible part_count counts as yes."""
        raw = self.raw
        if raw.part_count > ACTIVATION_MAX_PARTS:
            return True
        return any(
            raw.parts[index].flags & ACTIVATION_PART_OPTIONAL for index in range(raw.part_count)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActivationDesc) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"ActivationDesc(stage {self.producer_stage_index}, layers "
            f"[{self.layer_start}, {self.layer_end}), {self.token_count} tokens, "
            f"{self.part_count} parts, {self.payload_bytes} bytes)"
        )


class ActivationFrame:
    """A descriptor and its payload: any contiguous buffer of `desc.payload_bytes` bytes.

    Frames that come from a native call hold a numpy uint8 array that the library wrote into;
    nothing is copied on the way in or out.
    """

    __slots__ = ("desc", "payload")

    def __init__(self, desc: ActivationDesc, payload: Any) -> None:
        self.desc = desc
        self.payload = payload

    @property
    def is_empty(self) -> bool:
        """Whether the frame carries no activations, as a terminal stage's does."""
        return self.desc.payload_bytes == 0

    def pointers(self) -> tuple[Any, Any]:
        """Descriptor and payload for a native call; the payload pointer keeps the buffer alive.

        Raises HostCheckError when the payload is not as long as the descriptor says.
        """
        try:
            data = ffi.from_buffer(self.payload)
        except (TypeError, ValueError) as error:
            raise HostCheckError(
                f"an activation payload must be a contiguous buffer of bytes: {error}"
            ) from None
        expected = self.desc.raw.payload_bytes
        if len(data) != expected:
            raise HostCheckError(
                f"activation payload length {len(data)} does not match descriptor payload_bytes "
                f"{expected}"
            )
        return self.desc.raw, data

    def part(self, index: int) -> np.ndarray[Any, Any]:
        """A view of one part, slowest dimension first: [tokens, n_embd] for the common frame.

        F32 float32, F16 float16, I32 int32, BF16 its uint16 bit patterns.
        """
        part = self.desc.parts()[index]
        dtype = _NUMPY_TYPES.get(part.ggml_type)
        if dtype is None:
            raise HostCheckError(f"part {index} has ggml type {part.ggml_type}, unknown here")
        data = np.frombuffer(self.payload, dtype=np.uint8)
        end = part.payload_offset + part.payload_bytes
        shape = tuple(reversed(part.dimensions[: part.rank]))
        view: np.ndarray[Any, Any] = data[part.payload_offset : end].view(dtype)
        return view.reshape(shape)

    def __repr__(self) -> str:
        return f"ActivationFrame({self.desc!r})"


@dataclass(frozen=True, slots=True)
class ActivationBoundary:
    """What a stage takes in or gives out: its parts, with dynamic and token dimensions open."""

    version: int
    frontier_identity: bytes
    parts: tuple[ActivationPartDesc, ...]

    @classmethod
    def of(cls, raw: Any) -> ActivationBoundary:
        """The boundary that a C structure describes."""
        count = raw.part_count
        if raw.version != ACTIVATION_BOUNDARY_DESC_VERSION or count > ACTIVATION_MAX_PARTS:
            raise HostCheckError(
                f"activation boundary of version {raw.version} with {count} parts: this package "
                f"reads version {ACTIVATION_BOUNDARY_DESC_VERSION} with at most "
                f"{ACTIVATION_MAX_PARTS}"
            )
        return cls(
            version=raw.version,
            frontier_identity=bytes(ffi.buffer(raw.frontier_identity)),
            parts=tuple(ActivationPartDesc.of(raw.parts[index]) for index in range(count)),
        )

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token over all parts whose size is fixed; 0 where it is not.

        A prediction: a frame may turn out larger (dynamic dimensions, forwarded optional parts),
        and then the call is repeated with the size that the library names.
        """
        total = 0
        for part in self.parts:
            size = ggml_type_bytes(part.ggml_type) or 0
            for axis, dimension in enumerate(part.dimensions[: part.rank]):
                if axis != part.token_axis:
                    size *= max(dimension, 0)
            total += size
        return total


def optional_bytes(frame: ActivationFrame | None) -> int:
    """Payload bytes of a frame's optional parts, which a stage forwards unchanged."""
    if frame is None or not frame.desc.has_optional_parts:
        return 0
    if frame.desc.part_count > ACTIVATION_MAX_PARTS:
        return 0
    return sum(part.payload_bytes for part in frame.desc.parts() if part.is_optional)


def input_pointers(frame: ActivationFrame | None) -> tuple[Any, Any]:
    """Descriptor and payload pointers for a native call; two NULLs without a frame."""
    return (ffi.NULL, ffi.NULL) if frame is None else frame.pointers()
