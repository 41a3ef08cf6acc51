"""The radix tree against a plain dictionary of prefixes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_sched.scheduler import prefix_cache
from skippy_sched.scheduler.prefix_cache import Entry, PrefixCache, common_length


@pytest.fixture(autouse=True)
def _short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "PREFIX_TOKENS_MIN", 1)


def test_a_prompt_finds_the_longest_saved_beginning() -> None:
    cache = PrefixCache(1000)
    cache.add([1, 2, 3, 4], 0.0)
    cache.add([1, 2, 9], 1.0)
    match = cache.match([1, 2, 9, 9])
    assert match is not None
    assert match.length == 3
    match = cache.match([1, 2, 3, 7])
    assert match is not None
    assert (match.length, match.entry.length) == (3, 4)
    assert cache.match([2, 1]) is None


def test_a_whole_match_leaves_one_token_to_compute() -> None:
    cache = PrefixCache(1000)
    cache.add([1, 2, 3, 4], 0.0)
    match = cache.match([1, 2, 3, 4])
    assert match is not None
    assert match.length == 3


def test_salts_do_not_see_each_other() -> None:
    cache = PrefixCache(1000)
    cache.add([1, 2, 3], 0.0, salt="a")
    assert cache.match([1, 2, 3, 4], salt="b") is None
    assert cache.match([1, 2, 3, 4], salt="a") is not None


def test_shared_cells_are_counted_once_and_freed_with_their_last_entry() -> None:
    cache = PrefixCache(1000, copies=False)
    cache.add([1, 2, 3, 4], 0.0)
    cache.add([1, 2, 3, 4, 5, 6], 1.0)
    cache.add([1, 2, 7], 2.0)
    assert cache.tokens == 7
    # The oldest entry has another one below it: dropping it would free nothing.
    victims = cache.victims(1)
    assert [victim.length for victim in victims] == [6]
    for victim in cache.victims(100):
        cache.remove(victim)
        cache.check()
    assert (len(cache), cache.tokens) == (0, 0)


Prefixes = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12)


@given(Prefixes, st.lists(st.integers(0, 11), max_size=12), st.booleans(), st.data())
def test_the_tree_agrees_with_a_plain_table(
    prefixes: list[list[int]], removals: list[int], copies: bool, data: st.DataObject
) -> None:
    cache = PrefixCache(1000, copies=copies)
    kept: dict[tuple[int, ...], Entry] = {}
    for now, tokens in enumerate(prefixes):
        entry = cache.add(tokens, float(now))
        assert (entry is None) == (tuple(tokens) in kept)
        if entry is not None:
            kept[tuple(tokens)] = entry
        cache.check()
    for _ in removals:
        victims = cache.victims(1)
        if victims and data.draw(st.booleans()):
            freed_from = cache.tokens
            for victim in victims:
                cache.remove(victim)
                kept = {tokens: e for tokens, e in kept.items() if e is not victim}
            assert cache.tokens < freed_from
            cache.check()
    for prompt in prefixes:
        prompt = [*prompt, 0]
        best = max((common_length(tokens, prompt) for tokens in kept), default=0)
        best = min(best, len(prompt) - 1)
        match = cache.match(prompt)
        assert (match.length if match else 0) == best
        if match:
            held = next(tokens for tokens, e in kept.items() if e is match.entry)
            assert list(held[:best]) == prompt[:best]
