"""Prompts that begin like earlier ones start where those were: a radix tree over pages.

A node is one full page of 128 tokens, found below its parent by exactly these ids. It holds one reference on a global
page. To go on after a page border, exactly, one needs the global pages of all nodes up to there and one window page: a
border closes every group. Window pages are large, so only some nodes keep one: a snapshot. A hit resumes at the deepest
border that has both; the rest is computed again.

Order of eviction
    pages      Leaves only, so that what is left is reachable. A leaf without a snapshot serves no resume and goes
               first; then the least recently used. A page that a running sequence holds stays.
    snapshots  A budget of their own. What a snapshot is worth depends on what lies below it. At the tip of a branch it
               is where a conversation goes on; with two or more branches below it is a prefix that they share. With a
               single next snapshot below it (a link: the borders passed while a long prompt is processed) it only
               serves a prompt that leaves the branch just there. Links go first, then the others, each least recently
               used first. So a session of a million tokens pushes out its own links before another session's tip.

With a host tier what is evicted moves to host memory first, in the same order and with a budget in bytes. A node in
host memory has no node on the device below it: a path is on the device first and in host memory from some node on.

Sequences that computed the same page at the same time end up sharing the first one: `insert` makes them. Therefore the
pages of a sequence that are in the tree at all are on one path from the root, and every page that only the tree holds
can be evicted, which makes `available_pages` a counter.

Plain Python except where bytes move. Not thread-safe: belongs to the engine's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from leadline.cache import disk
from leadline.cache.host import PageBytes
from leadline.cache.lru import EvictionQueue, Key
from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.config.layers import plan_layers
from leadline.errors import CapacityError, RequestError
from leadline.model.step import PREFILL_MODES, Prefill, layer_starts

NOWHERE = -1  # page number of what is not on the device


class Node:
    """One page of a path. Its bytes are on the device (`page`) or in host memory (`data`); neither: root or removed."""

    __slots__ = ("children", "data", "depth", "key", "num_on_device", "page", "parent", "snapshot", "stamp")

    def __init__(self, parent: Node | None, key: bytes, depth: int) -> None:
        self.parent = parent
        self.key = key
        self.depth = depth  # tokens up to this page's end
        self.page = NOWHERE
        self.data: Tensor | None = None
        self.children: dict[bytes, Node] = {}
        self.num_on_device = 0  # children there
        self.snapshot: Snapshot | None = None
        self.stamp = 0

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def walk(self) -> Iterator[Node]:
        """All nodes below this one, parents first."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


@dataclass(eq=False, slots=True)
class Snapshot:
    """The window before a node's end. `above` and `below` are the nearest snapshots on the paths through the node."""

    node: Node
    window_from: tuple[int, ...]
    page: int = NOWHERE
    data: Tensor | None = None
    above: Snapshot | None = None
    below: set[Snapshot] = field(default_factory=set)
    stamp: int = 0

    def missing_rows(self, window: int) -> int:
        """Window rows, over all layers, that a trimmed prefill left out."""
        first = self.node.depth - window + 1
        return sum(min(max(stored, first), self.node.depth) - first for stored in self.window_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """What the cache has of a prompt.

    length: tokens that need not be processed, a multiple of 128, possibly 0. branch: border up to which the tree knows
    the tokens, at least `length`: where other prompts went on differently, or a snapshot is missing or does not serve.
    """

    ids: Ids[int]
    limit: int
    keep_from: int | None
    length: int
    branch: int
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """nodes, snapshots: in the tree, wherever their bytes are. host_bytes: in the host tier. lookups: hits opened,
    those of length 0 included; hit_tokens: their lengths together."""

    nodes: int
    snapshots: int
    host_bytes: int
    lookups: int
    hit_tokens: int


class PrefixCache:
    """The tree over the pages of one `KVCache`.

    Args:
        max_snapshots: most window pages kept on the device; the cache should provide as many extra ones.
        host_bytes: host memory for what is evicted; 0 = nothing is kept.
        mode: how all prompts are processed. Under "replay" the upper layers' windows depend on the prompt's length, so
            a hit leaves at least the last window to compute.
    """

    def __init__(self, cache: KVCache, *, max_snapshots: int, host_bytes: int = 0, mode: Prefill = "halo") -> None:
        if mode not in PREFILL_MODES:
            raise RequestError(f"mode: expected one of {', '.join(PREFILL_MODES)}, got {mode!r}")
        if max_snapshots < 0 or host_bytes < 0:
            raise RequestError(
                f"max_snapshots and host_bytes: expected numbers from 0 on, got {max_snapshots} and {host_bytes}"
            )
        self.mode = mode
        self.max_snapshots = max_snapshots
        self.host_bytes = host_bytes
        self.page_bytes = PageBytes(cache.page_planes(), cache.device)
        self.window_bytes = PageBytes(cache.window_planes(), cache.device)
        self._cache = cache
        self.num_layers = cache.config.num_hidden_layers
        self._split_layer = plan_layers(cache.config).split_layer
        self._clock = 0
        self._lookups = 0
        self._hit_tokens = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.root = Node(None, b"", 0)
        self.num_nodes = 0
        self.num_snapshots = 0
        self.host_used = 0
        self._cursors: WeakKeyDictionary[Sequence, Node] = WeakKeyDictionary()  # deepest node of a running sequence
        self._leaves: EvictionQueue[Node] = EvictionQueue()  # nodes on the device with none on the device below
        self._snapshots: EvictionQueue[Snapshot] = EvictionQueue()  # on the device
        self._host: EvictionQueue[Node | Snapshot] = EvictionQueue()  # host nodes with nothing below, host snapshots
        self._loading: set[Node | Snapshot] = set()  # must stay in the host tier until copied to the device

    # Requests ---------------------------------------------------------------------------------------------------------

    def last_border(self, prompt_length: int) -> int:
        """The deepest border that a prompt of this length can resume at: keep a snapshot there for its next time."""
        last = self._cache.window if self.mode == "replay" else 1
        return max(0, prompt_length - last) // PAGE_TOKENS * PAGE_TOKENS

    def lookup(self, ids: Ids[int], *, limit: int, keep_from: int | None = None) -> Hit:
        """What the cache has of a prompt. Changes nothing, so it may be asked again and again.

        Args:
            ids: the whole prompt; inside images negative numbers made of the image's content.
            limit: most tokens to take from the cache. At least one token is always left to process.
            keep_from: as the prompt's runs will have it. All of them must have prompt_length = len(ids) and
                logits_from = len(ids) - 1: a snapshot that lacks rows is offered only if such runs do not look at them.
        """
        limit = min(limit, self.last_border(len(ids)))
        node = self.root
        while node.depth + PAGE_TOKENS <= limit:
            child = node.children.get(page_key(ids, node.depth))
            if child is None:
                break
            node = child
        branch = node.depth
        starts = layer_starts(
            self.mode,
            len(ids),
            len(ids) - 1,
            keep_from,
            num_layers=self.num_layers,
            split_layer=self._split_layer,
            window=self._cache.window,
        )
        while node.parent is not None:
            if node.snapshot is not None and self._serves(node.snapshot, starts):
                break
            node = node.parent
        return Hit(ids=ids, limit=limit, keep_from=keep_from, length=node.depth, branch=branch, snapshot=node.snapshot)

    def _serves(self, snapshot: Snapshot, starts: list[int]) -> bool:
        if self.mode == "replay":
            return True  # upper layers start anew after the border, the others have all rows
        border, window = snapshot.node.depth, self._cache.window
        for layer, stored_from in enumerate(snapshot.window_from):
            first_seen = max(0, max(starts[layer + 1], border) - window + 1)
            if first_seen < min(border, stored_from):
                return False
        return True

    def open(self, hit: Hit) -> Sequence:
        """A sequence that starts with the first `hit.length` tokens processed.

        Pages in host memory are copied back first. If what was found has been evicted since, the prompt is looked up
        again: `length` of the sequence says what was reused. Open the sequence before making room for its other pages,
        because it holds what it reuses.

        Raises:
            CapacityError: no slot, or no room for the pages in host memory. The tree still has all it had.
        """
        snapshot = hit.snapshot
        if snapshot is not None and snapshot.node.snapshot is not snapshot:
            hit = self.lookup(hit.ids, limit=hit.limit, keep_from=hit.keep_from)
            snapshot = hit.snapshot
        if snapshot is None:
            sequence = self._cache.open()
        else:
            sequence = self._resume(snapshot, hit.ids)
        self._lookups += 1
        self._hit_tokens += sequence.length
        return sequence

    def _resume(self, snapshot: Snapshot, ids: Ids[int]) -> Sequence:
        pages, window_pages = self._cache.pages, self._cache.window_pages
        path = snapshot.node.path()
        missing = [node for node in path if node.page == NOWHERE]
        held = [node.page for node in path[: len(path) - len(missing)]]
        for page in held:
            pages.share(page)
        held_window = snapshot.page
        if held_window != NOWHERE:
            window_pages.share(held_window)
        self._loading = {*missing, snapshot}
        try:
            num_windows = int(held_window == NOWHERE)
            if not self.make_room(len(missing), num_windows):
                raise CapacityError(
                    f"prefix cache: {len(missing)} pages and {num_windows} window pages needed to load from host "
                    f"memory, {self.available_pages} and {self.available_windows} available; end a request or raise "
                    "max_tokens"
                )
            for node in missing:
                self._load(node)
            if held_window == NOWHERE:
                self._load_snapshot(snapshot)
            node = snapshot.node
            sequence = self._cache.resume(
                ids, node.depth, [node.page for node in path], snapshot.page, snapshot.window_from
            )
            snapshot.stamp = node.stamp = self._tick()
        finally:
            self._loading = set()
            self._trim_snapshots()
            for page in held:
                pages.release(page)
            if held_window != NOWHERE:
                window_pages.release(held_window)
        self._refresh(node)
        self._refresh_snapshot(snapshot)
        self._cursors[sequence] = node
        return sequence

    def insert(self, sequence: Sequence, ids: Ids[int]) -> None:
        """Make the sequence's full pages known. Takes time for the pages that are new since the last call.

        ids: of at least `sequence.length` tokens, all of them final: no draft that may be taken back. Rows of a step
        that failed must not come here.
        """
        self._attach(sequence, ids, sequence.length // PAGE_TOKENS * PAGE_TOKENS)

    def snapshot(self, sequence: Sequence, ids: Ids[int], length: int) -> None:
        """Keep the sequence's window before the border `length`, so that prompts can resume there.

        length: a multiple of 128, above 0 and at most `sequence.length`. The last border's window is always there; if
            an earlier one's is released, nothing is kept. A more complete snapshot replaces a less complete one.
        ids: as for `insert`, which this includes.
        """
        node = self._attach(sequence, ids, length)
        kept = sequence.snapshot_window(length)
        if kept is None:
            return
        new = Snapshot(node, kept.window_from, kept.window_page, stamp=self._tick())
        old, window = node.snapshot, self._cache.window
        if old is not None:
            gain = old.missing_rows(window) - new.missing_rows(window)
            if gain < 0 or (gain == 0 and old.page != NOWHERE):
                self._cache.window_pages.release(kept.window_page)
                old.stamp = new.stamp
                self._refresh_snapshot(old)
                return
            self._drop_snapshot(old)
        self._cache.window_pages.keep(new.page)
        self._link(new)
        self._trim_snapshots()

    def _attach(self, sequence: Sequence, ids: Ids[int], length: int) -> Node:
        """Extends the sequence's path to `length` tokens; the node there."""
        node = start = self._cursors.get(sequence, self.root)
        while node.depth < length:
            key, index = page_key(ids, node.depth), node.depth // PAGE_TOKENS
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key)
            if child.page == NOWHERE:  # new, or in host memory: then the sequence has the same bytes on the device
                self._place(child, sequence.share_page(index))
            elif child.page != sequence.pages[index]:
                sequence.adopt_page(index, child.page)
            node = child
        if node.depth > start.depth:
            node.stamp = self._tick()
            self._refresh(node)
            self._cursors[sequence] = node
        while node.depth > length and node.parent is not None:
            node = node.parent
        return node

    # Room -------------------------------------------------------------------------------------------------------------

    @property
    def available_pages(self) -> int:
        """Global pages that are free or could be made so."""
        return self._cache.pages.num_free + self._cache.pages.num_idle

    @property
    def available_windows(self) -> int:
        """Window pages that are free or could be made so."""
        return self._cache.window_pages.num_free + self._cache.window_pages.num_idle

    def make_room(self, pages: int, windows: int) -> bool:
        """Evict until so many global pages and window pages are free. False, nothing evicted, if they cannot be."""
        if self.available_pages < pages or self.available_windows < windows:
            return False
        if self._cache.pages.num_free < pages:
            for node in self._leaves.take(lambda node: self._cache.pages.ref_count(node.page) == 1):
                self._evict(node)
                if self._cache.pages.num_free >= pages:
                    break
        if self._cache.window_pages.num_free < windows:
            for snapshot in self._snapshots.take(lambda s: self._cache.window_pages.ref_count(s.page) == 1):
                self._evict_snapshot(snapshot)
                if self._cache.window_pages.num_free >= windows:
                    break
        return True

    def clear(self) -> None:
        """Forget everything. Running sequences keep their pages, and may be inserted again."""
        for node in self.root.walk():
            if node.page != NOWHERE:
                self._cache.pages.drop(node.page)
            if node.snapshot is not None and node.snapshot.page != NOWHERE:
                self._cache.window_pages.drop(node.snapshot.page)
            node.page, node.data, node.snapshot = NOWHERE, None, None
        self._start_empty()

    @property
    def stats(self) -> PrefixStats:
        return PrefixStats(
            nodes=self.num_nodes,
            snapshots=self.num_snapshots,
            host_bytes=self.host_used,
            lookups=self._lookups,
            hit_tokens=self._hit_tokens,
        )

    # Disk -------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, fingerprint: str) -> None:
        """Write the tree to a file, which takes its place when it is complete.

        fingerprint: names model and weights; only a cache of the same one and of the same mode can load the file.
        """
        disk.save(self, Path(path), fingerprint)

    def load(self, path: str | Path, fingerprint: str) -> None:
        """Add what a file holds to the tree, as far as there is free room on the device, then in the host tier.

        Raises:
            CheckpointError: not a file of `save`, damaged, or saved with another version, model or mode. The tree is
                unchanged then.
        """
        disk.load(self, Path(path), fingerprint)

    def restore_node(self, parent: Node, key: bytes, stamp: int, read: Callable[[], Tensor]) -> Node | None:
        """For `load`: the child of `parent` with these ids, its bytes read if it is new. None: there is no room."""
        node = parent.children.get(key)
        if node is not None:
            return node
        on_device = parent is self.root or parent.page != NOWHERE
        if on_device and self._cache.pages.num_free:
            node = self._add(parent, key)
            (page,) = self._cache.pages.allocate(1)
            self.page_bytes.write(page, read())
            self._place(node, page)
        elif self.host_used + self.page_bytes.num_bytes <= self.host_bytes:
            node = self._add(parent, key)
            node.data = self.page_bytes.to_host(read())
            self.host_used += self.page_bytes.num_bytes
            self._refresh(parent)
        else:
            return None
        self._clock = max(self._clock, stamp)
        node.stamp = stamp
        self._refresh(node)
        return node

    def restore_snapshot(
        self, node: Node, window_from: tuple[int, ...], stamp: int, read: Callable[[], Tensor]
    ) -> None:
        """For `load`: give the node this snapshot, if it has none and there is room."""
        if node.snapshot is not None:
            return
        snapshot = Snapshot(node, window_from, stamp=stamp)
        if len(self._snapshots) < self.max_snapshots and self._cache.window_pages.num_free:
            (snapshot.page,) = self._cache.window_pages.allocate(1)
            self._cache.window_pages.keep(snapshot.page)
            self.window_bytes.write(snapshot.page, read())
        elif self.host_used + self.window_bytes.num_bytes <= self.host_bytes:
            snapshot.data = self.window_bytes.to_host(read())
            self.host_used += self.window_bytes.num_bytes
        else:
            return
        self._clock = max(self._clock, stamp)
        self._link(snapshot)

    # Nodes ------------------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _add(self, parent: Node, key: bytes) -> Node:
        node = parent.children[key] = Node(parent, key, parent.depth + PAGE_TOKENS)
        self.num_nodes += 1
        return node

    def _place(self, node: Node, page: int) -> None:
        """The node's bytes are in this page now; the caller's reference becomes the tree's."""
        assert node.parent is not None
        self._cache.pages.keep(page)
        node.page = page
        node.parent.num_on_device += 1
        if node.data is not None:
            node.data = None
            self.host_used -= self.page_bytes.num_bytes
        self._refresh(node)
        self._refresh(node.parent)

    def _load(self, node: Node) -> None:
        assert node.data is not None
        data = node.data
        (page,) = self._cache.pages.allocate(1)
        self.page_bytes.write(page, data)
        self._place(node, page)

    def _refresh(self, node: Node) -> None:
        """Puts the node where it is up for eviction, or takes it out, after a change of it or of its children."""
        key: Key = (node.snapshot is not None or bool(node.children), node.stamp)
        if node.page != NOWHERE and not node.num_on_device:
            self._leaves.put(node, key)
        else:
            self._leaves.remove(node)
        if node.data is not None and not node.children:
            self._host.put(node, key)
        else:
            self._host.remove(node)

    def _evict(self, node: Node) -> None:
        """A leaf leaves the device. Without any use for a resume it is not worth host memory."""
        assert node.parent is not None
        fits = self.page_bytes.num_bytes <= self.host_bytes
        data = self.page_bytes.read(node.page) if fits and (node.snapshot or node.children) else None
        self._cache.pages.drop(node.page)
        node.page = NOWHERE
        parent = node.parent
        parent.num_on_device -= 1
        parent.stamp = max(parent.stamp, node.stamp)
        if data is None:
            self._remove(node)
        else:
            node.data = data
            self.host_used += self.page_bytes.num_bytes
            self._refresh(node)
            self._refresh(parent)
            self._trim_host()

    def _remove(self, node: Node) -> None:
        """Takes a node with nothing below it, and not on the device, out of the tree."""
        assert node.parent is not None
        assert not node.children
        parent = node.parent
        if node.snapshot is not None:
            self._drop_snapshot(node.snapshot)
        if node.data is not None:
            node.data = None
            self.host_used -= self.page_bytes.num_bytes
        del parent.children[node.key]
        self.num_nodes -= 1
        parent.stamp = max(parent.stamp, node.stamp)
        self._refresh(node)
        self._refresh(parent)

    def _trim_host(self) -> None:
        """Drops from the host tier what is beyond its budget."""
        if self.host_used <= self.host_bytes:
            return
        for item in self._host.take(lambda item: item not in self._loading):
            if isinstance(item, Node):
                self._remove(item)
            else:
                self._drop_snapshot(item)
            if self.host_used <= self.host_bytes:
                break

    # Snapshots --------------------------------------------------------------------------------------------------------

    def _link(self, snapshot: Snapshot) -> None:
        """Makes a new snapshot part of the tree."""
        node = snapshot.node
        up = node.parent
        while up is not None and up.snapshot is None:
            up = up.parent
        above = snapshot.above = None if up is None else up.snapshot
        snapshot.below = self._nearest_below(node)
        for other in snapshot.below:
            other.above = snapshot
        if above is not None:
            above.below -= snapshot.below
            above.below.add(snapshot)
            self._refresh_snapshot(above)
        node.snapshot = snapshot
        self.num_snapshots += 1
        self._refresh(node)
        self._refresh_snapshot(snapshot)

    def _nearest_below(self, node: Node) -> set[Snapshot]:
        found: set[Snapshot] = set()
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            if child.snapshot is not None:
                found.add(child.snapshot)
            else:
                stack += child.children.values()
        return found

    def _refresh_snapshot(self, snapshot: Snapshot) -> None:
        """As `_refresh`, for a snapshot: after a change of where it is, of its use, or of the snapshots below."""
        is_link = len(snapshot.below) == 1
        key: Key = (not is_link, snapshot.stamp)
        if snapshot.page != NOWHERE:
            self._snapshots.put(snapshot, key)
        else:
            self._snapshots.remove(snapshot)
        if snapshot.data is not None:
            self._host.put(snapshot, key)
        else:
            self._host.remove(snapshot)

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.data is not None
        (page,) = self._cache.window_pages.allocate(1)
        self.window_bytes.write(page, snapshot.data)
        self._cache.window_pages.keep(page)
        snapshot.page, snapshot.data = page, None
        self.host_used -= self.window_bytes.num_bytes
        self._refresh_snapshot(snapshot)
        self._trim_snapshots()

    def _trim_snapshots(self) -> None:
        """Evicts from the device what is beyond the budget."""
        if len(self._snapshots) <= self.max_snapshots:
            return
        for snapshot in self._snapshots.take(lambda s: s not in self._loading):
            self._evict_snapshot(snapshot)
            if len(self._snapshots) <= self.max_snapshots:
                break

    def _evict_snapshot(self, snapshot: Snapshot) -> None:
        if self.window_bytes.num_bytes > self.host_bytes:
            self._drop_snapshot(snapshot)
            return
        snapshot.data = self.window_bytes.read(snapshot.page)
        self.host_used += self.window_bytes.num_bytes
        self._cache.window_pages.drop(snapshot.page)
        snapshot.page = NOWHERE
        self._refresh_snapshot(snapshot)
        self._trim_host()

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        above = snapshot.above
        for other in snapshot.below:
            other.above = above
        if above is not None:
            above.below.discard(snapshot)
            above.below |= snapshot.below
            self._refresh_snapshot(above)
        if snapshot.page != NOWHERE:
            self._cache.window_pages.drop(snapshot.page)
        else:
            self.host_used -= self.window_bytes.num_bytes
        snapshot.page, snapshot.data = NOWHERE, None
        snapshot.node.snapshot = None
        self.num_snapshots -= 1
        self._refresh_snapshot(snapshot)
        self._refresh(snapshot.node)


def page_key(ids: Ids[int], start: int) -> bytes:
    """The exact ids of a page: what its node is found by."""
    return array("q", ids[start : start + PAGE_TOKENS]).tobytes()
