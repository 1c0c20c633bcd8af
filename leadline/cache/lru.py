"""An order of eviction whose keys change."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[bool, int]  # whether it is worth more than the others, time of last use


class EvictionQueue(Generic[T]):
    """Items with keys, given out smallest key first. `put` and `remove` take O(log n), amortised."""

    def __init__(self) -> None:
        self._keys: dict[T, Key] = {}
        self._heap: list[tuple[Key, int, T]] = []  # also holds entries whose key is out of date
        self._serial = count()

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: T, key: Key) -> None:
        """Add the item, or change its key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(k, next(self._serial), i) for i, k in self._keys.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (key, next(self._serial), item))

    def remove(self, item: T) -> None:
        """Take the item out, if it is here."""
        self._keys.pop(item, None)

    def take(self, accept: Callable[[T], bool], until: Callable[[], bool]) -> Iterator[T]:
        """Take out accepted items one by one until `until` holds; items put meanwhile take part."""
        aside = []
        try:
            while self._heap and not until():
                entry = heapq.heappop(self._heap)
                key, _, item = entry
                if self._keys.get(item) != key:
                    continue
                if accept(item):
                    del self._keys[item]
                    yield item
                else:
                    aside.append(entry)
        finally:
            for entry in aside:
                heapq.heappush(self._heap, entry)
