"""The n-gram cache of a library: drafts from what was said before.

Knows the native cache. Does not verify drafts: that is a session's verify.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .cdef import ffi
from .errors import ClosedError, HostCheckError
from .state import int32_array, int32_pointer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from .library import Library

_U16_MAX = 2**16 - 1


class NgramCache:
    """N-grams of `ngram_min` to `ngram_max` committed tokens; freed by `close` or when dropped."""

    def __init__(self, library: Library, ngram_min: int, ngram_max: int) -> None:
        for name, value in (("ngram_min", ngram_min), ("ngram_max", ngram_max)):
            _check_u16(name, value)
        self._library = library
        self._lib: Any = library.lib
        out = ffi.new("struct skippy_ngram_cache *[1]")
        slot = library.error_slot()
        status = self._lib.skippy_ngram_cache_create(ngram_min, ngram_max, out, slot.out)
        slot.check("skippy_ngram_cache_create", status)
        self._raw: Any = ffi.gc(out[0], self._lib.skippy_ngram_cache_free)

    def reset(self, token_ids: Sequence[int] = ()) -> None:
        """Forget everything and learn these tokens."""
        self._learn("skippy_ngram_cache_reset", token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Learn tokens that follow those known; committed ones only."""
        self._learn("skippy_ngram_cache_append", token_ids)

    def draft(self, continuation: Sequence[int], max_draft: int) -> list[int]:
        """Up to `max_draft` tokens that may follow the known tokens and `continuation`; does not
        change the cache."""
        _check_u16("max_draft", max_draft)
        tokens = int32_array(continuation, "continuation")
        out: np.ndarray[Any, Any] = np.zeros(max(max_draft, 1), dtype=np.int32)
        count = ffi.new("size_t *")
        slot = self._library.error_slot()
        status = self._lib.skippy_ngram_cache_draft(
            self._live(),
            int32_pointer(tokens),
            len(tokens),
            max_draft,
            int32_pointer(out),
            max_draft,
            count,
            slot.out,
        )
        slot.check("skippy_ngram_cache_draft", status)
        drafted: list[int] = out[: count[0]].tolist()
        return drafted

    def close(self) -> None:
        """Free the cache; a second call does nothing."""
        raw, self._raw = self._raw, None
        if raw is not None:
            ffi.release(raw)

    def _learn(self, name: str, token_ids: Sequence[int]) -> None:
        tokens = int32_array(token_ids, "token_ids")
        slot = self._library.error_slot()
        call = getattr(self._lib, name)
        slot.check(name, call(self._live(), int32_pointer(tokens), len(tokens), slot.out))

    def _live(self) -> Any:
        if self._raw is None:
            raise ClosedError("the n-gram cache is closed")
        return self._raw

    def __enter__(self) -> NgramCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_u16(name: str, value: int) -> None:
    if not 0 <= value <= _U16_MAX:
        raise HostCheckError(f"{name} is {value}, but must be 0 to {_U16_MAX}")
