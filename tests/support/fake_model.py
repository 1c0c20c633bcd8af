"""A stand-in for the model: a Markov table over a small vocabulary, with the model's whole surface.

The logits after a token depend on that token alone, so that every distribution is known in closed form. Sequences
really are positions, pages and slots, and the model checks that it is driven as the real one demands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS, PageAllocator
from leadline.errors import CapacityError
from leadline.model.step import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """The fields of ModelConfig that the engine reads."""

    vocab_size: int = 13
    hidden_size: int = 1
    max_position_embeddings: int = 4096
    dspark_block_size: int = 5
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 3
    vision: None = None


class FakeSequence:
    def __init__(self, cache: FakeCache, slot: int) -> None:
        self._cache = cache
        self.slot = slot
        self.is_open = True
        self.pages: list[int] = []
        self.token_ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def reserve_pages(self, length: int) -> None:
        self.pages += self._cache.pages.allocate(max(0, -(-length // PAGE_TOKENS) - len(self.pages)))

    def extend(self, token_ids: list[int]) -> None:
        self.reserve_pages(self.length + len(token_ids))
        self.token_ids += token_ids

    def truncate(self, length: int) -> None:
        assert 0 <= self.length - length <= MAX_ROLLBACK
        del self.token_ids[length:]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            for page in self.pages:
                self._cache.pages.release(page)
            self._cache.slots.append(self.slot)


class FakeCache:
    def __init__(self, *, max_tokens: int, max_sequences: int, max_step_tokens: int) -> None:
        self.pages = PageAllocator(-(-max_tokens // PAGE_TOKENS), "KV pages", "max_tokens")
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.slots = list(range(max_sequences))

    @property
    def num_free_slots(self) -> int:
        return len(self.slots)

    def open(self) -> FakeSequence:
        if not self.slots:
            raise CapacityError(f"sequence slots: all {self.max_sequences} in use")
        return FakeSequence(self, self.slots.pop())


@dataclass(slots=True)
class FakeStepOutput:
    logits: list[Tensor]

    @property
    def rows(self) -> Tensor:
        return torch.cat(self.logits)


@dataclass(slots=True)
class FakeDraftOutput:
    token_ids: Tensor
    logits: Tensor
    confidence: Tensor


@dataclass(slots=True)
class FakeModel:
    """`table_VV`, `draft_table`: logits f32 after each token, of the model and of its drafter.

    nan_after: a token whose successor's logits are NaN. steps: the run lengths of every step so far.
    """

    config: FakeConfig = field(default_factory=FakeConfig)
    seed: int = 0
    draft_noise: float = 1.0  # how far the drafter's table is from the model's
    has_draft: bool = True
    confidence: tuple[float, ...] = (0.0,) * 5  # the logits that the drafter reports, one a draft
    nan_after: int | None = None
    table: Tensor = field(init=False)
    draft_table: Tensor = field(init=False)
    steps: list[list[int]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.config.vocab_size, self.config.vocab_size)
        self.table = 2 * torch.randn(shape, generator=generator)
        self.draft_table = self.table + self.draft_noise * torch.randn(shape, generator=generator)

    def new_cache(
        self, *, max_tokens: int, max_sequences: int, max_step_tokens: int = 64, max_snapshots: int = 0
    ) -> FakeCache:
        assert not max_snapshots, "its rows have no bytes to keep"
        return FakeCache(max_tokens=max_tokens, max_sequences=max_sequences, max_step_tokens=max_step_tokens)

    def step(self, runs: list[Run], cache: FakeCache) -> FakeStepOutput:
        total = sum(len(run.token_ids) for run in runs)
        assert 0 < total <= cache.max_step_tokens, f"{total} tokens in a step of at most {cache.max_step_tokens}"
        logits = []
        for run in runs:
            sequence: Any = run.sequence
            ids = run.token_ids.tolist()
            assert sequence.is_open
            assert ids
            assert all(0 <= token_id < self.config.vocab_size for token_id in ids)
            start = sequence.length
            assert start <= run.logits_from
            sequence.extend(ids)
            logits.append(self._rows(self.table, ids[run.logits_from - start :]))
        self.steps.append([len(run.token_ids) for run in runs])
        self.runs += runs
        return FakeStepOutput(logits)

    def draft(
        self,
        cache: FakeCache,
        sequences: list[FakeSequence],
        anchor_ids: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> FakeDraftOutput:
        assert self.has_draft
        assert all(sequence.is_open and sequence.length for sequence in sequences)
        ids, logits = [anchor_ids], []
        for i in range(self.config.dspark_block_size):
            logits.append(self._rows(self.draft_table, ids[-1].tolist()))
            ids.append(choose(i, logits[-1]))
        token_ids_BL = torch.stack(ids[1:], dim=1)
        confidence_BL = torch.tensor([self.confidence] * len(sequences))
        return FakeDraftOutput(token_ids_BL, torch.stack(logits, dim=1), confidence_BL)

    def _rows(self, table_VV: Tensor, ids: list[int]) -> Tensor:
        rows_NV = table_VV[torch.tensor(ids, dtype=torch.int64)].clone()
        for row, token_id in enumerate(ids):
            if token_id == self.nan_after:
                rows_NV[row, 0] = float("nan")
        return rows_NV
