"""What an engine thinks of tokens: log-probabilities at a row, and tokens that are no text."""

from __future__ import annotations

import math

import pytest

from skippy_sched.native import InvalidArgument, IterationEntry, iteration_batch_sampled

WORDS = "The quick brown fox"


def _sampled(engine):
    model = engine.open()
    session = model.create_session()
    entry = IterationEntry(session, model.tokenize(WORDS), sample_last=True)
    [(_, token)] = iteration_batch_sampled([entry]).samples
    return model, session, token


def test_the_greedy_choice_is_the_likeliest_token(engine):
    _, session, token = _sampled(engine)
    own, top = session.logprobs(token, 5)
    assert top[0] == (token, own)
    values = [value for _, value in top]
    assert values == sorted(values, reverse=True)
    assert len({choice for choice, _ in top}) == 5


def test_the_probabilities_of_all_tokens_are_one_together(engine):
    model, session, token = _sampled(engine)
    _, top = session.logprobs(token, model.facts.n_vocab)
    assert math.fsum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-4)
    assert {choice for choice, _ in top} == set(range(model.facts.n_vocab))
    last, value = top[-1]
    assert session.logprobs(last, 0) == (value, [])


def test_what_cannot_be_told_is_refused(engine):
    model = engine.open()
    session = model.create_session()
    with pytest.raises(InvalidArgument, match="no logits"):
        session.logprobs(0, 1)
    _, session, token = _sampled(engine)
    with pytest.raises(InvalidArgument, match="outside the vocabulary"):
        session.logprobs(-1)
    with pytest.raises(InvalidArgument, match="top_count"):
        session.logprobs(token, model.facts.n_vocab + 1)


def test_control_tokens_are_told_from_text(engine):
    model = engine.open()
    assert model.is_control(model.facts.token_bos) is True
    assert model.is_control(model.tokenize("a", add_special=False)[0]) is False
    with pytest.raises(InvalidArgument, match="outside the vocabulary"):
        model.is_control(-1)
