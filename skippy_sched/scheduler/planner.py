"""Chooses the next iteration: a pure function of the state, the budget and the time.

Decodes first, so that no running stream ever waits for somebody's prompt; then the prompts that
have a lane, in the order of their admission; then new ones while lanes last. Prompts share what
the budget leaves: tokens of the native batch, and the time that running streams can spare.
Drafts take what is left after all that.
Does not change the state and does not talk to an engine.
"""

from __future__ import annotations

import math

from skippy_sched.scheduler.cost import Work, attended_by_chunk
from skippy_sched.scheduler.iteration import Chunk, Verify
from skippy_sched.scheduler.plan import Budget, Plan, Wait
from skippy_sched.scheduler.prefix_cache import PREFIX_TOKENS_MIN, Match, common_length
from skippy_sched.scheduler.request import Request, Status
from skippy_sched.scheduler.speculation import Speculation
from skippy_sched.scheduler.state import State

#: Prompts always advance by this many tokens, even if the decodes alone exceed the target.
PREFILL_TOKENS_MIN = 4
#: A request preempted that often is left alone while there is anybody else.
PREEMPTIONS_MAX = 3
#: Waiting requests looked at per plan: those behind one that waits for a prefix may pass it.
LOOK_AHEAD = 32
#: Free cells per running stream that a new prompt must leave, so that it isn't preempted at once.
HEADROOM_CELLS = 8


def plan(state: State, budget: Budget, now: float) -> Plan:
    return _Planner(state, budget, now).plan()


class _Planner:
    """One plan in the making: what is left of lanes, cells and budget."""

    def __init__(self, state: State, budget: Budget, now: float) -> None:
        self.state = state
        self.budget = budget
        self.now = now
        self.lanes = state.lanes_free
        pool = state.limits.pool_cells
        self.cells: int | None = None if pool is None else pool - state.kv_tokens
        self.evictable = state.cache.evictable_tokens if pool is not None else 0
        self.in_flight = 0
        if state.limits.groups > 1:  # otherwise nothing is under way while a plan is made
            running = (*state.decoding.values(), *state.prefilling.values())
            self.in_flight = sum(request.in_flight for request in running)
        if self.cells is not None:
            self.cells -= self.in_flight
        self.evict_tokens = 0
        self.left = 0
        self.left_s = 0.0
        self.prefilled = 0
        self.attended = 0
        self.decodes: list[Request] = []
        self.chunks: list[Chunk] = []
        self.verifies: list[Verify] = []
        self.admit: list[tuple[Request, Match | None]] = []
        self.preempted: dict[int, Request] = {}
        self.waits: dict[int, Wait] = {}

    def plan(self) -> Plan:
        for suspect in self.state.suspects.values():
            if not suspect.paused:
                return self.plan_suspect(suspect)
        self.choose_decodes()
        if self.cells is not None:
            self.make_room_for_decodes()
        self.attended = sum([request.computed for request in self.decodes])
        assert len(self.decodes) <= self.budget.tokens, "the token budget is at least the lanes"
        self.left = self.budget.tokens - len(self.decodes)
        prompts = len(self.state.prefilling) + min(len(self.state.waiting), self.lanes)
        self.left_s = self.budget.prefill_s(len(self.decodes), self.attended, prompts)
        self.choose_chunks()
        self.choose_admissions()
        rows = len(self.decodes)
        if self.state.speculation is not None:
            self.choose_drafts(self.state.speculation)
            rows = len(self.decodes) + sum(len(verify.tokens) for verify in self.verifies)
        return self.chosen(rows)

    def chosen(self, rows: int) -> Plan:
        work = Work(rows, self.prefilled, self.attended)
        return Plan(
            self.decodes,
            self.chunks,
            self.verifies,
            self.admit,
            list(self.preempted.values()),
            self.evict_tokens,
            self.waits,
            work,
        )

    def plan_suspect(self, suspect: Request) -> Plan:
        """After the engine was lost: one suspect at a time runs alone, everyone else waits.

        It is cleared by its first decode, so if the engine is lost again it was the one.
        """
        for request in (*self.state.decoding.values(), *self.state.prefilling.values()):
            if request is not suspect:
                self.waits[request.key] = Wait.SUSPECT
        self.left, self.left_s = self.budget.tokens, math.inf
        wanted = len(suspect.tokens) - suspect.computed
        while self.cells is not None and wanted > self.cells + self.evictable:
            victim = self.victim(but=suspect)
            if victim is None:
                break
            self.preempt(victim)
        if suspect.status is Status.WAITING:
            self.admit.append((suspect, None))
        if suspect.in_flight:
            self.waits[suspect.key] = Wait.OUTCOME
        elif suspect.status is Status.DECODE:
            self.decodes.append(suspect)
            self.attended = suspect.computed
        else:
            self.give(suspect, suspect.computed)
        return self.chosen(len(self.decodes))

    # --- running requests -------------------------------------------------------------------------

    def choose_decodes(self) -> None:
        decoding = self.state.decoding.values()
        self.decodes = [r for r in decoding if not (r.in_flight or r.paused)]
        if len(self.decodes) < len(decoding):
            for r in decoding:
                if r.in_flight or r.paused:
                    self.waits[r.key] = Wait.OUTCOME if r.in_flight else Wait.CONSUMER
        groups = self.state.limits.groups
        if groups > 1:
            self.keep_share(-(-len(self.state.decoding) // groups))

    def keep_share(self, rows: int) -> None:
        """Leave decodes for the iterations beside this one, those that had a token last."""
        if len(self.decodes) > rows:
            self.decodes.sort(key=lambda request: request.last_token_at or 0.0)
            for request in self.decodes[rows:]:
                self.waits[request.key] = Wait.GROUP
            del self.decodes[rows:]

    def choose_chunks(self) -> None:
        for request in self.state.prefilling.values():
            if request.in_flight:
                self.waits[request.key] = Wait.OUTCOME
            elif request.key not in self.preempted:
                self.give(request, request.computed)
        stuck = not (self.decodes or self.chunks or self.in_flight) and self.cells is not None
        while stuck and (victim := self.victim()) is not None:
            # Prompts alone have filled the pool: the latest makes way for the others.
            self.preempt(victim)
            for request in self.state.prefilling.values():
                if not request.in_flight and request.key not in self.preempted:
                    self.give(request, request.computed)
            stuck = not self.chunks

    def affordable(self, start: int) -> int:
        """Prompt tokens at positions ``start`` and up that budget and time have room for."""
        least = PREFILL_TOKENS_MIN - self.prefilled
        if self.budget.costs is None or self.left_s == math.inf:
            return self.left
        within = self.budget.costs.prefill_tokens_within(self.left_s, start)
        return min(self.left, max(within, least))

    def give(self, request: Request, computed: int) -> None:
        """As many of its next prompt tokens as budget and cells allow."""
        wanted = len(request.tokens) - computed
        given = min(wanted, self.affordable(computed), self.state.limits.chunk_tokens)
        following = None
        if wanted > 1 and request.scores_prompt:
            # Only the last row of a chunk puts out logits.
            given = min(given, 1)
            following = request.tokens[computed + 1]
        if self.cells is not None:
            room = max(0, self.cells + self.evictable)
            if given > room:
                given = room
                self.waits[request.key] = Wait.CELLS
            self.take_cells(given)
        if given < wanted:
            self.waits.setdefault(request.key, Wait.BUDGET)
        if given > 0:
            chunk = request.tokens[computed : computed + given]
            self.chunks.append(Chunk(request.key, computed, chunk, given == wanted, following))
            self.left -= given
            self.prefilled += given
            attended = attended_by_chunk(computed, given)
            self.attended += attended
            if self.budget.costs is not None:
                self.left_s -= self.budget.costs.prefill_s(given, attended)

    # --- drafts -----------------------------------------------------------------------------------

    def choose_drafts(self, speculation: Speculation) -> None:
        """Behind the decodes of few requests, with tokens and cells that nobody else could use.

        Each verify is a native call of its own, so with many requests a batch serves them better.
        """
        running = self.state.running - len(self.preempted) + len(self.admit)
        if running > speculation.requests_max:
            return
        for request in list(self.decodes):
            if not request.takes_drafts:
                continue
            # The verify brings one token more than it accepts.
            room = request.token_limit - len(request.tokens) - 1
            room = min(room, speculation.draft_tokens, self.left)
            if self.cells is not None:
                room = min(room, self.cells)
            draft = speculation.draft(request, room) if room > 0 else ()
            propose = speculation.draft_tokens if speculation.proposes else 0
            if not draft and not propose:
                continue
            self.decodes.remove(request)
            self.verifies.append(Verify(request.key, [request.tokens[-1], *draft], propose))
            self.left -= len(draft)
            self.attended += len(draft) * request.computed
            if self.cells is not None:
                self.cells -= len(draft)

    # --- memory -----------------------------------------------------------------------------------

    def take_cells(self, cells: int) -> bool:
        """Take cells of the shared pool, evicting saved prefixes where needed."""
        assert self.cells is not None
        missing = cells - self.cells
        if missing > self.evictable:
            return False
        if missing > 0:
            self.evict_tokens += missing
            self.evictable -= missing
            self.cells += missing
        self.cells -= cells
        return True

    def make_room_for_decodes(self) -> None:
        while not self.take_cells(len(self.decodes)):
            victim = self.victim()
            if victim is None:
                # A lone request fits the pool, or it would have been refused.
                assert self.decodes, "no cells for nobody"
                self.waits[self.decodes.pop().key] = Wait.CELLS
                continue
            self.preempt(victim)

    def victim(self, but: Request | None = None) -> Request | None:
        """Whom to preempt: paused ones first, then the lowest priority, then the latest.

        Those preempted often only if there is nobody else. The last one running only if it holds
        a saved prefix longer than what it uses of it: then that is what fills the pool.
        """
        running = [
            request
            for table in (self.state.decoding, self.state.prefilling)
            for request in table.values()
            if not request.in_flight and request.key not in self.preempted and request is not but
        ]
        if but is not None:
            return max(running, key=_dispensable, default=None)
        if len(running) + len(self.admit) < 2:
            return running[0] if running and running[0].entry is not None else None
        return max(running, key=_dispensable)

    def preempt(self, victim: Request) -> None:
        self.preempted[victim.key] = victim
        self.lanes += 1
        if victim in self.decodes:
            self.decodes.remove(victim)
        if self.cells is not None:
            self.cells += victim.computed - victim.shared_tokens

    # --- waiting requests -------------------------------------------------------------------------

    def choose_admissions(self) -> None:
        state = self.state
        if not len(state.waiting):
            return
        looked_at = 0
        reserved = self.cells_wanted_by_prompts()
        for request in state.waiting.in_order(self.now):
            looked_at += 1
            if looked_at > LOOK_AHEAD:
                break
            if self.lanes == 0 and not self.make_lane_for(request):
                self.waits[request.key] = Wait.LANE
                break
            if self.affordable(0) <= 0:
                self.waits[request.key] = Wait.BUDGET
                break
            if self.waits_for_prefix(request):
                self.waits[request.key] = Wait.PREFIX
                continue
            match = None
            if not (request.swapped_tokens or request.restarts or request.scores_prompt):
                match = state.cache.match(request.tokens, state.salt(request))
            if self.cells is not None:
                room = self.cells + self.evictable - reserved
                if match is not None and len(request.tokens) - match.length > room - _pinned(match):
                    match = None  # what it would be restored from takes the room it needs
                if match is not None:
                    self.evictable = max(0, self.evictable - _pinned(match))
                elif len(request.tokens) > room:
                    self.waits[request.key] = Wait.CELLS
                    break
            there = request.swapped_tokens or (match.length if match else 0)
            if self.cells is not None:
                if request.swapped_tokens:
                    self.take_cells(request.swapped_tokens)
                reserved += len(request.tokens) - there
            self.lanes -= 1
            self.admit.append((request, match))
            before = self.prefilled
            self.give(request, there)
            reserved -= self.prefilled - before

    def cells_wanted_by_prompts(self) -> int:
        """Cells that admitted prompts still need, and a few for each stream to go on."""
        if self.cells is None:
            return 0
        prompts = self.state.prefilling.values()
        wanted = sum(
            len(r.tokens) - r.computed - r.in_flight for r in prompts if r.key not in self.preempted
        )
        given = sum(len(chunk.tokens) for chunk in self.chunks)
        return wanted - given + HEADROOM_CELLS * len(self.decodes)

    def waits_for_prefix(self, request: Request) -> bool:
        """Whether a prompt being computed has more in common with it than what is saved."""
        cache = self.state.cache
        if not cache.tokens_max or request.swapped_tokens or request.restarts:
            return False
        if request.scores_prompt:
            return False  # it has to see all its tokens
        head = request.tokens[:PREFIX_TOKENS_MIN]
        if len(head) < PREFIX_TOKENS_MIN:
            return False
        salt = self.state.salt(request)
        others = [*self.state.prefilling.values(), *(admitted for admitted, _ in self.admit)]
        for other in others:
            if (
                other.key in self.preempted
                or other.prompt_tokens > cache.tokens_max
                or other.tokens[:PREFIX_TOKENS_MIN] != head
                or self.state.salt(other) != salt
            ):
                continue
            match = cache.match(request.tokens, salt)
            known = match.length if match else 0
            prompt = other.tokens[: other.prompt_tokens]
            if common_length(prompt, request.tokens) >= known + PREFIX_TOKENS_MIN:
                return True
        return False

    def make_lane_for(self, request: Request) -> bool:
        """Preempt for a request of strictly higher priority, or of a tenant short of its share.

        Equals never preempt each other, and no tenant is pushed below its own share, so that
        nothing is preempted to and fro.
        """
        priority = request.params.priority
        over = self.tenants_over_their_share(request.tenant)
        started = {chunk.key for chunk in self.chunks}
        victims = [
            other
            for table in (self.state.decoding, self.state.prefilling)
            for other in table.values()
            # first what nearly always says no: while a queue waits, this runs in every plan
            if (
                other.params.priority < priority
                or (over and other.params.priority == priority and other.tenant in over)
            )
            and not other.in_flight
            and other.preemptions < PREEMPTIONS_MAX
            and other.key not in self.preempted
            and other.key not in started
        ]
        if not victims:
            return False
        self.preempt(max(victims, key=_dispensable))
        return True

    def tenants_over_their_share(self, tenant: str) -> set[str]:
        """Tenants with a lane more than their share, if ``tenant`` has a lane less than its own."""
        shares = self.state.share.lane_shares(self.state.limits.lanes)
        if len(shares) < 2:
            return set()
        lanes = dict.fromkeys(shares, 0)
        for request, _ in self.admit:
            lanes[request.tenant] += 1
        for table in (self.state.decoding, self.state.prefilling):
            for request in table.values():
                if request.key not in self.preempted:
                    lanes[request.tenant] += 1
        if lanes[tenant] + 1 > shares[tenant]:
            return set()
        return {name for name, held in lanes.items() if held - 1 >= shares[name]}


def _pinned(match: Match) -> int:
    """Cells that can't be evicted any more once a request is restored from this entry."""
    return 0 if match.entry.users else match.entry.length + match.entry.doubles


def _dispensable(request: Request) -> tuple[bool, bool, int, float, int]:
    return (
        request.preemptions < PREEMPTIONS_MAX,
        request.paused,
        -request.params.priority,
        request.arrived_at,
        request.key,
    )
