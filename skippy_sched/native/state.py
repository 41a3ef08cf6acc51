"""A session's life and memory: position, trim, prefixes, saved state, KV pages, signals.

Knows one skippy_session except how to run tokens through it, which session.py adds.
`token_count` moves with the call that moves the native position, and only when it succeeded.
"""

from __future__ import annotations

import operator
from array import array
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .cdef import address_of, ffi
from .errors import ClosedError, CountOverflow, HostCheckError, Status, Unsupported
from .growth import must_grow
from .results import GenerationSignalWindow, KvPage, KvPageDesc, TokenSignal
from .sampling import SamplingConfig, raw_sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from .model import Model

# Token ids or positions; an int32 array is read in place.
Integers: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"

COUNT_MAX = 2**64 - 1
LOGPROBS_MAX = 2**20  # more than any vocabulary


def int32_array(values: Integers, what: str) -> np.ndarray[Any, Any]:
    """The values as a contiguous int32 array; an int32 array is passed on without a copy.

    Raises HostCheckError for values that do not fit, are no integers, or are not in one row.
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise HostCheckError(f"{what} must be 32-bit integers in one row, not {values.ndim}-D")
        if values.dtype == np.int32:
            return np.ascontiguousarray(values)
        values = values.tolist()
    try:
        return np.asarray(array("i", values))  # unlike numpy it takes no fractions and no texts
    except (OverflowError, ValueError, TypeError) as error:
        raise HostCheckError(f"{what} must be 32-bit integers: {error}") from None


def host_bytes(data: Any, what: str) -> Any:
    """A pointer to a buffer of bytes for a native call, which keeps the buffer alive."""
    try:
        return ffi.from_buffer(data)
    except (TypeError, ValueError) as error:
        raise HostCheckError(f"{what} must be a contiguous buffer of bytes: {error}") from None


def int32_pointer(values: np.ndarray[Any, Any]) -> Any:
    """A pointer for a native call that keeps the array alive."""
    return ffi.from_buffer("int32_t[]", values)


def added(token_count: int, tokens: int) -> int:
    """Their sum. Raises CountOverflow."""
    if token_count + tokens > COUNT_MAX:
        raise CountOverflow(
            f"session token count overflow: {token_count} + {tokens} is beyond 2**64 - 1"
        )
    return token_count + tokens


class SessionState:
    """One native sequence with its KV cache, on one lane of its model."""

    def __init__(self, model: Model, raw: Any, token_count: int = 0) -> None:
        self.model = model
        self.lib: Any = model.lib
        self.token_count: int = token_count
        self.address: int = address_of(raw)  # 0 once closed
        self._raw = raw
        self._free_failed = False

    # ---- life -------------------------------------------------------------------------------

    @property
    def raw(self) -> Any:
        """The native handle. Raises ClosedError after `close`."""
        if self._raw is None:
            raise ClosedError("the session is closed: create another one on its model")
        return self._raw

    @property
    def closed(self) -> bool:
        return self._raw is None

    def close(self) -> None:
        """Free the native session and its lane; on a closed session it does nothing.

        Raises NativeError; the session is then still open and can be closed again. If the library
        answers that it knows no such session, the first attempt has freed it after all.
        """
        if self._raw is None:
            return
        slot = self.model.library.error_slot()
        status = self.lib.skippy_session_free(self._raw, slot.out)
        if status == Status.INVALID_ARGUMENT and self._free_failed:
            slot.discard()
            status = Status.OK
        self._free_failed = status != Status.OK
        slot.check("skippy_session_free", status)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the handle without freeing it: for a model that is being closed."""
        self._raw = None
        self.model.disown(self.address)
        self.address = 0

    def __enter__(self) -> SessionState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def position(self) -> int:
        """The native position in tokens; after a failed call this is the truth, not
        `token_count`."""
        return int(self.lib.skippy_session_position(self.raw))

    @property
    def lane(self) -> int:
        """The lane, which is the native sequence id."""
        return int(self.lib.skippy_session_sequence_id(self.raw))

    @property
    def batch_size(self) -> int:
        """The most tokens that one native batch takes."""
        return int(self.lib.skippy_session_batch_size(self.raw))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a native function of this session whose last argument is the error slot."""
        raw = self.raw
        slot = self.model.library.error_slot()
        slot.check(name, getattr(self.lib, name)(raw, *arguments, slot.out))

    # ---- position ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every token; the session is as new, also after a failed checkpoint restore."""
        self._call("skippy_session_reset")
        self.token_count = 0

    def trim(self, token_count: int) -> None:
        """Cut the sequence back to its first `token_count` tokens, for example after a rejected
        verify. Raises InvalidArgument beyond the position."""
        self._call("skippy_trim_session", uint64(token_count, "token_count"))
        self.token_count = int(token_count)

    def set_position(self, position: int) -> None:
        """Move the position without touching the KV cache. Raises InvalidArgument below 0."""
        self._call("skippy_session_set_position", int32(position, "position"))
        self.token_count = position

    def retire_verify_checkpoint(self, token_start: int, token_count: int) -> None:
        """Drop the checkpoint of a verify that was accepted whole. Raises InvalidArgument when
        the model keeps checkpoints and holds none of exactly this window."""
        self._call(
            "skippy_retire_verify_checkpoint",
            uint64(token_start, "token_start"),
            uint64(token_count, "token_count"),
        )

    # ---- prefixes ---------------------------------------------------------------------------

    def save_prefix(self, cache_seq_id: int, token_count: int) -> None:
        """Keep the first `token_count` tokens' cells as cache sequence `cache_seq_id`, which must
        be at least twice the lane count. Raises InvalidArgument or Unsupported."""
        self._call(
            "skippy_session_save_prefix",
            int32(cache_seq_id, "cache_seq_id"),
            uint64(token_count, "token_count"),
        )

    def restore_prefix(self, cache_seq_id: int, token_ids: Integers) -> None:
        """Replace this session's tokens with a saved prefix, whose tokens are `token_ids`."""
        tokens = int32_array(token_ids, "token_ids")
        self._call(
            "skippy_session_restore_prefix",
            int32(cache_seq_id, "cache_seq_id"),
            int32_pointer(tokens),
            len(tokens),
        )
        self.token_count = len(tokens)

    def drop_sequence(self, cache_seq_id: int) -> None:
        """Forget a saved prefix of the model."""
        self._call("skippy_session_drop_sequence", int32(cache_seq_id, "cache_seq_id"))

    def memory_used_cells(self) -> int:
        """Occupied KV cells of the whole model, saved prefixes included. May raise Unsupported."""
        out = ffi.new("uint64_t *")
        self._call("skippy_session_memory_used_cells", out)
        return int(out[0])

    # ---- saved state ------------------------------------------------------------------------

    def export_state(self, layer_start: int, layer_end: int) -> np.ndarray[Any, Any]:
        """The partial (recurrent, sliding-window) state as bytes; the layer range must be the
        stage's own. Possibly empty."""
        return self._exported("skippy_export_state", *_layers(layer_start, layer_end))

    def export_full_state(self, layer_start: int, layer_end: int) -> np.ndarray[Any, Any]:
        """The whole sequence's state as bytes; the layer range must be the stage's own."""
        return self._exported("skippy_export_full_state", *_layers(layer_start, layer_end))

    def export_recurrent_state(self) -> np.ndarray[Any, Any]:
        """The recurrent state as bytes; empty for a model without recurrent memory."""
        return self._exported("skippy_export_recurrent_state")

    def import_state(self, layer_start: int, layer_end: int, state: Any) -> None:
        """Restore what `export_state` gave; the position rises to what the state reaches.
        The token history is not restored."""
        self._imported("skippy_import_state", state, *_layers(layer_start, layer_end))

    def import_full_state(self, layer_start: int, layer_end: int, state: Any) -> None:
        """Restore what `export_full_state` gave; as `import_state`."""
        self._imported("skippy_import_full_state", state, *_layers(layer_start, layer_end))

    def import_recurrent_state(self, state: Any) -> None:
        """Restore what `export_recurrent_state` gave. May raise Unsupported."""
        self._imported("skippy_import_recurrent_state", state)

    def export_kv_page(
        self, layer_start: int, layer_end: int, token_start: int, token_count: int
    ) -> KvPage:
        """The KV rows of tokens [token_start, token_start + token_count). May raise
        Unsupported."""
        desc = ffi.new("struct skippy_kv_page_desc *")
        start, tokens = uint64(token_start, "token_start"), uint64(token_count, "token_count")
        layers = _layers(layer_start, layer_end)
        payload = self._grown(
            "skippy_export_kv_page",
            lambda call, out, capacity, needed, error: call(
                self.raw, *layers, start, tokens, desc, out, capacity, needed, error
            ),
        )
        return KvPage(KvPageDesc.of(desc), payload)

    def import_kv_page(self, page: KvPage) -> None:
        """Put the rows of an exported page into this session; the position rises to their end."""
        data = host_bytes(page.payload, "the payload of a KV page")
        self._call("skippy_import_kv_page", page.desc.raw(), data, len(data))
        self.token_count = self.position

    def _exported(self, name: str, *range_: int) -> np.ndarray[Any, Any]:
        return self._grown(
            name,
            lambda call, out, capacity, needed, error: call(
                self.raw, *range_, out, capacity, needed, error
            ),
        )

    def _require(self, symbol: str) -> None:
        if not self.model.library.offers(symbol):
            raise Unsupported(
                symbol, Status.UNSUPPORTED, f"{self.model.library.path} has no such symbol"
            )

    def _grown(self, name: str, invoke: Callable[..., int]) -> np.ndarray[Any, Any]:
        """The bytes of a call that says how many it needs when it is given no buffer."""
        call = getattr(self.lib, name)
        needed = ffi.new("size_t *")
        slot = self.model.library.error_slot()
        payload: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)
        for growths in count():
            pointer = ffi.from_buffer(payload) if len(payload) else ffi.NULL
            status = invoke(call, pointer, len(payload), needed, slot.out)
            if not must_grow(status, needed[0], len(payload), growths):
                break
            slot.discard()
            payload = np.empty(needed[0], dtype=np.uint8)
        slot.check(name, status)
        return payload[: needed[0]]

    def _imported(self, name: str, state: Any, *range_: int) -> None:
        data = host_bytes(state, "a saved state")
        self._call(name, *range_, data, len(data))
        self.token_count = self.position

    # ---- sampling beside the batch ----------------------------------------------------------

    def configure_chat_sampling(
        self,
        sampling: SamplingConfig | None,
        metadata_json: str | None,
        prompt_token_count: int = 0,
    ) -> None:
        """Constrain this session by a chat template's metadata (grammar, triggers); None clears
        it. While configured, the sampling given per call is ignored."""
        metadata = ffi.NULL if metadata_json is None else metadata_json.encode()
        self._call(
            "skippy_session_configure_chat_sampling",
            raw_sampling(sampling),
            metadata,
            uint64(prompt_token_count, "prompt_token_count"),
        )

    def last_token_signal(self) -> TokenSignal:
        """Entropy and top two of the last row. Raises InvalidArgument when there is none."""
        raw = ffi.new("struct skippy_token_signal *")
        self._call("skippy_session_last_token_signal", raw)
        return TokenSignal(**{name: getattr(raw, name) for name in _SIGNAL_FIELDS})

    def logprobs(
        self, token: int, top_count: int = 0
    ) -> tuple[float, list[tuple[int, float]]] | None:
        """Log-probability of a token at the last row, and the likeliest (id, logprob) in order.

        They are the model's own, before biases and samplers. None: the library cannot say. Raises
        InvalidArgument when the last row put out no logits.
        """
        if not self.model.library.offers("skippyx_session_logprobs"):
            return None
        if not 0 <= top_count <= LOGPROBS_MAX:
            raise HostCheckError(f"top_count is {top_count}, but must be 0 to {LOGPROBS_MAX}")
        own = ffi.new("struct skippyx_logprob *")
        top = ffi.new("struct skippyx_logprob[]", max(top_count, 1))
        self._call("skippyx_session_logprobs", int32(token, "token"), own, top, top_count)
        return own.logprob, [(top[i].token, top[i].logprob) for i in range(top_count)]

    def set_mask(self, mask: np.ndarray[Any, Any] | None) -> None:
        """Sample only tokens whose bit is set: bit t % 32 of word t // 32, ``mask`` is uint32 or
        int32 of ceil(n_vocab / 32) words; None lifts it. Raises Unsupported, InvalidArgument."""
        self._require("skippyx_session_set_mask")
        if mask is None:
            self._call("skippyx_session_set_mask", ffi.NULL, 0)
            return
        words = np.asarray(mask)
        if words.ndim != 1 or words.dtype not in (np.uint32, np.int32) or not len(words):
            raise HostCheckError(
                f"a mask is a row of 32-bit words, not {words.dtype} of shape {words.shape}"
            )
        pointer = ffi.from_buffer("uint32_t[]", np.ascontiguousarray(words))
        self._call("skippyx_session_set_mask", pointer, len(words))

    def signal_window(self, window_tokens: int) -> GenerationSignalWindow:
        """Signals over the last `window_tokens` (> 0) tokens."""
        if not 0 < window_tokens < 2**32:
            raise HostCheckError(f"window_tokens is {window_tokens}, but must be 1 to 2**32 - 1")
        raw = ffi.new("struct skippy_generation_signal_window *")
        self._call("skippy_session_signal_window", window_tokens, raw)
        return GenerationSignalWindow(**{name: getattr(raw, name) for name in _WINDOW_FIELDS})


def _layers(start: int, end: int) -> tuple[int, int]:
    return int32(start, "layer_start"), int32(end, "layer_end")


_SIGNAL_FIELDS = tuple(TokenSignal.__dataclass_fields__)
_WINDOW_FIELDS = tuple(GenerationSignalWindow.__dataclass_fields__)


def uint64(value: int, name: str) -> int:
    """The value. Raises HostCheckError unless it is an unsigned 64-bit integer."""
    try:
        number = operator.index(value)
    except TypeError:
        raise HostCheckError(f"{name} is {value!r}, but must be an integer") from None
    if not 0 <= number <= COUNT_MAX:
        raise HostCheckError(f"{name} is {number}, but must be 0 to 2**64 - 1")
    return number


def int32(value: int, name: str) -> int:
    """The value. Raises HostCheckError unless it is a 32-bit integer."""
    try:
        number = operator.index(value)
    except TypeError:
        raise HostCheckError(f"{name} is {value!r}, but must be an integer") from None
    if not -(2**31) <= number < 2**31:
        raise HostCheckError(f"{name} is {number}, but must fit 32 bits")
    return number
