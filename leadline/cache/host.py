"""The bytes of pages that outlive their sequence: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from leadline.cache.lru import EvictionQueue, Key
from leadline.cache.pages import PageAllocator
from leadline.cache.pool import Plane
from leadline.errors import RequestError

NOWHERE = -1  # page number of what is not on the device


class PageBytes:
    """Reads and writes all bytes of a page as one tensor: the page's rows of each plane, one plane after the other.

    On a GPU host memory is pinned and copies are queued on the current stream, so that whatever is queued afterwards
    may reuse the page. torch keeps freed pinned blocks for the next copy.
    """

    def __init__(self, planes: list[Plane], device: torch.device) -> None:
        self._planes = planes  # none, if no layer has rows of this kind
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.num_bytes = sum(plane.rows_per_page * plane.tensor.shape[1] for plane in planes)

    def read(self, page: int, *, wait: bool = False) -> Tensor:
        """A copy of the page's bytes in host memory, uint8 [num_bytes]. wait: the copy is complete on return."""
        data = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        for rows, part in self._parts(page, data):
            part.copy_(rows, non_blocking=True)
        if wait and self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        return data

    def to_host(self, data: Tensor) -> Tensor:
        """The same bytes, in memory of the kind that `read` returns."""
        return data.pin_memory() if self._is_cuda else data.clone()

    def write(self, page: int, data: Tensor) -> None:
        """Fill the page with bytes that `read` returned."""
        if data.dtype != torch.uint8 or data.shape != (self.num_bytes,):
            raise RequestError(f"page bytes: expected uint8 [{self.num_bytes}], got {data.dtype} {list(data.shape)}")
        for rows, part in self._parts(page, data):
            rows.copy_(part, non_blocking=True)

    def _parts(self, page: int, data: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts, start = [], 0
        for plane in self._planes:
            rows = plane.tensor[page * plane.rows_per_page : (page + 1) * plane.rows_per_page]
            parts.append((rows, data[start : start + rows.numel()].view(rows.shape)))
            start += rows.numel()
        return parts


class Item:
    """What owns the bytes of one page: on the device (`page`), in host memory (`data`), or nowhere any more."""

    __slots__ = ("data", "page", "stamp")

    def __init__(self, stamp: int = 0) -> None:
        self.page = NOWHERE
        self.data: Tensor | None = None
        self.stamp = stamp  # time of last use


class HostMemory:
    """What was evicted from the device, of all kinds, and how many bytes of it are wanted at most."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self.leaving: EvictionQueue[Item] = EvictionQueue()


I = TypeVar("I", bound=Item)  # noqa: E741


class Shelf(Generic[I]):
    """All items of one kind. `leaving`: those on the device that may leave it."""

    def __init__(self, allocator: PageAllocator, planes: list[Plane], device: torch.device, host: HostMemory) -> None:
        self.allocator = allocator
        self.bytes = PageBytes(planes, device)
        self.host = host
        self.leaving: EvictionQueue[I] = EvictionQueue()

    @property
    def num_available(self) -> int:
        """Pages that are free or could be made so."""
        return self.allocator.num_free + self.allocator.num_idle

    def is_idle(self, item: I) -> bool:
        """Whether nothing else holds the page of an item on the device."""
        return self.allocator.ref_count(item.page) == 1

    def place(self, item: I, page: int) -> None:
        """The item's bytes are in this page now; the caller's reference becomes the item's."""
        self.allocator.keep(page)
        self.drop(item)
        item.page = page

    def load(self, item: I) -> None:
        """From host memory to the device, where a page is free."""
        assert item.data is not None
        self._fill(item, item.data)

    def unload(self, item: I) -> None:
        """From the device to host memory."""
        data = self.bytes.read(item.page)
        self.drop(item)
        self._store(item, data)

    def restore(self, item: I, read: Callable[[], Tensor], *, on_device: bool) -> bool:
        """From a file to the device, if it may be there and a page is free, or to host memory. False: no room."""
        if on_device and self.allocator.num_free:
            self._fill(item, read())
        elif self.host.used + self.bytes.num_bytes <= self.host.max_bytes:
            self._store(item, self.bytes.to_host(read()))
        else:
            return False
        return True

    def drop(self, item: I) -> None:
        """Give up the bytes, wherever they are."""
        if item.page != NOWHERE:
            self.allocator.drop(item.page)
        if item.data is not None:
            self.host.used -= self.bytes.num_bytes
        item.page, item.data = NOWHERE, None
        self.queue(item, (False, 0), is_free=False)

    def queue(self, item: I, key: Key, *, is_free: bool) -> None:
        """Where the item is it is up for eviction with this key, or not at all."""
        for queue, is_here in ((self.leaving, item.page != NOWHERE), (self.host.leaving, item.data is not None)):
            if is_here and is_free:
                queue.put(item, key)
            else:
                queue.remove(item)

    def _fill(self, item: I, data: Tensor) -> None:
        (page,) = self.allocator.allocate(1)
        self.bytes.write(page, data)
        self.place(item, page)

    def _store(self, item: I, data: Tensor) -> None:
        item.data = data
        self.host.used += self.bytes.num_bytes
