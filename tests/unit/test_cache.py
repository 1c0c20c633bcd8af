"""Pages and sequences against a twin that recomputes everything from the lengths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS, PageAllocator
from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.config.layers import plan_layers
from leadline.config.model import read_config
from leadline.errors import CapacityError, RequestError

pytestmark = pytest.mark.unit

CONFIG = read_config(Path(__file__).parent.parent / "golden" / "models" / "everything" / "config.json")


@pytest.mark.parametrize("seed", range(5))
def test_allocator_against_reference_counts(seed: int) -> None:
    rng = random.Random(seed)
    allocator, counts = PageAllocator(13, "pages", "max_tokens"), [0] * 13
    for _ in range(400):
        held = [p for p in range(13) if counts[p]]
        action = rng.choice(("allocate", "share", "release", "release"))
        if action == "allocate":
            want, free = rng.randrange(5), counts.count(0)
            if want > free:
                with pytest.raises(CapacityError, match="max_tokens"):
                    allocator.allocate(want)
            else:
                pages = allocator.allocate(want)
                assert len(set(pages)) == want
                assert all(counts[p] == 0 for p in pages)
                for p in pages:
                    counts[p] = 1
        elif held:
            page = rng.choice(held)
            if action == "share":
                allocator.share(page)
                counts[page] += 1
            else:
                allocator.release(page)
                counts[page] -= 1
        assert allocator.num_free == counts.count(0)


def live_window_entries(cache: KVCache, longest: int, room: int) -> list[int]:
    """Pages of the window that a sequence whose length was at most `longest` must hold, with room for `room`."""
    oldest = max(0, longest - max(cache.window, PAGE_TOKENS) - MAX_ROLLBACK)
    return list(range(oldest // PAGE_TOKENS, -(-room // PAGE_TOKENS)))


@pytest.mark.parametrize("seed", range(5))
def test_sequences_against_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    cache = KVCache(CONFIG, plan_layers(CONFIG), max_tokens=1280, max_sequences=3, max_step_tokens=256)
    totals = (cache.pages.num_free, cache.window_pages.num_free)
    twins: dict[Sequence, list[int]] = {}  # length, longest, room
    for _ in range(300):
        action = rng.choice(("open", "step", "step", "step", "refused", "truncate", "close"))
        if action == "open":
            if len(twins) == 3:
                with pytest.raises(CapacityError, match="slots"):
                    cache.open()
            else:
                twins[cache.open()] = [0, 0, 0]
        elif twins:
            seq = rng.choice(list(twins))
            twin = twins[seq]
            if action in ("step", "refused"):
                length = twin[0] + rng.choice((1, 1, 8, 60, 150))
                try:
                    seq.reserve(length)
                    if action == "step":
                        seq.advance(length)
                        twins[seq] = [length, max(length, twin[1]), max(length, twin[2])]
                    else:
                        seq.trim()
                        twin[2] = twin[0]
                except CapacityError:
                    pass  # unchanged, as checked below
            elif action == "truncate":
                back = rng.randrange(MAX_ROLLBACK + 3)
                if back > MAX_ROLLBACK or back > twin[0]:
                    with pytest.raises(RequestError):
                        seq.truncate(twin[0] - back)
                else:
                    seq.truncate(twin[0] - back)
                    twin[0] -= back
            else:
                seq.close()
                del twins[seq]
        pages: list[int] = []
        window_pages: list[int] = []
        for seq, (length, longest, room) in twins.items():
            assert seq.length == length
            pages += seq.pages
            assert len(seq.pages) == -(-room // PAGE_TOKENS)
            for entry in live_window_entries(cache, longest, room):
                window_pages.append(seq.window_pages[entry])
            for ratio in (1, 2):
                expected = [
                    seq.pages[row * ratio // PAGE_TOKENS] * (PAGE_TOKENS // ratio) + row % (PAGE_TOKENS // ratio)
                    for row in range(len(seq.pages) * PAGE_TOKENS // ratio)
                ]
                assert seq.pool_rows(ratio).tolist() == expected
            start = max(0, length - cache.window)  # what a draft block looks back at
            rows = [seq.window_pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(start, length)]
            assert seq.window_rows(start, length).tolist() == rows
            assert -1 not in [row // PAGE_TOKENS for row in rows]
        assert len(set(pages)) == len(pages)
        assert len(set(window_pages)) == len(window_pages)
        assert cache.pages.num_free == totals[0] - len(pages)
        assert cache.window_pages.num_free == totals[1] - len(window_pages)
        assert cache.num_free_slots == 3 - len(twins)
        assert len({seq.slot for seq in twins}) == len(twins)
    for seq in twins:
        seq.close()
        seq.close()
    assert (cache.pages.num_free, cache.window_pages.num_free, cache.num_free_slots) == (*totals, 3)


def test_poison_reads_as_nan() -> None:
    plan = plan_layers(CONFIG)
    cache = KVCache(CONFIG, plan, max_tokens=128, max_sequences=1, max_step_tokens=128, poison=True)
    for pool in (*cache.windows, *cache.compressed.values()):
        assert bool(pool.rows.gather(torch.arange(3)).isnan().any())
