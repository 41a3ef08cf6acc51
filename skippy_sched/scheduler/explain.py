"""Why a request waits, or what it got: read from the last plan and the request's history.

Nothing here waits for the engine or changes anything. Finished requests are kept in a ring.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from skippy_sched.clock import Clock
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.history import Step, Where
from skippy_sched.scheduler.plan import Wait
from skippy_sched.scheduler.request import Request, Status

#: Ended requests that can still be explained; about a kilobyte each.
ENDED_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One request at one moment; instants in seconds on the engine's clock.

    ``waits_for`` None: it got all that it could use. ``queue_position`` is 1 for the next one,
    None for requests that do not wait; ``first_waits_for`` is what holds up the queue's first.
    ``start_in_s`` is predicted from the rate at which the queue drains, None before any is
    measured. ``computed_tokens`` are in the KV cache, or in host memory while swapped out.
    """

    request_id: str
    state: str
    tenant: str
    priority: int
    lane: int | None = None
    waits_for: Wait | None = None
    queue_position: int | None = None
    first_waits_for: Wait | None = None
    start_in_s: float | None = None
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    completion_tokens_max: int
    preemptions: int
    restarts: int
    finish_reason: str | None
    error: str | None
    arrived_at: float
    first_token_at: float | None
    ended_at: float | None
    seconds: dict[Where, float]
    chunks: int
    steps: tuple[Step, ...]
    steps_dropped: int


class Requests:
    """The live requests and the latest ended ones, by id.

    ``engine_is_lost``: the engine is being opened again, so nothing is planned.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.engine_is_lost = False
        self._scheduler = scheduler
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._ended: OrderedDict[str, Explanation] = OrderedDict()

    def add(self, request: Request) -> None:
        self._live[request.name] = request

    def on_end(self, request: Request) -> None:
        """Forget a request that has ended, but for what there is to say of it."""
        assert request.finished_at is not None
        del self._live[request.name]
        self._ended.pop(request.name, None)
        self._ended[request.name] = _describe(request, request.finished_at)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return self._live.get(request_id)

    def now(self) -> float:
        """The instant on the clock of all instants here."""
        return self._clock.now()

    def explain(self, request_id: str) -> Explanation | None:
        """None for a request that never was or ended long ago.

        Costs as much as there are requests waiting before it.
        """
        request = self.find(request_id)
        if request is None:
            return self._ended.get(request_id)
        now = self._clock.now()
        if request.status is not Status.WAITING:
            return _describe(request, now, waits_for=self._wait(request))
        return next(describe for other, describe in self._waiting(now) if other is request)()

    def explain_all(self, limit: int) -> list[Explanation]:
        """Running requests, waiting ones in their order, then ended ones, the latest first."""
        return list(islice(self._each(self._clock.now()), limit))

    def waiting_by_reason(self) -> Counter[str]:
        """How many wait for what, by the names of ``Wait`` in small letters."""
        waits = self._waits()
        found = Wait.ENGINE if self.engine_is_lost else None
        return Counter(
            (found or waits.get(request.key, Wait.QUEUE)).name.lower()
            for request in self._scheduler.state.waiting
        )

    def predicted_wait_s(self) -> float:
        """What a request that came now would wait for its lane; 0 with nobody before it."""
        waiting = len(self._scheduler.state.waiting)
        predicted = self._scheduler.drain_rate.start_in_s(waiting + 1)
        return predicted if waiting and predicted is not None else 0.0

    def waiting_by_tenant(self) -> dict[str, int]:
        return self._scheduler.state.waiting.by_tenant()

    def _each(self, now: float) -> Iterator[Explanation]:
        state = self._scheduler.state
        for request in (*state.decoding.values(), *state.prefilling.values()):
            yield _describe(request, now, waits_for=self._wait(request))
        for _, describe in self._waiting(now):
            yield describe()
        yield from reversed(self._ended.values())

    def _waiting(self, now: float) -> Iterator[tuple[Request, Callable[[], Explanation]]]:
        """The queue in order, each with what describes it."""
        waits = self._waits()
        first: Wait | None = None
        for position, request in enumerate(self._scheduler.state.waiting.in_order(now), start=1):
            if self.engine_is_lost:
                found = Wait.ENGINE
            else:
                # Who is first and was not looked at has come since the last plan.
                found = waits.get(request.key, Wait.PLAN if first is None else Wait.QUEUE)
            first = first or found
            yield (
                request,
                partial(
                    _describe,
                    request,
                    now,
                    waits_for=found,
                    queue_position=position,
                    first_waits_for=first if found is Wait.QUEUE else None,
                    start_in_s=self._scheduler.drain_rate.start_in_s(position),
                ),
            )

    def _wait(self, request: Request) -> Wait | None:
        """What a request with a lane waits for."""
        return Wait.CONSUMER if request.paused else self._waits().get(request.key)

    def _waits(self) -> dict[int, Wait]:
        plan = self._scheduler.last_plan
        return {} if plan is None else plan.waits


def _describe(
    request: Request,
    now: float,
    *,
    waits_for: Wait | None = None,
    queue_position: int | None = None,
    first_waits_for: Wait | None = None,
    start_in_s: float | None = None,
) -> Explanation:
    history = request.history
    return Explanation(
        request_id=request.name,
        state="paused" if history.where == "paused" else request.status.value,
        tenant=request.tenant,
        priority=request.params.priority,
        lane=request.lane if request.status in (Status.PREFILL, Status.DECODE) else None,
        waits_for=waits_for,
        queue_position=queue_position,
        first_waits_for=first_waits_for,
        start_in_s=start_in_s,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed or request.swapped_tokens,
        completion_tokens=request.completion_tokens,
        completion_tokens_max=request.token_limit - request.prompt_tokens,
        preemptions=request.preemptions,
        restarts=request.restarts,
        finish_reason=request.finish_reason,
        error=None if request.error is None else request.error.message,
        arrived_at=request.arrived_at,
        first_token_at=request.first_token_at,
        ended_at=request.finished_at,
        seconds=history.seconds_until(now),
        chunks=history.chunks,
        steps=tuple(history.steps),
        steps_dropped=history.steps_dropped,
    )
