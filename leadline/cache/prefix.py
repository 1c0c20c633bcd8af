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
can be evicted, which makes the available pages a counter.

Plain Python except where bytes move. Not thread-safe: belongs to the engine's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from leadline.cache import disk
from leadline.cache.host import NOWHERE, HostMemory, Item, Shelf
from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.config.layers import plan_layers
from leadline.errors import CapacityError, RequestError
from leadline.model.step import PREFILL_MODES, Prefill, layer_starts


class Node(Item):
    """One page of a path. The root has no bytes."""

    __slots__ = ("children", "depth", "key", "num_on_device", "parent", "snapshot")

    def __init__(self, parent: Node | None, key: bytes, stamp: int = 0) -> None:
        super().__init__(stamp)
        self.parent = parent
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + PAGE_TOKENS  # tokens up to this page's end
        self.children: dict[bytes, Node] = {}
        self.num_on_device = 0  # children there
        self.snapshot: Snapshot | None = None

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


class Snapshot(Item):
    """The window before a node's end. `above` and `below` are the nearest snapshots on the paths through the node."""

    __slots__ = ("above", "below", "node", "window_from")

    def __init__(self, node: Node, window_from: tuple[int, ...], stamp: int) -> None:
        super().__init__(stamp)
        self.node = node
        self.window_from = window_from
        self.above: Snapshot | None = None
        self.below: set[Snapshot] = set()

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

    length: int
    branch: int
    snapshot: Snapshot | None


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
        self.host = HostMemory(host_bytes)
        # Nodes may leave the device with none on it below, host memory with none below; snapshots at any time.
        self.pages: Shelf[Node] = Shelf(cache.pages, cache.page_planes(), cache.device, self.host)
        self.windows: Shelf[Snapshot] = Shelf(cache.window_pages, cache.window_planes(), cache.device, self.host)
        self.num_layers = cache.config.num_hidden_layers
        self.clock = 0  # moves on with every change of what the tree knows
        self._cache = cache
        self._split_layer = plan_layers(cache.config).split_layer
        self._loading: set[Item] = set()  # must stay in host memory until copied to the device
        self._start_empty()

    def _start_empty(self) -> None:
        self.root = Node(None, b"")
        self.num_nodes = 0
        self.num_snapshots = 0
        self._cursors: WeakKeyDictionary[Sequence, Node] = WeakKeyDictionary()  # deepest node of a running sequence

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
        return Hit(length=node.depth, branch=branch, snapshot=node.snapshot)

    def _serves(self, snapshot: Snapshot, starts: list[int]) -> bool:
        if self.mode == "replay":
            return True  # upper layers start anew after the border, the others have all rows
        border, window = snapshot.node.depth, self._cache.window
        for layer, stored_from in enumerate(snapshot.window_from):
            first_seen = max(0, max(starts[layer + 1], border) - window + 1)
            if first_seen < min(border, stored_from):
                return False
        return True

    def open(
        self, ids: Ids[int], *, limit: int, keep_from: int | None = None, num_pages: int = 0
    ) -> tuple[Sequence, Hit]:
        """A sequence that starts with what `lookup`, with the same arguments, has of a prompt.

        Pages in host memory are copied back first. num_pages: global pages that the sequence will have in all; those
        that it does not reuse are free afterwards.

        Raises:
            CapacityError: no slot, or no room for these pages. Nothing has been copied, the tree has all it had.
        """
        hit = self.lookup(ids, limit=limit, keep_from=keep_from)
        if hit.snapshot is not None:
            return self._resume(hit.snapshot, ids, num_pages), hit
        self._need_room(num_pages, 0)
        return self._cache.open(), hit

    def _resume(self, snapshot: Snapshot, ids: Ids[int], num_pages: int) -> Sequence:
        node, path = snapshot.node, snapshot.node.path()
        missing = [node for node in path if node.page == NOWHERE]
        num_windows = int(snapshot.page == NOWHERE)
        held = [(self.pages.allocator, node.page) for node in path if node.page != NOWHERE]
        if not num_windows:
            held.append((self.windows.allocator, snapshot.page))
        for allocator, page in held:
            allocator.share(page)
        self._loading = {*missing, snapshot}
        try:
            self._need_room(max(len(missing), num_pages - len(path) + len(missing)), num_windows)
            for item in missing:
                self.pages.load(item)
                self._arrived(item)
            if num_windows:
                self.windows.load(snapshot)
                self._refresh_snapshot(snapshot)
                self._trim_snapshots()
            pages = [node.page for node in path]
            sequence = self._cache.resume(ids, node.depth, pages, snapshot.page, snapshot.window_from)
            snapshot.stamp = node.stamp = self._tick()
        finally:
            self._loading = set()
            self._trim_snapshots()
            for allocator, page in held:
                allocator.release(page)
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
        new, old, window = Snapshot(node, kept.window_from, self._tick()), node.snapshot, self._cache.window
        if old is not None:
            gain = old.missing_rows(window) - new.missing_rows(window)
            if gain < 0 or (gain == 0 and old.page != NOWHERE):
                self.windows.allocator.release(kept.window_page)
                old.stamp = new.stamp
                self._refresh_snapshot(old)
                return
            self._drop_snapshot(old)
        self.windows.place(new, kept.window_page)
        self._link(new)
        self._trim_snapshots()

    def _attach(self, sequence: Sequence, ids: Ids[int], length: int) -> Node:
        """Extends the sequence's path to `length` tokens; the node there."""
        node = start = self._cursors.get(sequence, self.root)
        while node.depth < length:
            key, index = page_key(ids, node.depth), node.depth // PAGE_TOKENS
            child = node.children.get(key)
            if child is None:
                child = self._add(Node(node, key))
            if child.page == NOWHERE:  # new, or in host memory: then the sequence has the same bytes on the device
                self.pages.place(child, sequence.share_page(index))
                self._arrived(child)
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

    def make_room(self, pages: int, windows: int) -> bool:
        """Evict until so many global pages and window pages are free. False, nothing evicted, if they cannot be."""
        if self.pages.num_available < pages or self.windows.num_available < windows:
            return False
        for node in self.pages.leaving.take(self.pages.is_idle, lambda: self.pages.allocator.num_free >= pages):
            self._evict(node)
        for snapshot in self.windows.leaving.take(
            self.windows.is_idle, lambda: self.windows.allocator.num_free >= windows
        ):
            self._evict_snapshot(snapshot)
        return True

    def _need_room(self, pages: int, windows: int) -> None:
        if not self.make_room(pages, windows):
            raise CapacityError(
                f"prefix cache: {pages} pages and {windows} window pages needed, {self.pages.num_available} and "
                f"{self.windows.num_available} available; end a request or raise max_cache_tokens"
            )

    def clear(self) -> None:
        """Forget everything. Running sequences keep their pages, and may be inserted again."""
        for node in self.root.walk():
            self.pages.drop(node)
            if node.snapshot is not None:
                self.windows.drop(node.snapshot)
        self._start_empty()

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
        if key in parent.children:
            return parent.children[key]
        node = Node(parent, key, stamp)
        if not self.pages.restore(node, read, on_device=parent is self.root or parent.page != NOWHERE):
            return None
        self._add(node)
        if node.page != NOWHERE:
            self._arrived(node)
        self._refresh(node)
        self._refresh(parent)
        self.clock = max(self.clock, stamp)
        return node

    def restore_snapshot(
        self, node: Node, window_from: tuple[int, ...], stamp: int, read: Callable[[], Tensor]
    ) -> None:
        """For `load`: give the node this snapshot, if it has none and there is room."""
        snapshot = Snapshot(node, window_from, stamp)
        on_device = len(self.windows.leaving) < self.max_snapshots
        if node.snapshot is None and self.windows.restore(snapshot, read, on_device=on_device):
            self._link(snapshot)
            self.clock = max(self.clock, stamp)

    # Nodes ------------------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children[node.key] = node
        self.num_nodes += 1
        return node

    def _arrived(self, node: Node) -> None:
        """The node is on the device now."""
        assert node.parent is not None
        node.parent.num_on_device += 1
        self._refresh(node)
        self._refresh(node.parent)

    def _refresh(self, node: Node) -> None:
        """Puts the node where it is up for eviction, or takes it out, after a change of it or of its children."""
        is_free = not (node.num_on_device if node.page != NOWHERE else node.children)
        self.pages.queue(node, (node.snapshot is not None or bool(node.children), node.stamp), is_free=is_free)

    def _evict(self, node: Node) -> None:
        """A leaf leaves the device. Without any use for a resume it is not worth host memory."""
        parent = node.parent
        assert parent is not None
        parent.num_on_device -= 1
        if self.pages.bytes.num_bytes > self.host.max_bytes or not (node.snapshot or node.children):
            self._remove(node)
            return
        self.pages.unload(node)
        parent.stamp = max(parent.stamp, node.stamp)
        self._refresh(node)
        self._refresh(parent)
        self._trim_host()

    def _remove(self, node: Node) -> None:
        """Takes a node with nothing below it out of the tree. Its parent no longer counts it as being on the device."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        if node.snapshot is not None:
            self._drop_snapshot(node.snapshot)
        self.pages.drop(node)
        del parent.children[node.key]
        self.num_nodes -= 1
        parent.stamp = max(parent.stamp, node.stamp)
        self._refresh(parent)

    def _trim_host(self) -> None:
        """Drops from the host tier what is beyond its budget."""
        for item in self.host.leaving.take(
            lambda item: item not in self._loading, lambda: self.host.used <= self.host.max_bytes
        ):
            if isinstance(item, Node):
                self._remove(item)
            elif isinstance(item, Snapshot):
                self._drop_snapshot(item)

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
        self.windows.queue(snapshot, (not is_link, snapshot.stamp), is_free=True)

    def _trim_snapshots(self) -> None:
        """Evicts from the device what is beyond the budget."""
        for snapshot in self.windows.leaving.take(
            lambda snapshot: snapshot not in self._loading, lambda: len(self.windows.leaving) <= self.max_snapshots
        ):
            self._evict_snapshot(snapshot)

    def _evict_snapshot(self, snapshot: Snapshot) -> None:
        if self.windows.bytes.num_bytes > self.host.max_bytes:
            self._drop_snapshot(snapshot)
            return
        self.windows.unload(snapshot)
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
        self.windows.drop(snapshot)
        snapshot.node.snapshot = None
        self.num_snapshots -= 1
        self._refresh(snapshot.node)


def page_key(ids: Ids[int], start: int) -> bytes:
    """The exact ids of a page: what its node is found by."""
    return array("q", ids[start : start + PAGE_TOKENS]).tobytes()
