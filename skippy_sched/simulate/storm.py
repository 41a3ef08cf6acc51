"""Whole-system runs from one seed: random traffic, faults, cancellations; checked throughout.

``python -m skippy_sched.simulate.storm --seed N`` repeats a run. Knows what must always hold, not
how the scheduler brings it about.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skippy_sched.clock import random_generator
from skippy_sched.config import Config
from skippy_sched.errors import DeadlineExceeded, EngineFailure, QueueFull
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.grammar import grammars_of
from skippy_sched.scheduler.iteration import Chunk, Verify
from skippy_sched.scheduler.loading import open_model
from skippy_sched.scheduler.plan import Wait
from skippy_sched.scheduler.request import Request, RequestParams, Status, TokenLogprobs
from skippy_sched.simulate.alone import alone, continue_alone
from skippy_sched.simulate.driver import Step, VirtualEngine

#: What a native call can do wrong without hanging or ending the process.
FAULTS = (
    "call=iteration status=RUNTIME_ERROR when=before",
    "call=iteration status=RUNTIME_ERROR when=after",
    "call=iteration status=RUNTIME_ERROR when=middle index=1",
    "call=iteration status=INVALID_ARGUMENT index=0",
    "call=iteration status=RUNTIME_ERROR lane=0",
    "call=iteration effect=wrong_count",
    "call=iteration effect=duplicate_index",
    "call=iteration effect=index_out_of_range",
    "call=iteration effect=token_out_of_range",
    "call=iteration effect=fewer_samples",
    "call=iteration effect=position_off_by_one",
    "call=iteration effect=silent_drop",
    "call=iteration effect=no_error_object",
    "call=iteration effect=hang_ms:500",
    "call=session_create status=RUNTIME_ERROR",
    "call=reset status=RUNTIME_ERROR",
    "call=trim status=RUNTIME_ERROR",
    "call=save_prefix status=RUNTIME_ERROR",
    "call=restore_prefix status=RUNTIME_ERROR",
    "call=export_state status=RUNTIME_ERROR",
    "call=import_state status=RUNTIME_ERROR",
)
#: The same of a verify, and of cutting back what it computed too much.
VERIFY_FAULTS = (
    "call=verify status=RUNTIME_ERROR when=before",
    "call=verify status=RUNTIME_ERROR when=after",
    "call=verify status=RUNTIME_ERROR when=middle",
    "call=verify effect=wrong_count",
    "call=verify effect=token_out_of_range",
    "call=verify effect=fewer_samples",
    "call=verify effect=position_off_by_one",
    "call=verify effect=silent_drop",
    "call=trim status=RUNTIME_ERROR when=after",
    "call=trim status=RUNTIME_ERROR when=middle",
    "call=retire status=RUNTIME_ERROR",
)
#: The simulated engine's tokens before and after an answer that a prompt holds.
SCRIPT, END = 258, 259
#: What some answers have to be: short enough to be complete, or to be cut in the midst.
SCHEMA = {"type": "array", "items": {"enum": [1, "two", None, 44]}, "minItems": 2}
TENANTS = ("red", "green", "blue")
#: Turns of the loop per token that has to be computed; more means that it goes round in circles.
STEPS_PER_TOKEN_MAX = 40


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a seed decides before the run begins."""

    config: dict[str, Any]
    spec: list[str]
    faults: list[str]
    requests: int

    @classmethod
    def draw(cls, rng: random.Random, drafts: random.Random) -> Scenario:
        """``drafts`` decides on speculation, so that a seed's other choices do not hang on it."""
        lanes = rng.choice((1, 2, 3, 4, 8))
        context = rng.choice((48, 96, 200))
        shared = rng.random() < 0.6
        spec = [
            "clock = virtual",
            f"cost_fixed_us = {rng.choice((0, 500, 5000))}",
            f"cost_token_us = {rng.choice((1, 50, 1000))}",
            f"cost_sequence_us = {rng.choice((0, 100))}",
            f"eos_per_mille = {rng.choice((0, 0, 30))}",
            f"seed = {rng.randrange(1000)}",
        ]
        if shared and rng.random() < 0.7:
            # Down to little more than what one request may need.
            spec.append(
                f"pool_cells = {rng.randrange(context + lanes, context * lanes + lanes + 1)}"
            )
        scheduler: dict[str, Any] = {
            "waiting_requests_max": rng.choice((3, 20, 100)),
            "waiting_tokens_max": rng.choice((200, 100_000)),
            "aging_s": rng.choice((0.05, 1.0, 30.0)),
            "tenant_weights": rng.choice(({}, {"red": 3.0, "blue": 0.5})),
            "inter_token_target_ms": rng.choice((None, 1.0, 20.0)),
            "prefix_cache_tokens": rng.choice((0, context, 4 * context)),
            "prefix_cache_per_tenant": rng.random() < 0.3,
            "preemption": rng.choice(("auto", "swap", "recompute")),
        }
        faults = []
        if rng.random() < 0.5:
            faults = [
                f"{rule} probability_per_mille={rng.choice((5, 50, 300))} count=0"
                for rule in rng.sample(FAULTS, rng.randrange(1, 4))
            ]
        config = {
            "engine": {
                "lanes": lanes,
                "context_tokens": context,
                "batch_tokens": rng.choice((lanes, lanes + 5, 64)),
                "kv": "shared" if shared else "per_lane",
            },
            "scheduler": scheduler,
        }
        if drafts.random() < 0.5:
            config["speculation"] = {
                "method": drafts.choice(("ngram", "mtp")),
                "draft_tokens": drafts.randrange(1, 9),
                "requests_max": drafts.choice((1, 2, 8)),
            }
            spec += [
                f"mtp_heads = {drafts.choice((1, 3, 8))}",
                f"mtp_wrong_every = {drafts.choice((0, 2, 7))}",
            ]
            if faults:
                rule, often = drafts.choice(VERIFY_FAULTS), drafts.choice((5, 50, 300))
                faults.append(f"{rule} probability_per_mille={often} count=0")
        return cls(config, spec, faults, rng.randrange(5, 40))


@dataclass(slots=True)
class Told:
    """What one client knows: its prompt, its answer so far, how it ended."""

    request: Request
    prompt: list[int]
    cancel_at: float | None
    stop_after: int | None
    pause_chance: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: bool = False


class Storm:
    """One run. ``run`` raises AssertionError where something does not hold."""

    def __init__(self, seed: int, folder: Path, library: str = "sim") -> None:
        self.rng = rng = random_generator(seed)
        self.drafts = random_generator(seed + 2**32)
        self.scenario = Scenario.draw(rng, self.drafts)
        path = folder / f"storm-{seed}.sim"
        self._reference = folder / f"alone-{seed}.sim"
        spec = ["skippy-sim 1", *self.scenario.spec]
        self._reference.write_text("\n".join(spec) + "\n")
        path.write_text("\n".join([*spec, *(f"fault = {rule}" for rule in self.scenario.faults)]))
        given = {**self.scenario.config, "model": {"path": str(path)}}
        given["engine"] = {**given["engine"], "library": library}
        config = Config.model_validate(given)
        self.config = config
        self.model = open_model(config)
        self.engine = VirtualEngine(config, self.model, seed=seed)
        self.told: dict[int, Told] = {}
        self.grammar = grammars_of(self.model).compile_schema(SCHEMA)
        self.prefixes = [self._tokens(rng.randrange(1, 120)) for _ in range(3)]
        self.refused = 0
        self.tokens_wanted = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 256) for _ in range(count)]

    def _scripted(self, room: int) -> list[int]:
        """A prompt whose answer repeats itself, so that lookups find drafts, right and wrong."""
        rng = self.drafts
        parts = [self._tokens_of(rng, rng.randrange(1, 5)) for _ in range(3)]
        answer: list[int] = []
        while len(answer) < rng.randrange(1, 40):
            answer += rng.choice(parts)
        answer = answer[: max(0, room - 2)]
        return [SCRIPT, *answer, END][-room:]

    @staticmethod
    def _tokens_of(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(1, 256) for _ in range(count)]

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run()
            self._check_end()
            self._check_texts()
        finally:
            self.engine.runner.close()

    def _run(self) -> None:
        rng, engine = self.rng, self.engine
        scheduler, clock = engine.scheduler, engine.clock
        left, next_at = self.scenario.requests, 0.0
        steps = 0
        while True:
            while left and next_at <= clock.now():
                self._submit(next_at)
                left -= 1
                next_at += rng.choice((0.0, 0.001, 0.02, 0.3))
            self._disturb()
            step = engine.step()
            self._tell(step)
            self._check(step)
            steps += 1
            limit = STEPS_PER_TOKEN_MAX * (self.tokens_wanted + 100)
            assert steps < limit, f"no end after {steps} steps"
            if step.iteration is not None or step.ended:
                continue
            if self._resume_all():
                continue
            times = [] if not left else [next_at]
            if scheduler.next_deadline_at is not None:
                times.append(scheduler.next_deadline_at)
            times += [t.cancel_at for t in self._live() if t.cancel_at is not None]
            if left or any(self._live()):
                if not times:
                    engine.check_alive()
                clock.advance_to(min(times))
                clock.advance(1e-6)
            else:
                return

    def _live(self) -> Iterator[Told]:
        return (told for told in self.told.values() if not told.ended)

    def _submit(self, now: float) -> None:
        rng, context = self.rng, self.engine.context_tokens
        prompt = rng.choice(self.prefixes)[: rng.randrange(120)] if rng.random() < 0.6 else []
        prompt = (prompt + self._tokens(rng.choice((1, 3, 20, 90))))[: context - 1]
        if self.config.speculation.method != "off" and self.drafts.random() < 0.6:
            prompt = self._scripted(context // 2)
        room = context - len(prompt)
        sampling = SamplingConfig()
        if rng.random() < 0.3:
            sampling = SamplingConfig(enabled=True, temperature=0.9, seed=rng.randrange(1, 99))
        grammar = self.grammar if rng.random() < 0.2 else None
        logprobs = rng.choice((None, None, None, 0, 3))
        params = RequestParams(
            max_tokens=rng.choice((None, 1, min(room, rng.randrange(1, 60)))),
            sampling=sampling,
            ignore_eos=grammar is None and rng.random() < 0.3,
            logprobs=logprobs,
            prompt_logprobs=logprobs is not None and rng.random() < 0.5,
            grammar=grammar,
            tenant=rng.choice(TENANTS),
            priority=rng.choice((-1, 0, 0, 0, 2)),
            timeout_s=rng.choice((None, None, None, 0.01, 1.0)),
        )
        request = self.engine.intake.request(list(prompt), params, None, now)
        state = self.engine.scheduler.state
        before = (len(state.waiting), state.waiting.tokens, state.totals.accepted)
        try:
            self.engine.scheduler.submit(request)
        except QueueFull:
            self.refused += 1
            assert before == (len(state.waiting), state.waiting.tokens, state.totals.accepted)
            return
        self.tokens_wanted += request.token_limit
        self.told[request.key] = Told(
            request,
            prompt,
            now + rng.choice((0.0, 0.01, 0.5)) if rng.random() < 0.15 else None,
            rng.randrange(1, 20) if rng.random() < 0.15 else None,
            rng.choice((0.0, 0.0, 0.1)),
        )

    def _disturb(self) -> None:
        """Clients go away, stop reading, or read on."""
        scheduler, now = self.engine.scheduler, self.engine.clock.now()
        for told in self._live():
            if told.cancel_at is not None and told.cancel_at <= now:
                scheduler.cancel(told.request)
            if told.request.status is Status.DECODE and told.pause_chance:
                if told.request.paused:
                    told.request.paused = self.rng.random() > 0.3
                else:
                    told.request.paused = self.rng.random() < told.pause_chance

    def _resume_all(self) -> bool:
        paused = [told.request for told in self._live() if told.request.paused]
        for request in paused:
            request.paused = False
        return bool(paused)

    def _tell(self, step: Step) -> None:
        """As the engine tells streams: tokens, then stops that the text brings, then ends."""
        ended = list(step.ended)
        if step.reconciled is not None:
            for request, token in step.reconciled.tokens:
                told = self.told[request.key]
                assert not told.ended, f"a token for {request} after its end"
                told.tokens.append(token)
                if request.params.logprobs is not None:
                    told.logprobs.append(step.reconciled.logprobs[request.key])
                stopped = told.stop_after is not None and len(told.tokens) >= told.stop_after
                if stopped and not request.status.is_final:
                    assert self.engine.scheduler.stop(request, "stop", step.now)
                    ended.append(request)
            for request, run in step.reconciled.runs:
                if self._tell_run(request, run, step.now):
                    ended.append(request)
            ended += step.reconciled.ended
        for request in dict.fromkeys(ended):
            told = self.told[request.key]
            assert not told.ended, f"{request} was answered twice"
            assert request.status.is_final
            told.ended = True

    def _tell_run(self, request: Request, run: Sequence[int], now: float) -> bool:
        """Several tokens at once; whether the text stops among them. Those behind do not count."""
        told = self.told[request.key]
        assert not told.ended, f"tokens for {request} after its end"
        room = len(run) if told.stop_after is None else told.stop_after - len(told.tokens)
        told.tokens += run[:room]
        if room > len(run) or told.stop_after is None:
            return False
        return self.engine.scheduler.stop(request, "stop", now, len(run) - room)

    # --- what must hold ---------------------------------------------------------------------------

    def _check(self, step: Step) -> None:
        """After each step."""
        state = self.engine.scheduler.state
        state.check()
        sessions = self.model.sessions
        assert len(sessions) <= self.model.facts.lane_count
        # Those that are reset or freed ahead of the next batch may still be anywhere.
        commanded = {getattr(command, "key", None) for command in state.commands}
        running = (*state.decoding.values(), *state.prefilling.values())
        settled = [request for request in running if request.key not in commanded]
        assert len(settled) <= len(sessions) <= len(settled) + len(state.commands)
        if len(sessions) == len(settled):
            assert all(session.token_count == session.position for session in sessions)
        missing = Counter(r.computed for r in settled) - Counter(s.position for s in sessions)
        assert not missing, f"no session is at {sorted(missing)}, where requests are"
        for told in self._live():
            assert not told.request.status.is_final, f"{told.request} ended unsaid"
            assert told.request.tokens == told.prompt + told.tokens
        if step.iteration is not None:
            self._check_iteration(step)
            self._check_order(step)

    def _check_iteration(self, step: Step) -> None:
        iteration, state = step.iteration, self.engine.scheduler.state
        assert iteration is not None
        chunks, verifies = iteration.chunks, iteration.verifies
        rows: list[Chunk | Verify] = [*chunks, *verifies]
        keys = [*iteration.decode_keys, *(row.key for row in rows)]
        assert len(keys) == len(set(keys)), "a session twice in an iteration"
        tokens = len(iteration.decode_keys) + sum(len(row.tokens) for row in rows)
        assert tokens <= state.limits.batch_tokens
        assert all(chunk.tokens for chunk in chunks), "an empty chunk"
        assert all(len(chunk.tokens) <= state.limits.chunk_tokens for chunk in chunks)
        speculation = self.config.speculation
        assert all(len(row.tokens) <= speculation.draft_tokens + 1 for row in verifies)
        if verifies:
            assert speculation.method != "off"
            assert len(keys) <= speculation.requests_max, "drafts among too many requests"

    def _check_order(self, step: Step) -> None:
        """Nobody is passed for ever: who comes ``k`` times ``aging_s`` after a waiting request of
        the same tenant, with a priority less than ``k`` above, never starts before it; and who
        has a priority ``k`` below has to have waited ``k`` times ``aging_s`` to go first.

        Between tenants the fair share decides. Those that wait for a prefix to share may be
        passed; the next plans let them go first.
        """
        state, plan = self.engine.scheduler.state, self.engine.scheduler.last_plan
        assert plan is not None
        aging_s = state.limits.aging_s
        for request, _ in plan.admit:
            if request.preemptions:
                continue
            for other in state.waiting:
                if other.tenant != request.tenant:
                    continue
                if other.key in plan.waits and plan.waits[other.key] is Wait.PREFIX:
                    continue
                if other.preemptions or other.restarts:
                    continue
                above = request.params.priority - other.params.priority
                late = request.arrived_at - other.arrived_at
                problem = f"{request} started before {other}, which came {late:.6f} s earlier"
                if above >= 0:
                    assert late < (above + 1) * aging_s + 1e-6, problem
                else:  # it has to have waited until it is level, and to have come first
                    assert request.planned_at is not None
                    waited = request.planned_at - request.arrived_at
                    assert late < 1e-6, problem
                    assert waited > -above * aging_s - 1e-6, problem

    def _check_end(self) -> None:
        """When all requests have ended, nothing is left behind."""
        scheduler, model = self.engine.scheduler, self.model
        state = scheduler.state
        assert state.live == 0
        assert state.lanes_free == state.limits.lanes
        assert scheduler.next_iteration(self.engine.clock.now()) is None, "work without requests"
        assert state.kv_tokens == state.cache.tokens
        assert not model.sessions
        totals = state.totals
        usages = [told.request.usage for told in self.told.values()]
        assert totals.accepted_tokens == sum(usage.accepted_draft_tokens for usage in usages)
        assert totals.generated_tokens == sum(usage.completion_tokens for usage in usages)
        drafted = sum(u.accepted_draft_tokens + u.rejected_draft_tokens for u in usages)
        assert totals.drafted_tokens == drafted
        assert totals.accepted == len(self.told)
        assert totals.finished + totals.cancelled + totals.failed == totals.accepted
        if not self.scenario.faults and model.facts.kv_unified:
            with model.create_session() as session:
                doubles = sum(entry.doubles for entry in state.cache.entries)
                held = session.memory_used_cells()
                assert state.cache.tokens - doubles <= held <= state.cache.tokens, "cells leaked"

    def _check_texts(self) -> None:
        """Each answer is the beginning of the text of its request alone, and ends rightly."""
        with alone(self._reference, self.config) as model:
            for told in self.told.values():
                request = told.request
                count = max(1, len(told.tokens))
                expected, of_prompt, logprobs = continue_alone(model, told.prompt, request, count)
                assert told.tokens == expected[: len(told.tokens)], (
                    f"{request} got another text than alone"
                )
                assert told.logprobs == logprobs[: len(told.logprobs)], request
                if told.tokens:
                    assert request.prompt_logprobs == of_prompt, request
                self._check_reason(told)

    def _check_reason(self, told: Told) -> None:
        request, tokens = told.request, told.tokens
        assert request.completion_tokens == len(tokens)
        if request.status is Status.FAILED:
            error = request.error
            assert isinstance(error, EngineFailure | DeadlineExceeded), error
            assert not isinstance(error, EngineFailure) or self.scenario.faults, error
        elif request.finish_reason == "stop":
            stop = tokens[-1] in request.stop_tokens
            assert stop or len(tokens) == told.stop_after
        elif request.finish_reason == "length":
            full = len(request.tokens) == request.token_limit
            assert full or request.stop_reason == "deadline"
        else:
            assert request.cancel_requested
        assert not request.stop_tokens.intersection(tokens[:-1])


def run_seed(seed: int, folder: Path, library: str = "sim") -> None:
    """Raises AssertionError whose message has the command that repeats the run."""
    try:
        Storm(seed, folder, library).run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"repeat it with: python -m skippy_sched.simulate.storm --seed {seed}"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--library", default="sim", help="a simulated libskippy")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        storm = Storm(options.seed, Path(folder), options.library)
        sys.stdout.write(f"{storm.scenario}\n")
        storm.run()
        sys.stdout.write(
            f"ok: {len(storm.told)} requests, {storm.refused} refused, "
            f"{storm.engine.scheduler.state.totals}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
