"""Page numbers: who holds which page. Plain Python, no tensors."""

from __future__ import annotations

from leadline.errors import CapacityError

PAGE_TOKENS = 128
MAX_ROLLBACK = 7  # tokens that a sequence can take back: a verified block never rejects more


class PageAllocator:
    """Hands out page numbers `0..num_pages-1` with reference counts.

    A page is free when its count is zero. The lowest free numbers are not preferred: the most recently freed page is
    reused first, since its memory is likely to be warm.

    One holder of a page may be the prefix cache: `keep` and `drop` mark its reference, so that the pages which nothing
    else holds are counted as they come and go. These are what the prefix cache can give up.
    """

    def __init__(self, num_pages: int, what: str, option: str) -> None:
        self.num_pages = num_pages
        self._what = what
        self._option = option
        self._free = list(range(num_pages - 1, -1, -1))
        self._ref_count = [0] * num_pages
        self._is_kept = bytearray(num_pages)
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._num_idle

    def ref_count(self, page: int) -> int:
        return self._ref_count[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference.

        Raises:
            CapacityError: fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise CapacityError(
                f"{self._what}: {count} pages needed, {len(self._free)} of {self.num_pages} free; "
                f"end a request or raise {self._option}"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._ref_count[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page that is in use."""
        assert self._ref_count[page] > 0, f"{self._what}: page {page} is free"
        self._num_idle -= self._is_kept[page] and self._ref_count[page] == 1
        self._ref_count[page] += 1

    def release(self, page: int) -> None:
        """Drop one reference; the page becomes free with the last one."""
        assert self._ref_count[page] > 0, f"{self._what}: page {page} is released twice"
        self._ref_count[page] -= 1
        if self._ref_count[page] == 0:
            self._free.append(page)
        self._num_idle += self._is_kept[page] and self._ref_count[page] == 1

    def keep(self, page: int) -> None:
        """One of the page's references, the caller's, is the prefix cache's from now on."""
        assert self._ref_count[page] > 0, f"{self._what}: page {page} is free"
        assert not self._is_kept[page], f"{self._what}: page {page} is kept twice"
        self._is_kept[page] = True
        self._num_idle += self._ref_count[page] == 1

    def drop(self, page: int) -> None:
        """Release the reference of a kept page."""
        assert self._is_kept[page], f"{self._what}: page {page} is not kept"
        self._num_idle -= self._ref_count[page] == 1
        self._is_kept[page] = False
        self.release(page)
