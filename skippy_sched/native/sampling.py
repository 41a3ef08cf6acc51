"""How the next token is drawn: SamplingConfig and its C form.

Knows the fields, their host defaults and the checks the host owes the library. Does not know what
a client may ask for: the server validates that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from .cdef import (
    DRY_BREAKER_BYTES,
    MAX_DRY_BREAKERS,
    MAX_LOGIT_BIAS,
    MAX_SAMPLERS,
    SAMPLING_FLAG_ENABLED,
    SAMPLING_FLAG_IGNORE_EOS,
    SAMPLING_VERSION,
    address_of,
    ffi,
)
from .errors import HostCheckError


class Sampler(IntEnum):
    """The samplers that a chain can hold."""

    PENALTIES = 1
    DRY = 2
    TOP_N_SIGMA = 3
    TOP_K = 4
    TYPICAL_P = 5
    TOP_P = 6
    MIN_P = 7
    XTC = 8
    TEMPERATURE = 9


DEFAULT_SAMPLERS: tuple[Sampler, ...] = tuple(Sampler)

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "typical_p",
    "top_nsigma",
    "dynatemp_range",
    "dynatemp_exponent",
    "dry_multiplier",
    "dry_base",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_entropy",
    "mirostat_learning_rate",
)
_INTS = (
    "top_k",
    "penalty_last_n",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat_mode",
    "reasoning_budget_tokens",
)


@dataclass(frozen=True)
class SamplingConfig:
    """Immutable sampling settings of one request; `enabled` False means greedy.

    Share one object between the calls of a request: its C form is built once, at first use, and
    the native sampler chain lives as long as the settings stay equal. Penalty windows count
    tokens (-1: all), `logit_bias` pairs (token id, bias added to the logit), seed 0 is random,
    `reasoning_budget_tokens` -1 is off. `validate` says what is refused.
    """

    enabled: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    penalty_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    typical_p: float = 1.0
    top_nsigma: float = -1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: int = 0
    mirostat_entropy: float = 5.0
    mirostat_learning_rate: float = 0.1
    samplers: tuple[Sampler, ...] = DEFAULT_SAMPLERS
    reasoning_budget_tokens: int = -1

    def validate(self) -> None:
        """Raise HostCheckError naming the first field that the library must not be given."""
        for name in ("penalty_last_n", "dry_penalty_last_n"):
            if getattr(self, name) < -1:
                raise _refused(name, getattr(self, name), "-1 (all tokens) or more")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _refused("logit_bias", f"{len(self.logit_bias)} entries", f"<= {MAX_LOGIT_BIAS}")
        if len(self.samplers) > MAX_SAMPLERS:
            raise _refused("samplers", f"{len(self.samplers)} entries", f"<= {MAX_SAMPLERS}")
        for sampler in self.samplers:
            if sampler not in Sampler._value2member_map_:
                names = ", ".join(s.name.lower() for s in Sampler)
                raise _refused("samplers", repr(sampler), f"one of {names}")
        if len(self.dry_sequence_breakers) > MAX_DRY_BREAKERS:
            found = f"{len(self.dry_sequence_breakers)} entries"
            raise _refused("dry_sequence_breakers", found, f"<= {MAX_DRY_BREAKERS}")
        for breaker in self.dry_sequence_breakers:
            data = breaker.encode("utf-8", "replace")
            if len(data) >= DRY_BREAKER_BYTES or b"\0" in data:
                bound = f"at most {DRY_BREAKER_BYTES - 1} UTF-8 bytes without NUL"
                raise _refused("dry_sequence_breakers", repr(breaker)[:80], bound)
        if not 0 <= self.seed < 2**32:
            raise _refused("seed", self.seed, "0 (random) to 2**32 - 1")
        for name in _INTS:
            if not -(2**31) <= getattr(self, name) < 2**31:
                raise _refused(name, getattr(self, name), "a 32-bit integer")
        for name in _FLOATS:
            if not math.isfinite(getattr(self, name)):
                raise _refused(name, getattr(self, name), "a finite number")
        for token, bias in self.logit_bias:
            if not 0 <= token < 2**31 or math.isnan(bias):
                raise _refused("logit_bias", (token, bias), "token id >= 0 and a bias, not NaN")

    def __getstate__(self) -> dict[str, Any]:
        """Without the C form, which belongs to this process."""
        kept = self.__dict__.items()
        return {name: value for name, value in kept if name not in ("raw", "address")}

    @cached_property
    def raw(self) -> Any:
        """The C structure, built and validated once and kept alive by this object."""
        self.validate()
        raw = ffi.new("struct skippy_sampling_config *")
        raw.version = SAMPLING_VERSION
        raw.flags = (SAMPLING_FLAG_ENABLED if self.enabled else 0) | (
            SAMPLING_FLAG_IGNORE_EOS if self.ignore_eos else 0
        )
        raw.ignore_eos = self.ignore_eos
        raw.seed = self.seed
        for name in _INTS + _FLOATS:
            setattr(raw, name, getattr(self, name))
        raw.sampler_count = len(self.samplers)
        for index, sampler in enumerate(self.samplers):
            raw.samplers[index] = sampler
        raw.dry_sequence_breaker_count = len(self.dry_sequence_breakers)
        for index, breaker in enumerate(self.dry_sequence_breakers):
            raw.dry_sequence_breakers[index] = breaker.encode("utf-8", "replace")
        raw.logit_bias_count = len(self.logit_bias)
        for index, (token, bias) in enumerate(self.logit_bias):
            raw.logit_bias[index].token = token
            raw.logit_bias[index].bias = bias
        return raw

    @cached_property
    def address(self) -> int:
        """The address of `raw`, as a plain attribute after first use."""
        return address_of(self.raw)


def _refused(field: str, found: object, bound: str) -> HostCheckError:
    return HostCheckError(f"sampling.{field} is {found}, but must be {bound}")


def raw_sampling(sampling: SamplingConfig | None) -> Any:
    """The pointer that a native call takes; NULL (greedy) for None."""
    return ffi.NULL if sampling is None else sampling.raw
