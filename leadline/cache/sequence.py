"""One sequence: its length, its pages and where its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS
from leadline.errors import RequestError

if TYPE_CHECKING:
    from leadline.cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class WindowSnapshot:
    """The windows of all layers and draft stages just before a page border.

    window_page: one page, that the holder has a reference on. window_from: per layer the first position whose row is
    stored; a trimmed prefill leaves the upper layers' earlier rows out.
    """

    window_page: int
    window_from: tuple[int, ...]


class Sequence:
    """Pages and length of one sequence. Made by `KVCache.open`; `close` gives everything back.

    Positions `0..length-1` are processed. `reserve` provides room for a step before it runs, `advance` makes its tokens
    part of the sequence, `truncate` takes up to `MAX_ROLLBACK` tokens back.
    """

    def __init__(self, cache: KVCache, slot: int) -> None:
        self._cache = cache
        self.slot = slot
        self.length = 0
        self.is_open = True
        self.fixed_length = 0  # tokens that are not taken back any more, because others read their pages
        self.pages: list[int] = []
        self.window_pages: list[int] = []  # one entry per 128 tokens; -1 = released
        self._first_live = 0  # entries of window_pages before this one are released
        # First position from which a layer's window rows are stored; a trimmed prefill leaves the earlier ones out.
        self.window_from = [0] * cache.config.num_hidden_layers
        self._rows: dict[int, Tensor] = {}  # rows per page -> pool row of each logical row, for the pages held

    def restore(self, length: int, pages: list[int], window_page: int, window_from: tuple[int, ...]) -> None:
        """For `KVCache.resume`: take over pages that this sequence has references on."""
        self.length = self.fixed_length = length
        self.pages = pages
        self._first_live = len(pages) - 1
        self.window_pages = [-1] * self._first_live + [window_page]
        self.window_from = list(window_from)

    def snapshot_window(self, border: int) -> WindowSnapshot | None:
        """The window before `border`, kept for `KVCache.resume`: the caller owns the reference. None if it is released.

        border: a multiple of PAGE_TOKENS, above 0 and at most `length`. The tokens before it cannot be taken back any
        more: the page is shared from now on and must not be written.
        """
        assert 0 < border <= self.length, f"snapshot at {border} of {self.length} tokens"
        assert border % PAGE_TOKENS == 0, f"snapshot at {border}, inside a page"
        index = border // PAGE_TOKENS - 1
        if index < self._first_live:
            return None
        page = self.window_pages[index]
        self._cache.window_pages.share(page)
        self.fixed_length = max(self.fixed_length, border)
        return WindowSnapshot(page, tuple(self.window_from))

    def share_page(self, index: int) -> int:
        """The page of tokens `index * 128` to the next border, all processed, with a reference for the caller.

        These tokens cannot be taken back any more.
        """
        border = (index + 1) * PAGE_TOKENS
        assert border <= self.length, f"page {index} of {self.length} tokens is not full"
        self._cache.pages.share(self.pages[index])
        self.fixed_length = max(self.fixed_length, border)
        return self.pages[index]

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`. All or nothing.

        Raises:
            CapacityError: not enough pages; the sequence is unchanged.
        """
        needed = -(-length // PAGE_TOKENS)
        more = max(0, needed - len(self.pages))
        window_more = max(0, needed - len(self.window_pages))
        if not more and not window_more:
            return
        pages = self._cache.pages.allocate(more)
        try:
            window_pages = self._cache.window_pages.allocate(window_more)
        except BaseException:
            for page in pages:
                self._cache.pages.release(page)
            raise
        self.pages += pages
        self.window_pages += window_pages
        self._rows.clear()

    def trim(self) -> None:
        """Give back the pages that no processed position needs: a step that was refused after `reserve` did not run."""
        needed = -(-self.length // PAGE_TOKENS)
        for page in self.pages[needed:]:
            self._cache.pages.release(page)
        for page in self.window_pages[needed:]:
            self._cache.window_pages.release(page)
        del self.pages[needed:], self.window_pages[needed:]
        self._rows.clear()

    def advance(self, length: int) -> None:
        """Positions below `length` are processed now; window pages that nothing can reach any more are released."""
        self.length = length
        # The next token looks back window - 1 rows, a draft block the whole window.
        oldest = max(0, length - self._cache.window - MAX_ROLLBACK)
        for i in range(self._first_live, oldest // PAGE_TOKENS):
            self._cache.window_pages.release(self.window_pages[i])
            self.window_pages[i] = -1
            self._first_live = i + 1

    def truncate(self, length: int) -> None:
        """Take tokens back: positions from `length` on are as if they had never been processed.

        Raises:
            RequestError: `length` is beyond the sequence, more than `MAX_ROLLBACK` tokens back, or inside pages that
                others read.
        """
        if not 0 <= self.length - length <= MAX_ROLLBACK or length < self.fixed_length:
            raise RequestError(
                f"truncate: length {length} of a sequence of {self.length} tokens; at most {MAX_ROLLBACK} tokens can "
                f"be taken back, and none of the first {self.fixed_length}, whose pages are shared"
            )
        self.length = length

    def close(self) -> None:
        """Give back slot and pages. Closing twice is allowed."""
        if not self.is_open:
            return
        self.is_open = False
        for page in self.pages:
            self._cache.pages.release(page)
        for page in self.window_pages[self._first_live :]:
            self._cache.window_pages.release(page)
        self.pages, self.window_pages = [], []
        self._rows.clear()
        self._cache.give_back_slot(self.slot)

    def pool_rows(self, ratio: int) -> Tensor:
        """Pool row of every logical compressed row of ratio `ratio` that the held pages have room for, int64 [M]."""
        per_page = PAGE_TOKENS // ratio
        rows = self._rows.get(per_page)
        if rows is None:
            device = self._cache.device
            pages_P = torch.tensor(self.pages, dtype=torch.int64, device=device)
            rows = (pages_P[:, None] * per_page + torch.arange(per_page, device=device)).flatten()
            self._rows[per_page] = rows
        return rows

    def window_rows(self, start: int, end: int) -> Tensor:
        """Pool rows of the window at positions `start..end-1`, int64 [end - start]. The pages must be live."""
        assert start >= self._first_live * PAGE_TOKENS, f"window rows of position {start} are released"
        size = PAGE_TOKENS
        first, last = start // size, -(-end // size)
        device = self._cache.device
        pages = torch.tensor(self.window_pages[first:last], dtype=torch.int64, device=device)
        rows = (pages[:, None] * size + torch.arange(size, device=device)).flatten()
        return rows[start - first * size : end - first * size]
