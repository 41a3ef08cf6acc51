"""GGUF files as byte ranges: where each key and each tensor lies, and writing new files from them.

Values are read only where asked for, so a vocabulary costs a walk over its lengths and no more.
Knows nothing of architectures or of what tensors mean.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from skippy_sched.errors import SplitError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has 32-bit lengths and has not been written for years
_ALIGNMENT = 32  # without general.alignment
_DIMENSIONS_MAX = 4  # of a ggml tensor

_STRING, _ARRAY = 8, 9
#: number of a scalar type -> its struct format
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"} | {
    12: "d"
}
_UINT32, _BOOL = 4, 7

Scalar = int | float | bool


@dataclass(frozen=True, slots=True)
class Key:
    """A key and where it lies: the whole entry in [start, end), its value from ``value`` on.

    ``item_type`` and ``count`` are those of an array; a plain value has ``count`` None.
    """

    name: str
    start: int
    value: int
    end: int
    item_type: int
    count: int | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's name, the bytes of its description behind the name, and its place in the data.

    ``bytes`` reaches to the next tensor: it includes the padding.
    """

    name: str
    shape: bytes
    offset: int
    bytes: int


class GgufFile:
    """An open GGUF file. Raises SplitError for what is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise SplitError(f"cannot open {path}: {error.strerror}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            if self.size < 24:
                raise SplitError(f"{path} is no GGUF file: it has {self.size} bytes")
            self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read()
        except (struct.error, UnicodeDecodeError) as error:
            self.close()
            raise SplitError(f"{path} is no whole GGUF file: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_bytes"):
            self._bytes.close()
        self._file.close()

    # --- values ---------------------------------------------------------------------------------

    def raw(self, key: Key) -> bytes:
        """The whole entry, as it can be written to another file."""
        return self._bytes[key.start : key.end]

    def number(self, name: str) -> Scalar | None:
        """The number at a key; None when there is no such key or it is no number."""
        key = self.keys.get(name)
        if key is None or key.count is not None or key.item_type not in _SCALARS:
            return None
        value: Scalar = struct.unpack_from("<" + _SCALARS[key.item_type], self._bytes, key.value)[0]
        return value

    def text(self, name: str) -> str | None:
        key = self.keys.get(name)
        if key is None or key.count is not None or key.item_type != _STRING:
            return None
        return self._string(key.value)[0]

    def array_slice(self, key: Key, start: int, end: int) -> bytes:
        """An entry with items [start, end) of this key's array of numbers."""
        assert key.count is not None
        assert 0 <= start < end <= key.count
        size = struct.calcsize("<" + _SCALARS[key.item_type])
        head = struct.pack("<IIQ", _ARRAY, key.item_type, end - start)
        items = self._bytes[key.value + start * size : key.value + end * size]
        return _packed(key.name) + head + items

    # --- reading the header ---------------------------------------------------------------------

    def _read(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise SplitError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        self.version, tensor_count, key_count = struct.unpack_from("<IQQ", self._bytes, 4)
        if self.version not in _VERSIONS:
            raise SplitError(f"{self.path} is GGUF version {self.version}; 2 and 3 can be read")
        self.keys: dict[str, Key] = {}
        at = 24
        for _ in range(key_count):
            key = self._key(at)
            self.keys[key.name] = key
            at = key.end
        alignment = self.number("general.alignment")
        self.alignment = _ALIGNMENT if alignment is None else int(alignment)
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise SplitError(f"{self.path}: general.alignment is {self.alignment}, no power of 2")
        described = []
        for _ in range(tensor_count):
            name, after = self._string(at)
            (dimensions,) = struct.unpack_from("<I", self._bytes, after)
            if not 1 <= dimensions <= _DIMENSIONS_MAX:
                raise SplitError(f"{self.path}: tensor {name} has {dimensions} dimensions")
            end = after + 4 + 8 * dimensions + 4
            (offset,) = struct.unpack_from("<Q", self._bytes, end)
            described.append((name, self._bytes[after:end], offset))
            at = end + 8
        self.data_start = _padded(at, self.alignment)
        self._place_tensors(described)

    def _place_tensors(self, described: Sequence[tuple[str, bytes, int]]) -> None:
        """A tensor reaches to the next one: the format packs them without gaps but padding."""
        offsets = sorted(offset for _, _, offset in described)
        data_bytes = self.size - self.data_start
        if len(set(offsets)) != len(offsets) or (offsets and offsets[-1] >= data_bytes):
            raise SplitError(f"{self.path} is damaged: tensors overlap or end behind the file")
        ends = dict(pairwise([*offsets, data_bytes]))
        self.tensors = [
            Tensor(name, shape, offset, ends[offset] - offset) for name, shape, offset in described
        ]

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._bytes, at)
        end = at + 8 + length
        self._check(end)
        return self._bytes[at + 8 : end].decode(), end

    def _key(self, start: int) -> Key:
        name, at = self._string(start)
        (kind,) = struct.unpack_from("<I", self._bytes, at)
        at += 4
        if kind != _ARRAY:
            return Key(name, start, at, self._behind(name, kind, at), kind, None)
        item_type, count = struct.unpack_from("<IQ", self._bytes, at)
        first = at + 12
        end = first
        if item_type == _STRING:
            unpack, data = struct.Struct("<Q").unpack_from, self._bytes
            for _ in range(count):
                end += 8 + unpack(data, end)[0]
                if end > self.size:
                    break
        else:
            end += count * (self._behind(name, item_type, first) - first)
        self._check(end)
        return Key(name, start, first, end, item_type, count)

    def _behind(self, name: str, kind: int, at: int) -> int:
        if kind == _STRING:
            return self._string(at)[1]
        if kind not in _SCALARS:
            raise SplitError(f"{self.path}: key {name[:80]} has the unknown type {kind}")
        return at + struct.calcsize("<" + _SCALARS[kind])

    def _check(self, end: int) -> None:
        if end > self.size:
            raise SplitError(f"{self.path} is cut short: it ends at {self.size}, before {end}")

    # --- writing --------------------------------------------------------------------------------

    def write(
        self, path: Path, entries: Sequence[bytes], tensors: Iterable[tuple[str, Tensor]]
    ) -> int:
        """A new file of these key entries and this file's tensors under new names; its bytes."""
        chosen = list(tensors)
        described, offset = [], 0
        for name, tensor in chosen:
            described.append(_packed(name) + tensor.shape + struct.pack("<Q", offset))
            offset += _padded(tensor.bytes, self.alignment)
        head = _MAGIC + struct.pack("<IQQ", self.version, len(chosen), len(entries))
        with path.open("wb") as target:
            target.write(head)
            target.writelines(entries)
            target.writelines(described)
            _pad(target, self.alignment)
            for _, tensor in chosen:
                self._copy(target, self.data_start + tensor.offset, tensor.bytes)
                _pad(target, self.alignment)
            return target.tell()

    def _copy(self, target: BinaryIO, start: int, count: int) -> None:
        """Within the kernel, from file to file."""
        target.flush()
        while count:
            sent = os.sendfile(target.fileno(), self._file.fileno(), start, count)
            if not sent:
                raise SplitError(f"{self.path} became shorter while it was read")
            start, count = start + sent, count - sent
        target.seek(0, os.SEEK_END)


def number_entry(name: str, value: int) -> bytes:
    """An entry with an unsigned 32-bit number."""
    return _packed(name) + struct.pack("<II", _UINT32, value)


def bool_entry(name: str, value: bool) -> bytes:
    return _packed(name) + struct.pack("<I?", _BOOL, value)


def text_entry(name: str, value: str) -> bytes:
    return _packed(name) + struct.pack("<I", _STRING) + _packed(value)


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _pad(target: BinaryIO, alignment: int) -> None:
    at = target.tell()
    target.write(bytes(_padded(at, alignment) - at))
