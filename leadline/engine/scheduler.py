"""Which sequences get which tokens of the next step. Plain Python, no tensors: testable alone.

Order of a step, under a budget of tokens:
    1. every decoding sequence gets its newest token, so that no prompt ever holds up a running answer;
    2. prompts get the rest: half of it goes down the line, the other half to those with the fewest tokens left.
       The first half keeps a long prompt moving whatever arrives, the second lets short prompts pass it.
In line means by priority, then by arrival. A sequence that needs pages while none can be had takes those of the last in
line, which waits again and later goes on from what the prefix cache still has of it.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from leadline.errors import QueueFullError


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence as the scheduler sees it.

    target: tokens to process before the next answer token: the prompt, or all that was known when it was preempted.
    computed: tokens processed so far; from `target` on the sequence decodes. deadline: on the clock of `expire`.
    drafts: drafts to verify with a decoded token, as many as the budget has room for, or exactly so many if
    `is_exact`. cuts: positions, ascending, where a chunk of the prompt has to end. leader: a sequence with the same
    prompt; this one waits until that prompt is processed.
    """

    arrival: int
    target: int
    priority: int = 0
    deadline: float | None = None
    leader: Entry | None = None
    drafts: int = 0
    is_exact: bool = False
    computed: int = 0
    is_running: bool = False
    is_done: bool = False
    cuts: list[int] = field(default_factory=list)

    def __lt__(self, other: Entry) -> bool:
        return (self.priority, self.arrival) < (other.priority, other.arrival)

    @property
    def is_decoding(self) -> bool:
        return self.is_running and self.computed >= self.target


E = TypeVar("E", bound=Entry)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)


class Host(Protocol[E_contra]):
    """What the scheduler asks of the owner of the cache. Calls take effect at once."""

    def admit(self, entry: E_contra) -> bool:
        """Open the sequence with pages for its target and one token more, and set `computed` and `cuts` to what the
        prefix cache gave. False if slots or pages do not suffice; nothing has happened then."""

    def reserve(self, entry: E_contra, length: int) -> bool:
        """Pages for `length` tokens of a running sequence. False, and nothing happened, if they cannot be had."""

    def evict(self, entry: E_contra) -> None:
        """Close the sequence, keeping in the prefix cache what can be kept; set `target` to what it has to process when
        it comes back."""


@dataclass(slots=True)
class StepPlan(Generic[E]):
    """decode: sequences that get their newest token, in line, and how many drafts may be verified with it. prefill:
    sequences and the prompt tokens that each gets. preempted: wait again."""

    decode: list[tuple[E, int]] = field(default_factory=list)
    prefill: list[tuple[E, int]] = field(default_factory=list)
    preempted: list[E] = field(default_factory=list)

    @property
    def jobs(self) -> list[E]:
        """Those of the planned sequences that have not ended."""
        return [entry for entry, _ in (*self.decode, *self.prefill) if not entry.is_done]


class Scheduler(Generic[E]):
    """The waiting line, the running sequences, and the plan of each step.

    Args:
        max_step_tokens: budget of a step.
        max_waiting: most sequences that wait; None for no bound.
    """

    def __init__(self, host: Host[E], *, max_step_tokens: int, max_waiting: int | None = None) -> None:
        self._host = host
        self._max_step_tokens = max_step_tokens
        self._max_waiting = max_waiting
        self.waiting: list[E] = []  # in line
        self.running: list[E] = []  # in line
        self.num_preemptions = 0
        self._num_deadlines = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_room(self, count: int) -> None:
        """Raises QueueFullError if `count` more sequences would not fit into the waiting line."""
        if self._max_waiting is not None and len(self.waiting) + count > self._max_waiting:
            raise QueueFullError(
                f"queue: {len(self.waiting)} sequences wait and {count} more were asked for, at most "
                f"{self._max_waiting} may; try again later"
            )

    def add(self, entry: E) -> None:
        """Put a new sequence in line."""
        insort(self.waiting, entry)
        self._num_deadlines += entry.deadline is not None

    def remove(self, entry: E) -> None:
        """Forget a sequence that has ended, wherever it is. Its owner closes it. A second call does nothing."""
        if entry.is_done:
            return
        entry.is_done = True
        self._num_deadlines -= entry.deadline is not None
        (self.running if entry.is_running else self.waiting).remove(entry)
        entry.is_running = False

    def expire(self, now: float) -> list[E]:
        """Forget the sequences that are past their deadline. Their owner closes them before it plans the next step."""
        if not self._num_deadlines:
            return []
        expired = [e for e in (*self.running, *self.waiting) if e.deadline is not None and e.deadline <= now]
        for entry in expired:
            self.remove(entry)
        return expired

    def schedule(self) -> StepPlan[E]:
        """Plan the next step; admits and preempts as needed. Planned sequences have pages for their tokens."""
        plan = StepPlan[E]()
        budget = self._max_step_tokens
        decoding: list[E] = []
        for entry in list(self.running):
            tokens = 1 + (entry.drafts if entry.is_exact else 0)
            if entry.is_decoding and tokens <= budget and self._provide(entry, entry.computed + tokens, plan):
                decoding.append(entry)
                budget -= tokens
        if not plan.preempted:
            self._admit()
        decoded = set(decoding)
        prompts = [entry for entry in self.running if entry not in decoded and not entry.is_decoding]
        spare = budget // 2 if prompts else budget
        for entry in decoding:
            drafts = entry.drafts
            if not entry.is_exact:
                drafts = min(drafts, spare)
                if drafts and not self._host.reserve(entry, entry.computed + 1 + drafts):
                    drafts = 0  # not worth anybody's pages
                spare -= drafts
                budget -= drafts
            plan.decode.append((entry, drafts))
        plan.prefill = _shares(prompts, budget)
        return plan

    def _admit(self) -> None:
        """Admit from the head of the line. Who does not fit holds up those behind, or it might wait for ever."""
        skipped = 0
        while skipped < len(self.waiting):
            entry = self.waiting[skipped]
            if entry.leader is not None:
                leader = entry.leader
                if not leader.is_done and not leader.is_decoding:
                    skipped += 1
                    continue
                entry.leader = None
            if not self._host.admit(entry):
                return
            del self.waiting[skipped]
            entry.is_running = True
            insort(self.running, entry)

    def _provide(self, entry: E, length: int, plan: StepPlan[E]) -> bool:
        """Pages for `length` tokens, taken from the last in line if need be; False if that is the entry itself."""
        while entry.is_running:
            if self._host.reserve(entry, length):
                return True
            victim = self.running.pop()
            victim.is_running = False
            self._host.evict(victim)
            insort(self.waiting, victim)
            self.num_preemptions += 1
            plan.preempted.append(victim)
        return False


def _shares(prompts: list[E], budget: int) -> list[tuple[E, int]]:
    """How many tokens of the budget each prompt gets. `prompts` in line."""
    # Fewest tokens first among equals of one priority only: nobody goes past those that are more important.
    by_rest = sorted(prompts, key=lambda e: (e.priority, e.target - e.computed, e.arrival))
    given: dict[E, int] = {}
    for line, keep in ((prompts, budget // 2), (by_rest, 0)):
        for entry in line:
            if budget <= keep:
                break
            start = entry.computed + given.get(entry, 0)
            end = next((cut for cut in entry.cuts if cut > entry.computed), entry.target)
            count = min(budget - keep, end - start)
            if count > 0:
                given[entry] = given.get(entry, 0) + count
                budget -= count
    return list(given.items())
