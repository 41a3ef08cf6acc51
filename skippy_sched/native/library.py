"""Find, load and handshake a libskippy.

Knows file names, the ABI version, symbols, features and devices. Does not know models.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from .cdef import ABI, FEATURES, OPTIONAL_SYMBOLS, REQUIRED_SYMBOLS, ffi
from .errors import ErrorSlot, LibraryError

LIBRARY_ENV = "SKIPPY_SCHED_LIBRARY"


class DeviceType(IntEnum):
    """What kind of compute device a backend offers."""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


@dataclass(frozen=True, slots=True)
class Device:
    """One backend device; memory in bytes."""

    name: str
    description: str
    device_id: str
    memory_free: int
    memory_total: int
    type: DeviceType | int
    caps: int


def find_library(name: str = "llama") -> Path:
    """The libskippy called `name`: "llama", "sim", or a path (anything with a slash or ".so").

    SKIPPY_SCHED_LIBRARY names another one in place of "llama". Raises LibraryError that lists the
    places searched.
    """
    override = os.environ.get(LIBRARY_ENV)
    source = ""
    if name == "llama" and override:
        name, source = override, f" (from {LIBRARY_ENV})"
    if "/" in name or ".so" in name:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise LibraryError(f"no library at {path}{source}: name an existing libskippy file")
    # An editable install keeps the sources here and the compiled libraries with other packages.
    file = f"libskippy-{name}.so"
    installed = Path(sysconfig.get_path("platlib")) / "skippy_sched" / "native"
    tried = [Path(__file__).parent / file, installed / file]
    for path in tried:
        if path.is_file():
            return path
    places = ", ".join(str(path) for path in tried)
    raise LibraryError(
        f"no libskippy called {name!r}{source}: looked for {places}; install the package so that "
        f"its native engines are compiled, or name a library with {LIBRARY_ENV}"
    )


def _text(pointer: Any) -> str:
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def _version(triple: tuple[int, int, int]) -> str:
    return ".".join(str(number) for number in triple)


@cache
def _dlopen(path: str, inode: int) -> Any:
    """cffi keeps all that it makes of a library for ever, so make it once per file."""
    return ffi.dlopen(path)


class Library:
    """A loaded libskippy. Never unloaded.

    `lib` is the cffi handle; calls through it release the GIL. `absent` are the declared symbols
    that it does not have.
    """

    def __init__(self, path: Path, lib: Any, version: tuple[int, int, int], absent: frozenset[str]):
        self.path = path
        self.lib = lib
        self.version = version
        self.absent = absent
        self.features: int = 0 if "skippy_abi_features" in absent else lib.skippy_abi_features()

    @classmethod
    def load(cls, path: str | Path, expected: tuple[int, int, int] | None = ABI) -> Library:
        """Load the library at `path` and check it; `expected` None accepts any version.

        Raises LibraryError: not loadable, another ABI version (both named), symbols missing (all
        named).
        """
        library = cls.open(path)
        library.check(expected)
        return library

    @classmethod
    def open(cls, path: str | Path) -> Library:
        """Load without a check, for those who only look. Raises LibraryError: no libskippy."""
        path = Path(path)
        _refuse_cut_short(path)
        try:
            # Found by the linker's own search if it is a bare name: pass an absolute path.
            lib = _dlopen(str(path.absolute()), path.stat().st_ino if path.exists() else 0)
        except OSError as error:
            raise LibraryError(f"cannot load {path}: {error}") from error
        if not hasattr(lib, "skippy_abi_version"):
            raise LibraryError(f"{path} is not a libskippy: it has no symbol skippy_abi_version")
        raw = lib.skippy_abi_version()
        symbols = (*REQUIRED_SYMBOLS, *OPTIONAL_SYMBOLS)
        absent = frozenset(name for name in symbols if not hasattr(lib, name))
        return cls(path, lib, (raw.major, raw.minor, raw.patch), absent)

    def check(self, expected: tuple[int, int, int] | None = ABI) -> None:
        """Raises LibraryError for another version than `expected`, and for missing symbols."""
        if expected is not None and self.version != expected:
            raise LibraryError(
                f"{self.path} speaks skippy ABI {_version(self.version)}, but "
                f"{_version(expected)} is expected exactly: use a library of that version, or "
                "configure the expected one"
            )
        missing = [name for name in REQUIRED_SYMBOLS if name in self.absent]
        if missing:
            raise LibraryError(
                f"{self.path} (skippy ABI {_version(self.version)}) lacks {len(missing)} required "
                f"symbol(s): {', '.join(missing)}"
            )

    def offers(self, symbol: str) -> bool:
        """Whether a symbol is there."""
        return symbol not in self.absent and hasattr(self.lib, symbol)

    def has(self, feature: int | str) -> bool:
        """Whether a feature bit is set: by number, or by name ("ITERATION_BATCH")."""
        if isinstance(feature, str):
            bits = [bit for bit, name in FEATURES.items() if name == feature.upper()]
            if not bits:
                raise KeyError(f"unknown feature {feature!r}; known: {sorted(FEATURES.values())}")
            feature = bits[0]
        return bool(self.features >> feature & 1)

    def feature_names(self) -> tuple[str, ...]:
        """The names of all set feature bits; a bit without a name shows as "BIT_<n>"."""
        return tuple(
            FEATURES.get(bit, f"BIT_{bit}") for bit in range(64) if self.features >> bit & 1
        )

    @cached_property
    def session_position(self) -> Callable[[int], int]:
        """The native position by a session's address.

        Keeps the GIL, unlike calls through `lib`: to give it up for a getter, row by row, lets
        another thread take it each time, and getting it back may take milliseconds.
        """
        function = ctypes.PyDLL(str(self.path.absolute())).skippy_session_position
        function.argtypes = (ctypes.c_void_p,)
        function.restype = ctypes.c_int32
        return cast("Callable[[int], int]", function)

    def error_slot(self) -> ErrorSlot:
        """A fresh slot for the error object of native calls."""
        return ErrorSlot(self.lib)

    def devices(self) -> tuple[Device, ...]:
        """The compute devices that this library can use, in its order. Raises NativeError."""
        count = ffi.new("size_t *")
        slot = self.error_slot()
        slot.check(
            "skippy_backend_device_count", self.lib.skippy_backend_device_count(count, slot.out)
        )
        devices = []
        for index in range(count[0]):
            raw = ffi.new("struct skippy_backend_device *")
            status = self.lib.skippy_backend_device_at(index, raw, slot.out)
            slot.check("skippy_backend_device_at", status)
            known = raw.type in DeviceType._value2member_map_
            devices.append(
                Device(
                    name=_text(raw.name),
                    description=_text(raw.description),
                    device_id=_text(raw.device_id),
                    memory_free=raw.memory_free,
                    memory_total=raw.memory_total,
                    type=DeviceType(raw.type) if known else int(raw.type),
                    caps=raw.caps,
                )
            )
        return tuple(devices)

    def __repr__(self) -> str:
        return f"Library({str(self.path)!r}, ABI {_version(self.version)})"


def _refuse_cut_short(path: Path) -> None:
    """Raises LibraryError for a 64-bit ELF file that ends before its segments: the linker would
    map what is not there, and the process would die of it."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return
            (start,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            length = file.seek(0, os.SEEK_END)
            file.seek(start)
            table = file.read(size * count)
    except OSError:
        return  # the linker says it better
    whole = len(table) == size * count and size >= 56
    if whole:
        segments = (struct.unpack_from("<4xIQ16xQ", table, at) for at in range(0, len(table), size))
        whole = all(offset + held <= length for _, offset, held in segments)
    if not whole:
        raise LibraryError(
            f"cannot load {path}: it is cut short at {length} bytes: copy or build it again"
        )
