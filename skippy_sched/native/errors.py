"""Statuses and exceptions of the native layer.

Knows how a native status and its message become an exception. Does not know what a caller should
do about one: that is the scheduler's business.

    SkippyNativeError
    ├── LibraryError            a libskippy cannot be found, loaded or used
    ├── HostCheckError          refused here, before any native call (also a ValueError)
    │   └── ClosedError         a closed model, session or cache was used
    ├── CountOverflow           a session's token count would pass 2**64 - 1
    ├── NativeAnswerError       a call succeeded, its answer is impossible; native state has moved
    ├── NativeError             a native call returned a status other than OK
    │   ├── UnspecifiedError    ERROR, or a status this version does not know
    │   ├── InvalidArgument     INVALID_ARGUMENT
    │   ├── Unsupported         UNSUPPORTED
    │   ├── BufferTooSmall      BUFFER_TOO_SMALL that no growth answers
    │   ├── IoError             IO_ERROR
    │   ├── ModelError          MODEL_ERROR
    │   └── NativeRuntimeError  RUNTIME_ERROR
    └── PartialBatchExecution   a batch run one entry at a time failed part way
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .cdef import ffi


class Status(IntEnum):
    """The statuses of the C ABI."""

    OK = 0
    ERROR = 1
    INVALID_ARGUMENT = 2
    UNSUPPORTED = 3
    BUFFER_TOO_SMALL = 4
    IO_ERROR = 5
    MODEL_ERROR = 6
    RUNTIME_ERROR = 7

    @property
    def title(self) -> str:
        """The name as messages show it, for example "InvalidArgument"."""
        return "".join(word.capitalize() for word in self.name.split("_"))


class SkippyNativeError(Exception):
    """Root of everything that this package raises on purpose."""


class LibraryError(SkippyNativeError):
    """A libskippy cannot be found, loaded or used; the text says which file and why."""


class HostCheckError(SkippyNativeError, ValueError):
    """Refused before any native call was made; nothing has moved."""


class ClosedError(HostCheckError):
    """A closed model, session or cache was used."""


class CountOverflow(SkippyNativeError):
    """A token count would pass 2**64 - 1; no native call was made, no count was stored."""


class NativeAnswerError(SkippyNativeError):
    """A native call succeeded with an impossible answer: its sessions have moved natively, their
    counts here have not. Compare positions before using them again."""


class NativeError(SkippyNativeError):
    """A native call failed: which call, with what status and message."""

    def __init__(self, call: str, status: Status | int, message: str) -> None:
        super().__init__(call, status, message)
        self.call = call
        self.status = status
        self.message = message

    def __str__(self) -> str:
        name = self.status.title if isinstance(self.status, Status) else f"status {self.status}"
        return f"{self.call}: {name}: {self.message or 'the library gave no message'}"


class UnspecifiedError(NativeError):
    """ERROR, or a status that this version does not know."""


class InvalidArgument(NativeError):
    """INVALID_ARGUMENT: the request itself is wrong; repeating it cannot help."""


class Unsupported(NativeError):
    """UNSUPPORTED: this model, memory or library cannot do it. Never a signal to fall back."""


class BufferTooSmall(NativeError):
    """BUFFER_TOO_SMALL whose sizes do not grow, or keep growing past the limit of retries."""


class IoError(NativeError):
    """IO_ERROR: reading or writing a file failed."""


class ModelError(NativeError):
    """MODEL_ERROR: the model file is missing, damaged or not usable."""


class NativeRuntimeError(NativeError):
    """RUNTIME_ERROR: execution failed; the positions of the sessions tell what has moved."""


class PartialBatchExecution(SkippyNativeError):
    """A batch that ran one entry at a time failed at entry `executed`.

    Entries before it have advanced their sessions, natively and here, and cannot be rolled back;
    `outputs` is what the whole call would have returned, for those entries only. Entries after it
    have not run. The entry itself is ambiguous: compare its session's position with its count.
    """

    def __init__(self, executed: int, cause: Exception, outputs: Any) -> None:
        super().__init__(executed, cause, outputs)
        self.executed = executed
        self.cause = cause
        self.outputs = outputs
        self.__cause__ = cause

    def __str__(self) -> str:
        return f"batch executed {self.executed} request(s) before failing: {self.cause}"


_BY_STATUS: dict[int, type[NativeError]] = {
    Status.INVALID_ARGUMENT: InvalidArgument,
    Status.UNSUPPORTED: Unsupported,
    Status.BUFFER_TOO_SMALL: BufferTooSmall,
    Status.IO_ERROR: IoError,
    Status.MODEL_ERROR: ModelError,
    Status.RUNTIME_ERROR: NativeRuntimeError,
}


class ErrorSlot:
    """Where one native call puts its error object; every object put there is freed exactly once.

    Pass `slot.out` as the last argument, then hand the status to `check`.
    """

    __slots__ = ("_lib", "out")

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.out: Any = ffi.new("struct skippy_error *[1]")

    def discard(self) -> None:
        """Free the error of a call that is about to be repeated, and empty the slot for it."""
        if self.out[0]:
            self._lib.skippy_error_free(self.out[0])
            self.out[0] = ffi.NULL

    def check(self, call: str, status: int) -> None:
        """Raise the exception of a failed call; its error object is freed here."""
        if status == 0:
            if self.out[0]:  # against the ABI, but a leak otherwise
                self.discard()
            return
        message = ""
        error = self.out[0]
        if error and error.message:
            message = ffi.string(error.message).decode("utf-8", "replace")
        self.discard()
        known = Status(status) if status in Status._value2member_map_ else status
        raise _BY_STATUS.get(status, UnspecifiedError)(call, known, message)
