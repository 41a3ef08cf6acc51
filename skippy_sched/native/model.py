"""An opened model: facts, tokenizer, boundaries, and the sessions that live on it.

Knows one skippy_model. Does not execute anything: that is session.py and batch.py.
A model and its sessions belong to one thread at a time; only tokenize, detokenize and is_eog may
run beside an execution.
"""

from __future__ import annotations

import sys
import warnings
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from .activation import ActivationBoundary
from .cdef import ffi
from .errors import ClosedError, ErrorSlot, HostCheckError, NativeError
from .facts import ModelFacts, batch_invariance, read_facts
from .growth import must_grow
from .options import ModelOptions, runtime_config
from .session import StageSession
from .state import Integers, int32, int32_array, int32_pointer

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from .batch import IterationBatch
    from .library import Library


class Model:
    """One opened model. Use as a context manager, or call `close`.

    `facts`, `input_boundary` (None for a source stage), `output_boundary` (None for a terminal
    stage), `terminal_stage` and `batched_activation_exports` are read once, at opening.
    """

    def __init__(self, library: Library, raw: Any, path: str, options: ModelOptions) -> None:
        self.library = library
        self.path = path
        self.options = options
        self.lib: Any = library.lib
        self._raw = raw
        self._sessions: dict[int, StageSession] = {}
        self._batch: IterationBatch | None = None
        self.facts: ModelFacts = read_facts(library, raw, options)
        self._variance: str | None = batch_invariance(library, raw)
        self.input_boundary = self._boundary(self.lib.skippy_model_input_activation_boundary)
        self.output_boundary = self._boundary(self.lib.skippy_model_output_activation_boundary)
        self.terminal_stage: bool = self.output_boundary is None
        unified = self.facts.kv_unified or self._batches_exports()
        batched = self.facts.is_dense and unified
        if options.batched_exports is not None:
            batched = self.facts.is_dense and options.batched_exports
        self.batched_activation_exports: bool = batched

    @classmethod
    def open(cls, library: Library, path: str | Path, options: ModelOptions | None = None) -> Model:
        """Open the model file at `path`. Raises HostCheckError or NativeError (ModelError for a
        file that is missing or damaged)."""
        options = options or ModelOptions()
        config, keep = runtime_config(options)
        out = ffi.new("struct skippy_model *[1]")
        slot = library.error_slot()
        encoded = ffi.new("char[]", str(path).encode())
        status = library.lib.skippy_model_open(encoded, config, out, slot.out)
        del keep
        slot.check("skippy_model_open", status)
        try:
            return cls(library, out[0], str(path), options)
        except BaseException:
            library.lib.skippy_model_free(out[0], slot.out)
            slot.discard()
            raise

    def _boundary(self, call: Any) -> ActivationBoundary | None:
        raw = ffi.new("struct skippy_activation_boundary_desc *")
        return ActivationBoundary.of(raw) if call(self._raw, raw) else None

    def _batches_exports(self) -> bool:
        symbol = "skippyx_model_batches_exports"
        return self.library.offers(symbol) and bool(getattr(self.lib, symbol)(self._raw))

    @property
    def raw(self) -> Any:
        """The native handle. Raises ClosedError after `close`."""
        if self._raw is None:
            raise ClosedError(f"the model {self.path} is closed: open it again to use it")
        return self._raw

    @property
    def closed(self) -> bool:
        return self._raw is None

    @property
    def sessions(self) -> tuple[StageSession, ...]:
        """The live sessions, oldest first."""
        return tuple(self._sessions.values())

    @property
    def batch(self) -> IterationBatch:
        """The reusable arrays of this model's batch calls; one thread at a time."""
        if self._batch is None:
            from .batch import IterationBatch

            self._batch = IterationBatch(self.library)
        return self._batch

    def batch_invariant(self) -> str | None:
        """None when a row's logits do not depend on the rows it shares a batch with; else why."""
        return self._variance

    # ---- tokenizer: safe beside an execution ------------------------------------------------

    def tokenize(self, text: str | bytes, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text are parsed.

        Raises HostCheckError for text that is not valid Unicode or holds a NUL byte.
        """
        try:
            data = text.encode() if isinstance(text, str) else bytes(text)
        except UnicodeEncodeError as error:
            raise HostCheckError(
                f"text is not valid Unicode: a lone surrogate at character {error.start}"
            ) from None
        nul = data.find(b"\0")
        if nul >= 0:
            raise HostCheckError(
                f"text holds a NUL byte at byte {nul}, which the tokenizer call cannot carry: "
                "remove it or tokenize the pieces apart"
            )
        needed = ffi.new("size_t *")
        slot = self.library.error_slot()
        capacity = len(data) + 8  # a byte makes at most one token; room for special ones
        for growths in count():
            out = np.empty(capacity, dtype=np.int32)
            pointer = int32_pointer(out)
            status = self.lib.skippy_tokenize(
                self.raw, data, add_special, pointer, capacity, needed, slot.out
            )
            if not must_grow(status, needed[0], capacity, growths):
                break
            slot.discard()
            capacity = needed[0]
        slot.check("skippy_tokenize", status)
        tokens: list[int] = out[: needed[0]].tolist()
        return tokens

    def detokenize(self, ids: Integers) -> bytes:
        """The bytes of these tokens, special ones rendered; not necessarily valid UTF-8."""
        tokens = int32_array(ids, "ids")
        needed = ffi.new("size_t *")
        slot = self.library.error_slot()
        capacity = 16 * len(tokens) + 16  # most tokens are shorter
        for growths in count():
            out = bytearray(capacity)
            status = self.lib.skippy_detokenize(
                self.raw,
                int32_pointer(tokens),
                len(tokens),
                ffi.from_buffer("char[]", out),
                capacity,
                needed,
                slot.out,
            )
            if not must_grow(status, needed[0], capacity, growths):
                break
            slot.discard()
            capacity = needed[0]
        slot.check("skippy_detokenize", status)
        return bytes(memoryview(out)[: needed[0]])

    def is_eog(self, token: int) -> bool:
        """Whether a token ends a generation."""
        out = ffi.new("bool *")
        slot = self.library.error_slot()
        slot.check(
            "skippy_token_is_eog",
            self.lib.skippy_token_is_eog(self.raw, int32(token, "token"), out, slot.out),
        )
        return bool(out[0])

    def is_control(self, token: int) -> bool | None:
        """Whether a token is for the model's own use and no text; None: the library cannot say."""
        if not self.library.offers("skippyx_token_is_control"):
            return None
        out = ffi.new("bool *")
        slot = self.library.error_slot()
        status = self.lib.skippyx_token_is_control(self.raw, int32(token, "token"), out, slot.out)
        slot.check("skippyx_token_is_control", status)
        return bool(out[0])

    # ---- sessions ---------------------------------------------------------------------------

    def create_session(self) -> StageSession:
        """A session on the lowest free lane. Raises NativeRuntimeError when no lane is free."""
        out = ffi.new("struct skippy_session *[1]")
        slot = self.library.error_slot()
        status = self.lib.skippy_session_create(self.raw, out, slot.out)
        slot.check("skippy_session_create", status)
        return StageSession(self, out[0])

    def create_session_from_resident_prefix(
        self, cache_seq_id: int, token_ids: Integers
    ) -> StageSession:
        """A session on a free lane that starts with a saved prefix's cells.

        `token_ids` are the prefix's tokens; the new session's count is their number. Raises
        InvalidArgument when the cache sequence does not reach that far.
        """
        tokens = int32_array(token_ids, "token_ids")
        out = ffi.new("struct skippy_session *[1]")
        slot = self.library.error_slot()
        status = self.lib.skippy_session_create_from_resident_prefix(
            self.raw,
            int32(cache_seq_id, "cache_seq_id"),
            int32_pointer(tokens),
            len(tokens),
            out,
            slot.out,
        )
        slot.check("skippy_session_create_from_resident_prefix", status)
        return StageSession(self, out[0], token_count=len(tokens))

    def adopt(self, session: StageSession) -> None:
        """Remember a live session, so that `close` frees it first."""
        self._sessions[session.address] = session

    def disown(self, address: int) -> None:
        """Forget a session that is being freed."""
        self._sessions.pop(address, None)

    # ---- end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the live sessions, then the model; on a closed model it does nothing.

        Raises the first NativeError, after everything was freed as far as it goes: nothing of
        the model can be used afterwards.
        """
        if self._raw is None:
            return
        first: Exception | None = None
        for session in 2 * self.sessions:  # one that could not be freed gets a second chance
            try:
                session.close()
            except NativeError as error:  # the model must still be freed
                first = first or error
        for session in self.sessions:
            session.abandon()
        raw, self._raw = self._raw, None
        slot: ErrorSlot = self.library.error_slot()
        try:
            slot.check("skippy_model_free", self.lib.skippy_model_free(raw, slot.out))
        except NativeError as error:
            first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Sessions hold their model, so nothing can be executing on it any more.
        if getattr(self, "_raw", None) is None or sys.is_finalizing():
            return
        warnings.warn(f"the model {self.path} was never closed", ResourceWarning, stacklevel=2)
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._sessions)} sessions"
        return f"Model({self.path!r}, {state})"
