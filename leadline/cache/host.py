"""The bytes of a page, moved between the cache's planes and host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.cache.pool import Plane
from leadline.errors import RequestError


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
