"""A running engine's sequences and where their rows are: slots, pages, and what the prefix cache keeps of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.prefix import PrefixCache
from leadline.engine.request import Request
from leadline.engine.sampler import Sampler
from leadline.engine.scheduler import Entry
from leadline.engine.text_stream import TextStream
from leadline.errors import CapacityError
from leadline.model.step import Prefill
from leadline.text.grammar import Matcher

SNAPSHOT_TOKENS = 4096  # a long prompt can be resumed at every multiple


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Entry):
    """One sequence from arrival to its last token.

    token_ids, cache_ids: all that is known, prompt and answer; the last token of an answer is not processed yet.
    """

    ticket: int
    sample: int
    request: Request
    prompt_length: int
    token_ids: array[int]
    cache_ids: array[int]
    sampler: Sampler
    text: TextStream | None
    matcher: Matcher | None
    stop_ids: frozenset[int]
    eos_id: int
    max_tokens: int
    use_cache: bool
    sequence: Any = None  # while running
    keep_from: int | None = None
    cached_tokens: int | None = None  # of the first admission
    refused_at: tuple[int, ...] | None = None  # what there was when it did not fit

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length


class Room:
    """The scheduler's host. cached_tokens: what first admissions found in the prefix cache, all together."""

    def __init__(self, cache: Any, prefix: PrefixCache | None, prefill: Prefill) -> None:
        self.cached_tokens = 0
        self._cache = cache
        self._prefix = prefix
        self._prefill = prefill

    @property
    def num_available(self) -> int:
        """Pages that are free or could be made so."""
        num_free: int = self._cache.pages.num_free
        return num_free if self._prefix is None else self._prefix.pages.num_available

    def admit(self, entry: Job) -> bool:
        state = self._state()
        if not self._cache.num_free_slots or entry.refused_at == state:
            return False
        sequence = self._open(entry)
        if sequence is None:
            entry.refused_at = state
            return False
        entry.sequence, entry.refused_at = sequence, None
        entry.computed = sequence.length
        if entry.cached_tokens is None:
            entry.cached_tokens = sequence.length
            self.cached_tokens += sequence.length
        return True

    def _state(self) -> tuple[int, ...]:
        """All that an admission depends on: while it stays the same a second try cannot end otherwise."""
        if self._prefix is None:
            return (self.num_available,)
        return (self.num_available, self._prefix.windows.num_available, self._prefix.clock)

    def _open(self, job: Job) -> Any:
        """A sequence with pages for the target and one token more, or None."""
        num_pages = _pages(job.target + 1)
        if self._prefix is None or not job.use_cache:
            if not self._make_room(num_pages):
                return None
            sequence = self._cache.open()
        else:
            # After a preemption all that is known is a prompt, except under replay, where the prompt's length matters.
            known = job.prompt_length if self._prefill == "replay" else job.target
            border = self._prefix.last_border(known)
            job.keep_from = max(0, border - PAGE_TOKENS)
            try:
                sequence, hit = self._prefix.open(
                    job.cache_ids[:known], limit=known, keep_from=job.keep_from, num_pages=num_pages
                )
            except CapacityError:
                return None
            cuts = {*range(SNAPSHOT_TOKENS, known, SNAPSHOT_TOKENS), hit.branch}
            if self._prefill == "replay" or known % PAGE_TOKENS == 0:  # else the prompt's end serves its next time
                cuts.add(border)
            job.cuts = sorted(cut for cut in cuts if cut > sequence.length)
        sequence.reserve_pages(job.target + 1)
        return sequence

    def reserve(self, entry: Job, length: int) -> bool:
        need = _pages(length) - len(entry.sequence.pages)
        if need <= 0:
            return True
        if not self._make_room(need):
            return False
        entry.sequence.reserve_pages(length)
        return True

    def _make_room(self, num_pages: int) -> bool:
        return num_pages <= self._cache.pages.num_free or (
            self._prefix is not None and self._prefix.make_room(num_pages, 0)
        )

    def evict(self, entry: Job) -> None:
        self.close(entry)
        if entry.num_generated:
            entry.target = len(entry.token_ids) - 1
        entry.computed = 0

    def remember(self, job: Job) -> None:
        """Make what is processed of a prompt known to the prefix cache; windows where a chunk had to end and at the
        last border."""
        if self._prefix is None or not job.use_cache:
            return
        length = job.sequence.length
        self._prefix.insert(job.sequence, job.cache_ids)
        if length in job.cuts or length >= job.target:
            self._snapshot(job)

    def _snapshot(self, job: Job) -> None:
        assert self._prefix is not None
        border = job.sequence.length // PAGE_TOKENS * PAGE_TOKENS
        if border:
            self._prefix.snapshot(job.sequence, job.cache_ids, border)

    def close(self, job: Job, *, keep: bool = True) -> None:
        """Give back what a sequence holds. keep: the prefix cache keeps what it can."""
        if job.sequence is None:
            return
        if keep and self._prefix is not None and job.use_cache:
            self._prefix.insert(job.sequence, job.cache_ids)
            self._snapshot(job)
        job.sequence.close()
        job.sequence = None


def _pages(length: int) -> int:
    return -(-length // PAGE_TOKENS)
