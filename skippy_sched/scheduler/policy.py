"""Who comes next: priorities that age, a fair share between tenants, then first come first served.

Order of the waiting requests, in three steps:

1. the higher priority class first; a request rises by one class for every ``aging_s`` it waits,
   up to the highest class that waits, so that this is reached in a bounded time and nobody
   starves (and ageing alone never decides between tenants of one class);
2. in a class, the tenant that has been served the fewest tokens for its weight (the virtual token
   counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024);
3. of one tenant, the request that was preempted, then the one that came first.

Knows requests and served tokens. Does not know lanes or cells: the planner takes as many as fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from skippy_sched.scheduler.request import Request


class FairShare:
    """Tokens served per tenant, divided by its weight: the virtual token counters."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        #: by tenant; whoever computes a token of an active tenant adds 1 / weight
        self.served: dict[str, float] = {}
        self._active: dict[str, int] = {}

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def enter(self, tenant: str) -> None:
        """A request of the tenant came. Time spent idle earns no credit: the counter is lifted."""
        if not self._active.get(tenant):
            least = min((self.served[name] for name in self._active), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._forget_old()

    def lane_shares(self, lanes: int) -> dict[str, float]:
        """How many of the lanes each active tenant may hold by its weight."""
        weights = {tenant: self.weight(tenant) for tenant in self._active}
        total = sum(weights.values())
        return {tenant: lanes * weight / total for tenant, weight in weights.items()}

    def _forget_old(self) -> None:
        """Idle tenants below everyone active would be lifted anyway; keep the table small."""
        if len(self.served) <= 2 * len(self._active) + 1000:
            return
        least = min((self.served[name] for name in self._active), default=float("inf"))
        self.served = {
            name: served
            for name, served in self.served.items()
            if name in self._active or served > least
        }


class WaitingQueue:
    """The waiting requests. Adding, removing and finding the next cost the same for any length."""

    def __init__(self, share: FairShare, aging_s: float) -> None:
        self._share = share
        self._aging_s = aging_s
        # Per priority and tenant: those preempted, and those that came, each in order.
        self._lines: dict[tuple[int, str], tuple[dict[int, Request], dict[int, Request]]] = {}
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """All of them, line by line."""
        for returned, fresh in self._lines.values():
            yield from returned.values()
            yield from fresh.values()

    def by_tenant(self) -> dict[str, int]:
        """How many of each tenant wait."""
        counts: dict[str, int] = {}
        for (_, tenant), (returned, fresh) in self._lines.items():
            counts[tenant] = counts.get(tenant, 0) + len(returned) + len(fresh)
        return counts

    def push(self, request: Request, *, returned: bool = False) -> None:
        """``returned``: it was preempted and goes before those of its tenant that only came."""
        line = (request.params.priority, request.tenant)
        pair = self._lines.setdefault(line, ({}, {}))
        table = pair[0] if returned else pair[1]
        assert request.key not in table
        table[request.key] = request
        self._count += 1
        self.tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        line = (request.params.priority, request.tenant)
        returned, fresh = self._lines[line]
        table = returned if request.key in returned else fresh
        del table[request.key]
        if not returned and not fresh:
            del self._lines[line]
        self._count -= 1
        self.tokens -= len(request.tokens)

    def in_order(self, now: float) -> Iterator[Request]:
        """From the next one on; what is taken counts as served within this one pass.

        The queue must not change while the iterator is in use.
        """
        taken: dict[str, float] = {}
        highest = max((priority for priority, _ in self._lines), default=0)
        heads: list[tuple[int, float, float, int, Request, Iterator[Request]]] = []

        def add(request: Request, line: Iterator[Request]) -> None:
            tenant = request.tenant
            risen = int((now - request.arrived_at) / self._aging_s)
            served = self._share.served[tenant] + taken.get(tenant, 0.0)
            priority = min(request.params.priority + risen, highest)
            rank = (-priority, served, request.arrived_at, request.key, request, line)
            heapq.heappush(heads, rank)

        for returned, fresh in self._lines.values():
            line = _chain(returned, fresh)
            add(next(line), line)
        while heads:
            _, served, _, _, request, line = heapq.heappop(heads)
            tenant = request.tenant
            if served < self._share.served[tenant] + taken.get(tenant, 0.0):
                add(request, line)  # its tenant was served in this pass, from another line
                continue
            yield request
            cost = request.prompt_tokens / self._share.weight(tenant)
            taken[tenant] = taken.get(tenant, 0.0) + cost
            following = next(line, None)
            if following is not None:
                add(following, line)


def _chain(returned: dict[int, Request], fresh: dict[int, Request]) -> Iterator[Request]:
    yield from returned.values()
    yield from fresh.values()
