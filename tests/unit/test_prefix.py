"""The prefix cache without a model: rows hold tags made of the tokens before them, so every byte can be checked."""

from __future__ import annotations

import gc
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from leadline.cache.host import NOWHERE, PageBytes
from leadline.cache.lru import EvictionQueue
from leadline.cache.pages import PAGE_TOKENS, PageAllocator
from leadline.cache.pool import KVCache, Plane, RowPool
from leadline.cache.prefix import Node, PrefixCache, Snapshot
from leadline.cache.sequence import Sequence
from leadline.config.layers import plan_layers
from leadline.config.model import read_config
from leadline.errors import CapacityError, CheckpointError, RequestError

pytestmark = pytest.mark.unit

CONFIG = read_config(Path(__file__).parent.parent / "golden" / "models" / "everything" / "config.json")
PLAN = plan_layers(CONFIG)


def new_cache(pages: int = 16, sequences: int = 4, snapshots: int = 4, step: int = 512) -> KVCache:
    return KVCache(
        CONFIG,
        PLAN,
        max_tokens=pages * PAGE_TOKENS,
        max_sequences=sequences,
        max_step_tokens=step,
        max_snapshots=snapshots,
        poison=True,
    )


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(-50, 1000), k=length)


def tags(ids: list[int], end: int) -> Tensor:
    """One byte per position, which depends on all tokens up to it and on the position, int64 [end]."""
    made, value = [], 0
    for position, token in enumerate(ids[:end]):
        value = zlib.crc32(b"%d:%d" % (position, token), value)
        made.append(value & 0xFF)
    return torch.tensor(made, dtype=torch.int64)


def rows_of(
    cache: KVCache, sequence: Sequence, start: int, first: int, end: int
) -> Iterator[tuple[RowPool, Tensor, Tensor, int]]:
    """(pool, rows, positions whose tags they hold, salt), global rows from `start` on and window rows from `first`."""
    for salt, (source, ratio) in enumerate(cache.ratios.items()):
        numbers = torch.arange(start // ratio, end // ratio)
        for add, pools in ((0, cache.compressed), (100, cache.keys)):
            yield pools[source], sequence.pool_rows(ratio)[numbers], numbers * ratio + ratio - 1, salt + add
    for layer, pool in enumerate(cache.windows):
        yield pool, sequence.window_rows(first, end), torch.arange(first, end), 200 + layer


def grow(cache: KVCache, sequence: Sequence, ids: list[int], length: int) -> None:
    """What a step does: room, rows, new length."""
    start, made = sequence.length, tags(ids, length)
    sequence.reserve(length)
    for pool, rows, positions, salt in rows_of(cache, sequence, start, start, length):
        pool.values[rows] = ((made[positions] + salt) % 256).byte()[:, None]
        pool.scales[rows] = ((made[positions] + salt + 1) % 256).byte()[:, None]
    sequence.advance(length)


def check_rows(cache: KVCache, sequence: Sequence, ids: list[int]) -> None:
    """All global rows, and the window that the next token looks at."""
    made, length = tags(ids, sequence.length), sequence.length
    for pool, rows, positions, salt in rows_of(cache, sequence, 0, max(0, length - cache.window), length):
        assert torch.equal(pool.values[rows], expand(made[positions] + salt, pool.values)), salt
        assert torch.equal(pool.scales[rows], expand(made[positions] + salt + 1, pool.scales)), salt


def expand(tags_N: Tensor, plane: Tensor) -> Tensor:
    return (tags_N % 256).byte()[:, None].expand(-1, plane.shape[1])


def check_counts(cache: KVCache, prefix: PrefixCache, sequences: list[Sequence]) -> None:
    """Every count of the cache and of the tree against one made from scratch."""
    nodes = list(prefix.root.walk())
    snapshots = [node.snapshot for node in nodes if node.snapshot is not None]
    pages = [0] * cache.pages.num_pages
    windows = [0] * cache.window_pages.num_pages
    for sequence in sequences:
        for page in sequence.pages:
            pages[page] += 1
        for page in sequence.window_pages:
            if page != NOWHERE:
                windows[page] += 1
    for counts, kept, allocator in (
        (pages, [n.page for n in nodes if n.page != NOWHERE], cache.pages),
        (windows, [s.page for s in snapshots if s.page != NOWHERE], cache.window_pages),
    ):
        assert len(set(kept)) == len(kept)
        for page in kept:
            counts[page] += 1
        assert counts == [allocator.ref_count(page) for page in range(len(counts))]
        assert allocator.num_free == counts.count(0)
        assert allocator.num_idle == sum(counts[page] == 1 for page in kept)
    for node in nodes:
        assert node.parent is not None
        assert (node.page == NOWHERE) == (node.data is not None)
        assert node.num_on_device == sum(child.page != NOWHERE for child in node.children.values())
        assert node.parent is prefix.root or node.parent.page != NOWHERE or node.page == NOWHERE
    for snapshot in snapshots:
        assert snapshot.node.snapshot is snapshot
        assert (snapshot.page == NOWHERE) == (snapshot.data is not None)
        above = [node.snapshot for node in snapshot.node.path()[:-1] if node.snapshot is not None]
        assert snapshot.above is (above[-1] if above else None)
        assert snapshot.below == {other for other in snapshots if other.above is snapshot}
    assert sum(s.page != NOWHERE for s in snapshots) <= prefix.max_snapshots
    held = sum(n.data is not None for n in nodes) * prefix.pages.bytes.num_bytes
    held += sum(s.data is not None for s in snapshots) * prefix.windows.bytes.num_bytes
    assert held == prefix.host.used <= prefix.host.max_bytes
    assert (prefix.num_nodes, prefix.num_snapshots) == (len(nodes), len(snapshots))


class Driver:
    """A cache with a prefix cache, and requests that run through it."""

    def __init__(self, *, host_bytes: int = 0, mode: Any = "halo", max_snapshots: int = 4, **sizes: int) -> None:
        self.cache = new_cache(snapshots=max_snapshots, **sizes)
        self.prefix = PrefixCache(self.cache, max_snapshots=max_snapshots, host_bytes=host_bytes, mode=mode)

    def length(self, ids: list[int]) -> int:
        return self.prefix.lookup(ids, limit=len(ids)).length

    def begin(self, ids: list[int]) -> Sequence:
        return self.prefix.open(ids, limit=len(ids))[0]

    def process(self, ids: list[int], *, snapshots: tuple[int, ...] | None = None) -> int:
        """One request from start to end; tokens that it did not process. snapshots: None = at its last border."""
        sequence, hit = self.prefix.open(ids, limit=len(ids))
        assert self.prefix.make_room(-(-len(ids) // PAGE_TOKENS) - len(sequence.pages), 0)
        borders = (len(ids) // PAGE_TOKENS * PAGE_TOKENS,) if snapshots is None else snapshots
        for end in sorted({*borders, len(ids)}):
            if end > sequence.length:
                grow(self.cache, sequence, ids, end)
            if end in borders and end:
                self.prefix.snapshot(sequence, ids, end)
        self.prefix.insert(sequence, ids)
        check_rows(self.cache, sequence, ids)
        sequence.close()
        check_counts(self.cache, self.prefix, [])
        return hit.length

    def evict_all(self) -> None:
        assert self.prefix.make_room(self.cache.pages.num_pages, self.cache.window_pages.num_pages)

    def check_empty(self) -> None:
        self.prefix.clear()
        for allocator in (self.cache.pages, self.cache.window_pages):
            assert (allocator.num_free, allocator.num_idle) == (allocator.num_pages, 0)
        assert self.cache.num_free_slots == self.cache.max_sequences


# Bytes of pages ------------------------------------------------------------------------------------------------------


def test_every_tensor_of_the_cache_is_moved_or_derived() -> None:
    cache = new_cache()
    listed = {plane.tensor.data_ptr(): plane.name for plane in (*cache.page_planes(), *cache.window_planes())}
    assert len(listed) == len(cache.page_planes()) + len(cache.window_planes())
    found: dict[int, str] = {}

    def search(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = name
        elif isinstance(value, dict):
            for key, inner in value.items():
                search(inner, f"{name}[{key}]")
        elif isinstance(value, list | tuple):
            for i, inner in enumerate(value):
                search(inner, f"{name}[{i}]")
        elif type(value).__module__.startswith("leadline.cache"):
            for key, inner in vars(value).items():
                search(inner, f"{name}.{key}")

    search(cache, "cache")
    # A page border closes every group; the ids before it are given to `resume`.
    derived = {"cache.open_groups", "cache.recent_ids"}
    assert {name for pointer, name in found.items() if pointer not in listed} == derived
    assert set(listed) <= set(found)


@pytest.mark.parametrize("kind", ["page_planes", "window_planes"])
def test_bytes_of_a_page_go_to_another_page_and_nowhere_else(kind: str) -> None:
    cache = new_cache()
    planes: list[Plane] = getattr(cache, kind)()
    generator = torch.Generator().manual_seed(1)
    for plane in planes:
        plane.tensor.random_(0, 256, generator=generator)
    before = [plane.tensor.clone() for plane in planes]
    pages = PageBytes(planes, cache.device)
    pages.write(5, pages.read(3))
    for plane, old in zip(planes, before, strict=True):
        n = plane.rows_per_page
        assert torch.equal(plane.tensor[5 * n : 6 * n], old[3 * n : 4 * n]), plane.name
        old[5 * n : 6 * n] = old[3 * n : 4 * n]
        assert torch.equal(plane.tensor, old), plane.name
    assert pages.num_bytes == sum(plane.tensor[: plane.rows_per_page].nbytes for plane in planes)
    with pytest.raises(RequestError, match="page bytes"):
        pages.write(0, torch.zeros(7, dtype=torch.uint8))


def test_global_page_is_as_large_as_its_rows() -> None:
    cache = new_cache()
    rows = sum(PAGE_TOKENS // r * (cache.compressed[s].layout.row_bytes + cache.keys[s].layout.row_bytes)
               for s, r in cache.ratios.items())  # fmt: skip
    assert PageBytes(cache.page_planes(), cache.device).num_bytes == rows


@pytest.mark.parametrize("seed", range(4))
def test_idle_pages_are_counted(seed: int) -> None:
    rng = random.Random(seed)
    allocator, counts, kept = PageAllocator(7, "pages", "max_tokens"), [0] * 7, set[int]()
    for _ in range(500):
        page, action = rng.randrange(7), rng.choice(("share", "release", "keep", "drop"))
        if counts[page] == 0:
            if allocator.num_free == 1 or action == "share":
                (page,) = allocator.allocate(1)
                counts[page] = 1
        elif action == "share":
            allocator.share(page)
            counts[page] += 1
        elif action == "release" and counts[page] > (page in kept):
            allocator.release(page)
            counts[page] -= 1
        elif action == "keep" and page not in kept:
            allocator.keep(page)
            kept.add(page)
        elif action == "drop" and page in kept:
            allocator.drop(page)
            kept.remove(page)
            counts[page] -= 1
        assert allocator.num_idle == sum(counts[p] == 1 for p in kept)
        assert [allocator.ref_count(p) for p in range(7)] == counts


@pytest.mark.parametrize("seed", range(4))
def test_eviction_queue_against_sorting(seed: int) -> None:
    rng = random.Random(seed)
    queue, keys = EvictionQueue[int](), dict[int, tuple[bool, int]]()
    for _ in range(600):
        item, action = rng.randrange(12), rng.choice(("put", "put", "put", "remove", "take"))
        if action == "put":
            keys[item] = (rng.random() < 0.5, rng.randrange(1000))
            queue.put(item, keys[item])
        elif action == "remove":
            keys.pop(item, None)
            queue.remove(item)
        else:
            refused = {i for i in keys if rng.random() < 0.5}
            order = sorted((i for i in keys if i not in refused), key=keys.__getitem__)
            wanted = rng.randrange(4)
            taken: list[int] = []
            for got in queue.take(lambda i: i not in refused, lambda: len(taken) > wanted):  # noqa: B023
                taken.append(got)
            assert [keys[i] for i in taken] == [keys[i] for i in order[: wanted + 1]]
            for got in taken:
                del keys[got]
        assert len(queue) == len(keys)


# Finding and resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 300, 301])
def test_lengths_around_page_borders(length: int) -> None:
    driver, ids = Driver(), ids_of(512)
    driver.process(ids[:301], snapshots=(128, 256))
    hit = driver.prefix.lookup(ids[:length], limit=length)
    assert hit.length == hit.branch == (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert driver.process(ids[:length]) == hit.length
    for limit in (0, 127, 128, 255, 256):
        assert driver.prefix.lookup(ids, limit=limit).length == limit // PAGE_TOKENS * PAGE_TOKENS
    driver.check_empty()


def test_hit_falls_back_to_the_deepest_snapshot() -> None:
    driver, ids = Driver(), ids_of(700)
    driver.process(ids[:650], snapshots=(256, 640))
    hit = driver.prefix.lookup(ids[:600], limit=599)
    assert (hit.length, hit.branch) == (256, 512)
    hit = driver.prefix.lookup(ids, limit=699)
    assert (hit.length, hit.branch) == (640, 640)
    assert driver.prefix.lookup(ids[:200], limit=199).length == 0
    driver.check_empty()


def test_other_ids_inside_a_page_are_another_page() -> None:
    driver, ids = Driver(), ids_of(300)
    driver.process(ids)
    for position in (0, 127, 128, 255):
        other = list(ids)
        other[position] = -1 - other[position]
        hit = driver.prefix.lookup(other, limit=299)
        assert (hit.branch, hit.length) == (position // PAGE_TOKENS * PAGE_TOKENS, 0)
    driver.process(ids[:200] + ids_of(100, 1))
    assert driver.length(ids) == 256
    driver.check_empty()


def test_lookup_changes_nothing() -> None:
    driver, ids = Driver(), ids_of(300)
    driver.process(ids)
    before = driver.prefix.clock
    for _ in range(3):
        assert driver.length(ids) == 256
    assert driver.prefix.clock == before
    driver.check_empty()


def test_growing_sequence_inserts_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, ids = Driver(pages=40), ids_of(4096)
    asked: list[int] = []
    from leadline.cache import prefix as module

    real = module.page_key

    def counted(ids: Any, start: int) -> bytes:
        asked.append(start)
        return real(ids, start)

    monkeypatch.setattr(module, "page_key", counted)
    sequence = driver.cache.open()
    for length in range(100, 4000, 100):
        sequence.reserve(length)
        sequence.advance(length)
        driver.prefix.insert(sequence, ids)
    assert asked == list(range(0, 3900 // 128 * 128, 128))
    sequence.close()
    driver.check_empty()


def test_trimmed_snapshots_serve_prompts_long_enough() -> None:
    """As the model refuses runs that look at rows which are not there."""
    driver, ids = Driver(), ids_of(900)
    upper = range(PLAN.split_layer + 1, CONFIG.num_hidden_layers)
    assert upper, "the configuration has layers to trim"
    sequence = driver.begin(ids)
    grow(driver.cache, sequence, ids, 256)
    for layer in upper:
        sequence.window_from[layer] = 256  # a chunk inside a long prompt
    driver.prefix.snapshot(sequence, ids, 256)
    halo = CONFIG.sliding_window + len(upper) * (CONFIG.sliding_window - 1)
    assert driver.length(ids[: 256 + halo]) == 256
    assert driver.length(ids[:258]) == 0
    served = [n for n in range(257, 257 + halo + 1) if driver.length(ids[:n])]
    assert served == list(range(served[0], 257 + halo + 1))
    assert served[0] > 256 + CONFIG.sliding_window
    assert driver.prefix.lookup(ids[: 256 + halo], limit=900, keep_from=200).length == 0
    # A more complete one of the same border takes its place, and is not replaced by a less complete one.
    for layer in upper:
        sequence.window_from[layer] = 256 - CONFIG.sliding_window + 1
    driver.prefix.snapshot(sequence, ids, 256)
    assert driver.length(ids[:257]) == 256
    for layer in upper:
        sequence.window_from[layer] = 250
    driver.prefix.snapshot(sequence, ids, 256)
    assert driver.length(ids[:257]) == 256
    assert driver.prefix.num_snapshots == 1
    sequence.close()
    check_counts(driver.cache, driver.prefix, [])
    driver.check_empty()


def test_replay_leaves_the_last_window_to_compute() -> None:
    driver, ids = Driver(mode="replay"), ids_of(300)
    driver.process(ids)
    window = CONFIG.sliding_window
    assert driver.length(ids[: 256 + window]) == 256
    hit = driver.prefix.lookup(ids[: 255 + window], limit=300)
    assert (hit.length, hit.branch) == (0, 128)
    assert driver.prefix.last_border(255 + window) == 128
    assert driver.prefix.last_border(3) == 0
    driver.check_empty()


def test_pages_computed_twice_become_one() -> None:
    driver, ids = Driver(), ids_of(300)
    sequences = [driver.begin(ids) for _ in range(3)]
    for sequence in sequences:
        grow(driver.cache, sequence, ids, 290)
    assert driver.cache.pages.num_free == 16 - 9
    for sequence in sequences:
        driver.prefix.insert(sequence, ids)
        check_rows(driver.cache, sequence, ids)
    assert driver.cache.pages.num_free == 16 - 5
    check_counts(driver.cache, driver.prefix, sequences)
    for sequence in sequences:
        grow(driver.cache, sequence, ids, 300)
        assert sequence.fixed_length == 256
        sequence.close()
    driver.check_empty()


def test_clear_while_sequences_run() -> None:
    driver, ids = Driver(), ids_of(600)
    driver.process(ids[:300])
    sequence = driver.begin(ids[:300])
    driver.prefix.clear()
    check_counts(driver.cache, driver.prefix, [sequence])
    grow(driver.cache, sequence, ids, 520)
    driver.prefix.snapshot(sequence, ids, 512)
    check_counts(driver.cache, driver.prefix, [sequence])
    sequence.close()
    assert driver.process(ids) == 512
    driver.check_empty()


# Eviction ------------------------------------------------------------------------------------------------------------


def test_pages_without_a_snapshot_go_first_then_the_least_recently_used() -> None:
    driver = Driver(pages=16)
    old, new, useless = ids_of(300, 1), ids_of(300, 2), ids_of(700, 3)
    driver.process(old)
    driver.process(new)
    driver.process(useless, snapshots=())  # 5 pages, used last
    assert driver.cache.pages.num_free == 16 - 9
    assert driver.prefix.make_room(12, 0)
    assert driver.prefix.lookup(useless, limit=699).branch == 0
    assert (driver.length(old), driver.length(new)) == (256, 256)
    driver.process(old)
    assert driver.prefix.make_room(13, 0)
    assert (driver.length(old), driver.length(new)) == (256, 0)
    # What is left of the evicted one serves no resume and goes before the other.
    assert driver.prefix.make_room(14, 0)
    assert (driver.length(old), driver.prefix.lookup(new, limit=299).branch) == (256, 0)
    driver.check_empty()


def test_pages_of_running_sequences_stay() -> None:
    driver, ids, other = Driver(pages=8), ids_of(400, 1), ids_of(300, 2)
    driver.process(ids[:300])
    driver.process(other)
    sequence = driver.begin(ids)
    assert driver.prefix.pages.num_available == 8 - 2
    assert not driver.prefix.make_room(7, 0)
    assert driver.length(other) == 256, "nothing is evicted in vain"
    assert driver.prefix.make_room(6, 0)
    grow(driver.cache, sequence, ids, 400)
    check_rows(driver.cache, sequence, ids)
    check_counts(driver.cache, driver.prefix, [sequence])
    sequence.close()
    driver.check_empty()


def test_window_pages_of_snapshots_make_room() -> None:
    driver = Driver(sequences=1, max_snapshots=3)
    for seed in range(3):
        driver.process(ids_of(200, seed))
    sequence = driver.begin(ids_of(200, 1))
    total = driver.cache.window_pages.num_pages
    assert driver.prefix.windows.num_available == total - 1
    assert not driver.prefix.make_room(0, total)
    assert driver.prefix.make_room(0, total - 1)
    assert driver.prefix.num_snapshots == 1
    sequence.close()
    driver.check_empty()


def test_two_long_sessions_keep_hitting_beside_each_other() -> None:
    """A million tokens each, a border snapshot every 4,096: 245, where 6 in all are kept."""
    tokens, chunk = 1_000_000, 4096
    cache = new_cache(pages=2 * 8000, sequences=1, snapshots=6, step=chunk)
    prefix = PrefixCache(cache, max_snapshots=6)
    sessions = [ids_of(tokens, seed) for seed in (1, 2)]
    for turn in range(4):
        for seed, ids in enumerate(sessions):
            ids += ids_of(2000, 10 * turn + seed)
            sequence, hit = prefix.open(ids, limit=len(ids) - 1)
            if turn:
                assert hit.length > 0.99 * len(ids), (turn, seed)
            while sequence.length < len(ids):
                length = min(len(ids), (sequence.length // chunk + 1) * chunk)
                sequence.reserve(length)
                sequence.advance(length)
                prefix.snapshot(sequence, ids, length // PAGE_TOKENS * PAGE_TOKENS)
            sequence.close()
    assert prefix.num_snapshots == 6


def test_shared_system_prompt_survives_many_single_requests() -> None:
    driver = Driver(pages=40, max_snapshots=4)
    system = ids_of(256, 1)
    assert driver.process(system + ids_of(200, 2)) == 0
    hits = []
    for seed in range(3, 30):
        ids = system + ids_of(200, seed)
        branch = driver.prefix.lookup(ids, limit=len(ids)).branch
        hits.append(driver.process(ids, snapshots=tuple({branch, 384})))
        driver.prefix.make_room(10, 0)
    assert hits == [0] + [256] * 26
    driver.check_empty()


# Host tier -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [257, 300, 301, 511])
def test_evicted_pages_come_back_from_host_memory(length: int) -> None:
    driver, ids = Driver(host_bytes=1 << 30), ids_of(600)
    driver.process(ids[:length])
    pages = length // PAGE_TOKENS
    driver.evict_all()
    assert driver.prefix.num_nodes == pages
    assert (
        driver.prefix.host.used == pages * driver.prefix.pages.bytes.num_bytes + driver.prefix.windows.bytes.num_bytes
    )
    check_counts(driver.cache, driver.prefix, [])
    driver.process(ids_of(1900, 5))  # over the pages that were given up
    assert driver.process(ids) == pages * PAGE_TOKENS  # checks every row
    driver.check_empty()
    assert driver.prefix.host.used == 0


def test_sequence_that_computed_evicted_pages_again_brings_them_back() -> None:
    driver, ids = Driver(host_bytes=1 << 30), ids_of(300)
    driver.process(ids)
    sequence = driver.cache.open()
    grow(driver.cache, sequence, ids, 300)
    driver.evict_all() if driver.prefix.pages.num_available == 16 else driver.prefix.make_room(13, 0)
    driver.prefix.insert(sequence, ids)
    check_counts(driver.cache, driver.prefix, [sequence])
    assert driver.prefix.host.used <= driver.prefix.windows.bytes.num_bytes
    sequence.close()
    assert driver.process(ids) == 256
    driver.check_empty()


@pytest.mark.parametrize("pages", [0, 1, 3, 6])
def test_full_host_tier_drops_entries_and_goes_on(pages: int) -> None:
    cache = new_cache()
    size = PageBytes(cache.page_planes(), cache.device).num_bytes
    window = PageBytes(cache.window_planes(), cache.device).num_bytes
    driver = Driver(host_bytes=pages * size + 2 * window, pages=12, max_snapshots=2)
    prompts = [ids_of(1300, seed) for seed in range(4)]
    for turn in range(3):
        for ids in prompts:
            assert driver.prefix.make_room(11, 2)
            sequence, _ = driver.prefix.open(ids, limit=1299)
            for end in range(200, 1301, 220):  # several chunks, each in need of pages
                if end > sequence.length:
                    assert driver.prefix.make_room(-(-end // PAGE_TOKENS) - len(sequence.pages), 2), (turn, end)
                    grow(driver.cache, sequence, ids, end)
                    driver.prefix.snapshot(sequence, ids, end // PAGE_TOKENS * PAGE_TOKENS)
                check_counts(driver.cache, driver.prefix, [sequence])
            check_rows(driver.cache, sequence, ids)
            sequence.close()
    driver.check_empty()


def test_lack_of_room_for_loading_changes_nothing() -> None:
    driver, ids, other = Driver(pages=6, host_bytes=1 << 30), ids_of(400, 1), ids_of(520, 2)
    driver.process(ids)
    driver.evict_all()
    sequence = driver.cache.open()
    grow(driver.cache, sequence, other, 520)
    assert driver.length(ids) == 384
    before = driver.prefix.clock, driver.prefix.host.used, driver.cache.num_free_slots
    with pytest.raises(CapacityError, match="3 pages and 1 window pages needed"):
        driver.begin(ids)
    check_counts(driver.cache, driver.prefix, [sequence])
    assert (driver.prefix.clock, driver.prefix.host.used, driver.cache.num_free_slots) == before
    sequence.close()
    assert driver.process(ids) == 384
    driver.check_empty()


def test_no_slot_changes_nothing() -> None:
    driver, ids = Driver(sequences=1), ids_of(300)
    driver.process(ids)
    sequence = driver.begin(ids)
    with pytest.raises(CapacityError, match="slots"):
        driver.begin(ids)
    check_counts(driver.cache, driver.prefix, [sequence])
    sequence.close()
    driver.check_empty()


# Files ---------------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path) -> tuple[Driver, Path, list[list[int]]]:
    driver = Driver(host_bytes=1 << 30)
    prompts = [ids_of(300, 1), ids_of(200, 1) + ids_of(200, 2), ids_of(150, 3)]
    driver.process(prompts[0])
    driver.evict_all()  # some in host memory, some on the device
    for ids in prompts[1:]:
        driver.process(ids)
    driver.process(ids_of(140, 4), snapshots=())  # serves no resume: not saved
    path = tmp_path / "prefix.safetensors"
    driver.prefix.save(path, "model-1")
    return driver, path, prompts


@pytest.mark.parametrize("host_bytes", [0, 1 << 30])
@pytest.mark.parametrize("pages", [16, 4])
def test_file_and_back(tmp_path: Path, host_bytes: int, pages: int) -> None:
    driver, path, prompts = saved(tmp_path)
    other = Driver(pages=pages, host_bytes=host_bytes)
    other.prefix.load(path, "model-1")
    check_counts(other.cache, other.prefix, [])
    lengths = [other.length(ids) for ids in prompts]
    if pages == 16 or host_bytes:
        assert other.prefix.num_nodes == driver.prefix.num_nodes - 1
        assert lengths == [256, 384, 128]
    else:
        assert 0 < sum(lengths) < 768
    for ids, length in zip(prompts, lengths, strict=True):
        if length:
            sequence = other.begin(ids)
            assert sequence.length == length
            check_rows(other.cache, sequence, ids)
            sequence.close()
    other.prefix.load(path, "model-1")  # what is there already stays
    check_counts(other.cache, other.prefix, [])
    other.check_empty()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_order_of_use_is_kept_in_the_file(tmp_path: Path) -> None:
    driver = Driver()
    prompts = [ids_of(150, seed) for seed in range(4)]
    for ids in prompts:
        driver.process(ids)
    driver.process(prompts[0])
    driver.prefix.save(tmp_path / "tree", "m")
    other = Driver()
    other.prefix.load(tmp_path / "tree", "m")
    other.process(ids_of(150, 9))
    assert [other.length(ids) for ids in prompts] == [128, 0, 128, 128]


def test_empty_tree_and_model_without_global_rows(tmp_path: Path) -> None:
    driver = Driver()
    driver.prefix.save(tmp_path / "tree", "m")
    driver.prefix.load(tmp_path / "tree", "m")
    assert driver.prefix.num_nodes == 0
    config = read_config(Path(__file__).parent.parent / "golden" / "models" / "swa" / "config.json")
    cache = KVCache(config, plan_layers(config), max_tokens=1024, max_sequences=1, max_step_tokens=512, max_snapshots=2)
    prefix, ids = PrefixCache(cache, max_snapshots=2, host_bytes=1 << 20), ids_of(300)
    sequence = cache.open()
    sequence.reserve(300)
    sequence.advance(300)
    prefix.snapshot(sequence, ids, 256)
    sequence.close()
    prefix.save(tmp_path / "tree", "m")
    prefix.clear()
    prefix.load(tmp_path / "tree", "m")
    assert prefix.lookup(ids, limit=299).length == 256


def damage(data: bytes, case: str) -> bytes:
    if case == "truncated":
        return data[:-1]
    if case == "longer":
        return data + b"\0"
    if case == "flipped byte":
        return data[:-500] + bytes([data[-500] ^ 1]) + data[-499:]
    if case == "header":
        return data.replace(b"model-1", b"model-2", 1)
    return {"empty": b"", "other": b"hello, world", "long header": b"\xff" * 64}[case]


@pytest.mark.parametrize("case", ["truncated", "longer", "flipped byte", "header", "empty", "other", "long header"])
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    _, path, _ = saved(tmp_path)
    path.write_bytes(damage(path.read_bytes(), case))
    other = Driver()
    with pytest.raises(CheckpointError, match="check sum"):
        other.prefix.load(path, "model-1")
    assert other.prefix.num_nodes == 0
    other.check_empty()


def test_files_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path, _ = saved(tmp_path)
    other = Driver()
    with pytest.raises(CheckpointError, match="model 'model-1', expected 'model-2'"):
        other.prefix.load(path, "model-2")
    with pytest.raises(CheckpointError, match="prefill 'halo', expected 'full'"):
        Driver(mode="full").prefix.load(path, "model-1")
    with pytest.raises(CheckpointError, match="read"):
        other.prefix.load(tmp_path / "missing", "model-1")
    monkeypatch.setattr("leadline.cache.disk.VERSION", "2")
    with pytest.raises(CheckpointError, match="version '1', expected '2'"):
        other.prefix.load(path, "model-1")
    other.check_empty()


def test_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, path, _ = saved(tmp_path)
    before = path.read_bytes()
    driver.process(ids_of(400, 8))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(driver.prefix.windows.bytes, "read", fail)
    with pytest.raises(CheckpointError, match="disk full"):
        driver.prefix.save(path, "model-1")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("arguments", [{"max_snapshots": -1}, {"max_snapshots": 1, "host_bytes": -1}])
def test_illegal_sizes_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="expected numbers from 0 on"):
        PrefixCache(new_cache(), **arguments)
    with pytest.raises(RequestError, match="mode"):
        PrefixCache(new_cache(), max_snapshots=1, mode="fast")  # type: ignore[arg-type]


# Anything in any order -----------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Random requests over a few families of prompts that part at odd places. The twin is the rows' own tags, and the
    counts made from scratch."""

    @initialize(host_pages=st.sampled_from([0, 2, 5, 1000]), max_snapshots=st.integers(0, 3))
    def start(self, host_pages: int, max_snapshots: int) -> None:
        cache = new_cache()
        size = PageBytes(cache.page_planes(), cache.device).num_bytes
        self.driver = Driver(pages=10, sequences=3, step=256, max_snapshots=max_snapshots, host_bytes=host_pages * size)
        self.jobs: dict[Sequence, list[int]] = {}
        self.known: set[tuple[int, ...]] = set()  # every page path that was ever inserted

    def prompt(self, family: int, branch: int, length: int) -> list[int]:
        return (ids_of(branch, 1) + ids_of(700, 2 + family))[:length]

    def note(self, sequence: Sequence, length: int) -> None:
        for border in range(PAGE_TOKENS, length + 1, PAGE_TOKENS):
            self.known.add(tuple(self.jobs[sequence][:border]))

    @rule(
        family=st.integers(0, 2),
        branch=st.sampled_from([0, 100, 128, 200, 300]),
        length=st.sampled_from([1, 127, 128, 129, 257, 390, 640]),
        make_room=st.booleans(),
    )
    def open(self, family: int, branch: int, length: int, make_room: bool) -> None:
        ids = self.prompt(family, branch, length)
        prefix = self.driver.prefix
        hit = prefix.lookup(ids, limit=length - 1)
        paths = {tuple(self.ids_at(node)) for node in prefix.root.walk()}
        borders = range(0, length, PAGE_TOKENS)
        assert hit.branch == max(b for b in borders if b == 0 or tuple(ids[:b]) in paths)
        assert hit.length <= hit.branch
        if make_room:
            prefix.make_room(3, 1)
        try:
            sequence, _ = prefix.open(ids, limit=length - 1)
        except CapacityError:
            return
        assert sequence.length == hit.length or make_room
        self.jobs[sequence] = self.prompt(family, branch, 700)

    def ids_at(self, node: Node) -> list[int]:
        return [token for part in node.path() for token in memoryview(part.key).cast("q").tolist()]

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(list(self.jobs)))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), more=st.sampled_from([1, 60, 128, 200]))
    def step(self, data: st.DataObject, more: int) -> None:
        sequence = self.pick(data)
        length = min(700, sequence.length + more)
        self.driver.prefix.make_room(-(-length // PAGE_TOKENS) - len(sequence.pages), 2)
        try:
            grow(self.driver.cache, sequence, self.jobs[sequence], length)
        except CapacityError:
            return

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.driver.prefix.insert(sequence, self.jobs[sequence])
        self.note(sequence, sequence.length)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), back=st.integers(0, 1))
    def snapshot(self, data: st.DataObject, back: int) -> None:
        sequence = self.pick(data)
        border = (sequence.length // PAGE_TOKENS - back) * PAGE_TOKENS
        if border > 0:
            self.driver.prefix.snapshot(sequence, self.jobs[sequence], border)
            self.note(sequence, border)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), back=st.integers(0, 7))
    def roll_back(self, data: st.DataObject, back: int) -> None:
        sequence = self.pick(data)
        length = sequence.length - back
        if length >= sequence.fixed_length:
            sequence.truncate(length)
        else:
            with pytest.raises(RequestError):
                sequence.truncate(length)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        check_rows(self.driver.cache, sequence, self.jobs.pop(sequence))
        sequence.close()

    @rule(pages=st.integers(0, 10), windows=st.integers(0, 8))
    def evict(self, pages: int, windows: int) -> None:
        cache, prefix = self.driver.cache, self.driver.prefix
        possible = prefix.pages.num_available >= pages and prefix.windows.num_available >= windows
        assert prefix.make_room(pages, windows) == possible
        if possible:
            assert cache.pages.num_free >= pages
            assert cache.window_pages.num_free >= windows

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "driver"):
            return
        check_counts(self.driver.cache, self.driver.prefix, list(self.jobs))
        assert {tuple(self.ids_at(node)) for node in self.driver.prefix.root.walk()} <= self.known

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for sequence, ids in self.jobs.items():
            check_rows(self.driver.cache, sequence, ids)
            sequence.close()
        self.driver.check_empty()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_closed_sequences_are_not_remembered() -> None:
    driver = Driver()
    driver.process(ids_of(300))
    gc.collect()
    assert len(driver.prefix._cursors) == 0
    assert isinstance(next(driver.prefix.root.walk()), Node)
    assert isinstance(driver.prefix.lookup(ids_of(300), limit=299).snapshot, Snapshot)
