"""A mask over the vocabulary: only its tokens are sampled, whatever the sampling."""

from __future__ import annotations

import numpy as np
import pytest

from skippy_sched.native import (
    HostCheckError,
    InvalidArgument,
    IterationEntry,
    NativeError,
    SamplingConfig,
    iteration_batch_sampled,
)

CHAINS = [
    None,
    SamplingConfig(enabled=True, temperature=0.9, seed=3, top_k=40, top_p=0.9, min_p=0.01),
    SamplingConfig(enabled=True, temperature=1.5, seed=4, repeat_penalty=1.3, presence_penalty=0.5),
    SamplingConfig(enabled=True, temperature=0, logit_bias=((65, 100.0),)),
    SamplingConfig(enabled=True, temperature=1, seed=5, mirostat_mode=2),
    SamplingConfig(enabled=True, temperature=1, seed=6, typical_p=0.5, xtc_probability=1.0),
]


def mask_of(model, tokens):
    words = np.zeros(-(-model.facts.n_vocab // 32), dtype=np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def sampled(session, tokens, sampling=None):
    entry = IterationEntry(session, tokens, sampling=sampling, sample_last=True)
    [(_, token)] = iteration_batch_sampled([entry]).samples
    return token


@pytest.mark.parametrize("sampling", CHAINS)
def test_only_what_the_mask_lets_through_is_sampled(engine, sampling):
    model = engine.open()
    session = model.create_session()
    allowed = {40, 41, 77, 140, model.facts.n_vocab - 1}
    session.set_mask(mask_of(model, allowed))
    token = sampled(session, model.tokenize("The quick brown"), sampling)
    for _ in range(12):
        assert token in allowed
        token = sampled(session, [token], sampling)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.float32])
def test_a_mask_of_other_words_than_32_bit_ones_is_never_read(sim, dtype):
    model = sim.open()
    session = model.create_session()
    words = -(-model.facts.n_vocab // 32)
    with pytest.raises(HostCheckError, match="32-bit words, not"):
        session.set_mask(np.ones(words, dtype=dtype))
    for shape in [(1, words), (0,)]:
        with pytest.raises(HostCheckError, match="32-bit words, not"):
            session.set_mask(np.ones(shape, dtype=np.uint32))


def test_a_mask_that_is_not_contiguous_is_read_as_what_it_holds(sim):
    model = sim.open()
    session = model.create_session()
    session.set_mask(np.repeat(mask_of(model, [93]), 2)[::2])
    assert sampled(session, [40, 41]) == 93


def test_a_mask_of_one_token_leaves_no_choice(engine):
    model = engine.open()
    session = model.create_session()
    session.set_mask(mask_of(model, [93]))
    assert sampled(session, [40, 41]) == 93


def test_a_lifted_mask_changes_nothing_any_more(engine):
    model = engine.open()
    free, masked = model.create_session(), model.create_session()
    tokens = model.tokenize("The quick brown fox")
    token = sampled(free, tokens)
    masked.set_mask(mask_of(model, [token + 1]))
    masked.set_mask(None)
    assert sampled(masked, tokens) == token


def test_a_mask_belongs_to_its_session_and_ends_with_it(engine):
    model = engine.open()
    masked, free = model.create_session(), model.create_session()
    tokens = model.tokenize("The quick brown fox")
    expected = sampled(free, tokens)
    masked.set_mask(mask_of(model, [93]))
    free.reset()
    entries = [IterationEntry(session, tokens, sample_last=True) for session in (masked, free)]
    assert [token for _, token in iteration_batch_sampled(entries).samples] == [93, expected]
    lane = masked.lane
    masked.close()
    again = model.create_session()
    assert again.lane == lane
    assert sampled(again, tokens) == expected


def test_the_models_own_log_probabilities_stay(engine):
    model = engine.open()
    free, masked = model.create_session(), model.create_session()
    tokens = model.tokenize("The quick brown fox")
    token = sampled(free, tokens)
    told = free.logprobs(token, 3)
    masked.set_mask(mask_of(model, [93]))
    sampled(masked, tokens)
    assert masked.logprobs(token, 3) == told


def test_a_mask_of_another_size_is_refused(engine):
    model = engine.open()
    session = model.create_session()
    with pytest.raises(InvalidArgument, match="words"):
        session.set_mask(np.zeros(1, dtype=np.uint32))


def test_a_mask_that_leaves_nothing_is_an_error_of_that_call(engine):
    model = engine.open()
    session = model.create_session()
    session.set_mask(mask_of(model, []))
    with pytest.raises(NativeError, match="no allowed token"):
        sampled(session, [40, 41])
