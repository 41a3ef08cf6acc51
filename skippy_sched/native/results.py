"""Plain results of session calls: drafts, signals, and pages of KV cache.

Knows their C layouts. Does not know what to do with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .activation import ActivationFrame
from .cdef import NATIVE_MTP_MAX_DRAFT_TOKENS, NATIVE_MTP_VERSION, ffi
from .errors import HostCheckError

_KV_COMPONENTS_MAX = 2  # the array in skippy_kv_page_desc


@dataclass(frozen=True, slots=True)
class NativeMtpDraft:
    """Tokens that the model's own multi-token heads propose; the time they took in microseconds."""

    token_ids: tuple[int, ...]
    proposal_compute_us: int

    @classmethod
    def of(cls, raw: Any) -> NativeMtpDraft | None:
        """The draft in a C structure; None when it is unavailable, unknown or empty."""
        if not raw.available or raw.version != NATIVE_MTP_VERSION or raw.token_count <= 0:
            return None
        count = min(raw.token_count, NATIVE_MTP_MAX_DRAFT_TOKENS)
        return cls(tuple(raw.token_ids[0:count]), raw.proposal_compute_us)


class VerifyOutput(NamedTuple):
    """`predicted_tokens[i]` should follow input i; fewer than the inputs when sampling stopped at
    a mismatch. The draft counts only if every input is accepted."""

    predicted_tokens: list[int]
    draft: NativeMtpDraft | None
    frame: ActivationFrame


@dataclass(frozen=True, slots=True)
class TokenSignal:
    """How sure the model was of its last token: nats, log probabilities, token ids."""

    entropy: float
    top_logprob: float
    second_logprob: float
    margin: float
    top_token: int
    second_token: int


@dataclass(frozen=True, slots=True)
class GenerationSignalWindow:
    """Token signals over the last `token_count` tokens; entropies in nats."""

    token_count: int
    mean_entropy: float
    max_entropy: float
    mean_margin: float
    min_margin: float
    high_entropy_count: int
    repetition_count: int


@dataclass(frozen=True, slots=True)
class KvPageComponent:
    """One of the parts of a composite page; rows, offsets and sizes in bytes."""

    version: int
    role: int
    token_start: int
    token_count: int
    layer_count: int
    k_type: int
    v_type: int
    k_row_bytes: int
    v_row_bytes: int
    v_element_bytes: int
    k_idx_row_bytes: int
    payload_offset: int
    payload_bytes: int
    flags: int


@dataclass(frozen=True, slots=True)
class KvPageDesc:
    """What a page of KV cache holds: tokens [token_start, token_start + token_count) of layers
    [layer_start, layer_end)."""

    version: int
    layer_start: int
    layer_end: int
    token_start: int
    token_count: int
    layer_count: int
    k_type: int
    v_type: int
    k_row_bytes: int
    v_row_bytes: int
    v_element_bytes: int
    k_idx_row_bytes: int
    payload_bytes: int
    flags: int
    codec: int
    components: tuple[KvPageComponent, ...]

    @classmethod
    def of(cls, raw: Any) -> KvPageDesc:
        """The description in a C structure."""
        count = min(raw.component_count, _KV_COMPONENTS_MAX)
        return cls(
            **{name: getattr(raw, name) for name in _PAGE_NUMBERS},
            components=tuple(
                KvPageComponent(
                    **{name: getattr(raw.components[i], name) for name in _COMPONENT_NUMBERS}
                )
                for i in range(count)
            ),
        )

    def raw(self) -> Any:
        """The C structure."""
        if len(self.components) > _KV_COMPONENTS_MAX:
            raise HostCheckError(
                f"a KV page has {len(self.components)} components, but at most "
                f"{_KV_COMPONENTS_MAX} fit"
            )
        raw = ffi.new("struct skippy_kv_page_desc *")
        for name in _PAGE_NUMBERS:
            setattr(raw, name, getattr(self, name))
        raw.component_count = len(self.components)
        for index, component in enumerate(self.components):
            for name in _COMPONENT_NUMBERS:
                setattr(raw.components[index], name, getattr(component, name))
        return raw


_PAGE_NUMBERS = tuple(n for n in KvPageDesc.__dataclass_fields__ if n != "components")
_COMPONENT_NUMBERS = tuple(KvPageComponent.__dataclass_fields__)


class KvPage(NamedTuple):
    """A page of KV cache: its description, and its bytes as a numpy uint8 array."""

    desc: KvPageDesc
    payload: Any
