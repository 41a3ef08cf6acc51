"""Special tokens steer the model; nobody reads them."""

from __future__ import annotations

from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams


async def test_a_special_token_that_is_generated_counts_and_is_not_shown(sim_config):
    async with Engine.open(sim_config()) as engine:
        bos = engine.facts.token_bos
        assert engine.vocabulary.special_text(bos)
        assert engine.vocabulary.piece(bos) == b""
        script = [258, *b"ab", bos, *b"c", 259]
        events = [e async for e in engine.generate(script, RequestParams(max_tokens=10))]
        assert "".join(event.text for event in events) == "abc"
        tokens = [token for event in events for token in event.token_ids]
        assert tokens == [*b"ab", bos, *b"c", engine.facts.token_eos]
        assert events[-1].usage.completion_tokens == 5
