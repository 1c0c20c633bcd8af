"""The tensors behind the pages: every byte that a sequence carries from one step to the next.

Byte map (released sizes; architecture.md section 7)
    global page, 128 tokens, one page number for all sources:
        layers 2, 8, 14 (64 rows each)   row 288 B + index key 68 B
        layer 20 (128 rows)              row 288 B + index key 68 B           together 113,920 B = 128 x 890 B
    window page, 128 tokens, one page number for all layers and draft stages:
        43 x 128 rows of 528 B
Each kind of row is stored as two planes, values and scales, `[rows, bytes]` uint8. Row `r` of page `p` is at
`p * rows_per_page + r` of both planes.

State outside pages, by sequence slot:
    open_groups   [ratio-2 sources, slots, STATE_ROWS, 2, C] fp32: projection and gate of the last positions; an open
                  group of a sequence of odd length is the entry of its last position
    recent_ids    [slots, R] int64: token ids of the last R positions, -1 inside images; n-grams look back. R covers
                  the longest n-gram behind as many tokens as can be taken back
Both are small rings over positions, so that a sequence is rolled back by its length alone: whatever a rejected token
wrote is unreachable and overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS, PageAllocator
from leadline.cache.sequence import Sequence
from leadline.config.layers import LayerPlan
from leadline.config.model import ModelConfig
from leadline.errors import CapacityError
from leadline.formats.rows import PackedRows, RowLayout, compressed_row, index_row, window_row

STATE_ROWS = MAX_ROLLBACK + 1
POISON_BYTE = 0xFF  # NaN as E4M3 and as E8M0


def _plane(num_rows: int, num_bytes: int, device: torch.device, poison: bool) -> Tensor:
    if poison:
        return torch.full((num_rows, num_bytes), POISON_BYTE, dtype=torch.uint8, device=device)
    if device.type == "cpu":  # numpy's zeros are mapped by the operating system on first use: idle pages cost nothing
        return torch.from_numpy(np.zeros((num_rows, num_bytes), dtype=np.uint8))
    return torch.zeros((num_rows, num_bytes), dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class Plane:
    """A tensor [rows, bytes] uint8 of which page `p` is the rows from `p * rows_per_page` on."""

    name: str
    tensor: Tensor
    rows_per_page: int


class RowPool:
    """Rows of one kind for all pages: two byte planes."""

    def __init__(self, layout: RowLayout, num_rows: int, device: torch.device, poison: bool) -> None:
        self.layout = layout
        self.values = _plane(num_rows, layout.value_bytes, device, poison)
        self.scales = _plane(num_rows, layout.scale_bytes, device, poison)
        self.rows = PackedRows(layout, self.values, self.scales)

    def write(self, row_idx_N: Tensor, x_NC: Tensor) -> None:
        """Quantise, pack and store `x_NC` [N, width] bf16 at rows `row_idx_N` int64 (unique)."""
        values, scales = self.layout.pack(x_NC)
        self.values.index_copy_(0, row_idx_N, values)
        self.scales.index_copy_(0, row_idx_N, scales)

    def planes(self, name: str, rows_per_page: int) -> list[Plane]:
        return [
            Plane(name + ".values", self.values, rows_per_page),
            Plane(name + ".scales", self.scales, rows_per_page),
        ]


class KVCache:
    """All cached state of up to `max_sequences` sequences with together `max_tokens` tokens.

    Args:
        max_tokens: tokens that fit, rounded up to whole pages per sequence.
        max_step_tokens: most tokens of one step; window pages for so many are provided besides the live windows.
        max_snapshots: window pages provided for keeping windows of past borders, beside those of running sequences.
        poison: fill with NaN bytes, so that a test sees any read of a row that was never written.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        *,
        max_tokens: int,
        max_sequences: int,
        max_step_tokens: int,
        max_snapshots: int = 0,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        device = torch.device(device)
        self.config = config
        self.device = device
        self.window = config.sliding_window
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        num_pages = -(-max_tokens // PAGE_TOKENS)
        live_pages = -(-(max(self.window, PAGE_TOKENS) + MAX_ROLLBACK) // PAGE_TOKENS) + 1
        num_window_pages = max_sequences * (live_pages + 1) + -(-max_step_tokens // PAGE_TOKENS) + max_snapshots
        self.pages = PageAllocator(num_pages, "KV pages", "max_cache_tokens")
        self.window_pages = PageAllocator(num_window_pages, "window pages", "max_num_seqs")
        self._slots = list(range(max_sequences - 1, -1, -1))

        num_windows = config.num_hidden_layers + config.num_nextn_predict_layers
        window = window_row(config.head_dim)
        self.windows = [RowPool(window, num_window_pages * PAGE_TOKENS, device, poison) for _ in range(num_windows)]
        self.ratios = {s: plan.layers[s].ratio for s in plan.kv_sources}
        row, key = compressed_row(config.head_dim), index_row(config.index_head_dim)
        rows_in = {s: num_pages * (PAGE_TOKENS // r) for s, r in self.ratios.items()}
        self.compressed = {s: RowPool(row, rows_in[s], device, poison) for s in plan.kv_sources}
        self.keys = {s: RowPool(key, rows_in[s], device, poison) for s in plan.kv_sources}
        self.pair_sources = tuple(s for s in plan.kv_sources if self.ratios[s] == 2)
        nan = float("nan") if poison else 0.0
        self.open_groups = torch.full(
            (len(self.pair_sources), max_sequences, STATE_ROWS, 2, config.head_dim), nan, device=device
        )
        recent_rows = MAX_ROLLBACK + max(1, config.engram_max_ngram_size - 1)
        self.recent_ids = torch.full((max_sequences, recent_rows), -1, dtype=torch.int64, device=device)

    def page_planes(self) -> list[Plane]:
        """Every tensor that holds the bytes of global pages.

        With `window_planes` all that has to be moved to go on elsewhere after a page border, which closes every group:
        the ids that n-grams look back at are known to whoever resumes.
        """
        planes = []
        for source, ratio in self.ratios.items():
            for name, pools in (("compressed", self.compressed), ("keys", self.keys)):
                planes += pools[source].planes(f"{name}.{source}", PAGE_TOKENS // ratio)
        return planes

    def window_planes(self) -> list[Plane]:
        """Every tensor that holds the bytes of window pages."""
        return [plane for i, pool in enumerate(self.windows) for plane in pool.planes(f"windows.{i}", PAGE_TOKENS)]

    def open(self) -> Sequence:
        """A new, empty sequence.

        Raises:
            CapacityError: all slots are in use.
        """
        if not self._slots:
            raise CapacityError(f"sequence slots: all {self.max_sequences} in use; end a request or raise max_num_seqs")
        return Sequence(self, self._slots.pop())

    def resume(
        self, ids: Ids[int], length: int, pages: list[int], window_page: int, window_from: tuple[int, ...]
    ) -> Sequence:
        """A sequence that continues at a page border, as if its first `length` tokens had just been processed.

        A border closes every group, and what comes after it looks back at most one window: the border's pages and its
        last window page are all there is to restore. Takes references of its own; the pages stay shared and are never
        written, since a sequence only writes at and beyond its length and is not truncated below `length`.

        Args:
            ids: the tokens so far, at least `length`; inside images any negative number.
            length: a multiple of PAGE_TOKENS, above 0. pages: one for each 128 tokens.
            window_page, window_from: as a `WindowSnapshot` of this border holds them.
        Raises:
            CapacityError: all slots are in use.
        """
        assert length > 0, "resume: nothing to resume"
        assert length == len(pages) * PAGE_TOKENS, f"resume: {len(pages)} pages for {length} tokens"
        sequence = self.open()
        for page in pages:
            self.pages.share(page)
        self.window_pages.share(window_page)
        sequence.restore(length, list(pages), window_page, window_from)
        recent_rows = self.recent_ids.shape[1]
        positions = range(max(0, length - recent_rows), length)
        recent = torch.tensor([max(-1, ids[p]) for p in positions], dtype=torch.int64, device=self.device)
        self.recent_ids[sequence.slot, torch.tensor([p % recent_rows for p in positions])] = recent
        return sequence

    def give_back_slot(self, slot: int) -> None:
        self._slots.append(slot)

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)
