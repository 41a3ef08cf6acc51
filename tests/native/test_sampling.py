"""SamplingConfig: defaults, C form, and what is refused before the library sees it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from skippy_sched.native import HostCheckError, Sampler, SamplingConfig
from skippy_sched.native.cdef import SAMPLING_FLAG_ENABLED, SAMPLING_FLAG_IGNORE_EOS, ffi


def test_defaults_are_those_of_the_host() -> None:
    raw = SamplingConfig().raw
    assert (raw.version, raw.flags, raw.seed, raw.top_k) == (3, 0, 0, 0)
    assert (raw.temperature, raw.top_p, raw.min_p, raw.typical_p) == (1, 1, 0, 1)
    assert (raw.presence_penalty, raw.frequency_penalty, raw.repeat_penalty) == (0, 0, 1)
    assert (raw.penalty_last_n, raw.dry_penalty_last_n, raw.dry_allowed_length) == (64, 64, 2)
    assert (raw.top_nsigma, raw.dynatemp_range, raw.dynatemp_exponent) == (-1, 0, 1)
    assert (raw.dry_multiplier, raw.dry_base) == (0, 1.75)
    assert (raw.xtc_probability, raw.xtc_threshold) == pytest.approx((0, 0.1))
    assert (raw.mirostat_mode, raw.mirostat_entropy) == (0, 5)
    assert raw.mirostat_learning_rate == pytest.approx(0.1)
    assert list(raw.samplers[0 : raw.sampler_count]) == list(range(1, 10))
    breakers = [
        ffi.string(raw.dry_sequence_breakers[i]) for i in range(raw.dry_sequence_breaker_count)
    ]
    assert breakers == [b"\n", b":", b'"', b"*"]
    assert raw.reasoning_budget_tokens == -1


def test_every_field_reaches_the_c_structure() -> None:
    config = SamplingConfig(
        enabled=True, ignore_eos=True, seed=9, logit_bias=((5, -2.5),), samplers=(Sampler.TOP_K,)
    )
    raw = config.raw
    assert raw.flags == SAMPLING_FLAG_ENABLED | SAMPLING_FLAG_IGNORE_EOS
    assert raw.ignore_eos == 1
    assert (raw.logit_bias_count, raw.logit_bias[0].token, raw.logit_bias[0].bias) == (1, 5, -2.5)
    assert (raw.sampler_count, raw.samplers[0]) == (1, Sampler.TOP_K)


def test_the_c_form_is_built_once_and_not_shared_with_a_changed_copy() -> None:
    config = SamplingConfig(enabled=True, seed=1)
    assert config.raw is config.raw
    other = dataclasses.replace(config, seed=2)
    assert other.address != config.address
    assert other.raw.seed == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("penalty_last_n", -2),
        ("dry_penalty_last_n", -2),
        ("logit_bias", tuple((i, 1.0) for i in range(257))),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("samplers", (Sampler.TOP_K,) * 17),
        ("samplers", (99,)),
        ("dry_sequence_breakers", ("x",) * 9),
        ("dry_sequence_breakers", ("x" * 16,)),
        ("dry_sequence_breakers", ("a\0b",)),
        ("seed", -1),
        ("seed", 2**32),
        ("top_k", 2**31),
        ("temperature", math.nan),
        ("top_p", math.inf),
    ],
)
def test_what_the_library_must_not_be_given_is_refused_by_name(field: str, value: Any) -> None:
    config = dataclasses.replace(SamplingConfig(), **{field: value})
    with pytest.raises(HostCheckError, match=rf"sampling\.{field} is"):
        config.validate()
    with pytest.raises(HostCheckError):
        _ = config.address


def test_the_largest_allowed_values_are_accepted() -> None:
    SamplingConfig(
        penalty_last_n=-1,
        logit_bias=tuple((i, 1.0) for i in range(256)),
        samplers=(Sampler.TOP_K,) * 16,
        dry_sequence_breakers=("x" * 15,) * 8,
        seed=2**32 - 1,
    ).validate()
