"""Index selection in torch: scores tile by tile, the best rows kept on the way.

J index heads, X index width, T queries, N rows scored together, K selected rows, B candidate blocks.

A score is fp32; what is ranked is one int64 per (query, row) that holds the score and the row number, so no two are
equal and the choice does not depend on how `topk` treats ties. A score depends on its query and its row alone: fp32
products are bitwise the same for every number of query rows that is a multiple of 4 and every width that is a multiple
of 64, and only such shapes are used (heads and rows are padded).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from leadline.errors import OperatorError

if TYPE_CHECKING:
    from leadline.ops.select import KeyRows

BUDGET_BYTES = 256 * 2**20
_TILE = 2048  # rows of one product: keys and products stay in the cache of a core
_SPAN = 65536  # rows ranked at once, for few queries; topk is cheapest on long lists
_ALIGN = 64  # widths of products
_HEADS = 8  # query rows of products: fewer are summed in another order on some machines

# Elements of the temporaries. Together they stay below BUDGET_BYTES for every T and M: queries in fp32, scores and the
# two lists of best keys with their sort take 16 + 16 + 2 * 16 + 64 MiB at most, all others a few MiB.
_SCORES = 2**22
_BEST = 2**21
_PRODUCTS = 2**19
_RANKED = 2**18

# Rank of a row: the bits of fp64(score), whose low 29 bits are free, made monotone as an integer, minus twice the row.
# Twice, because -0 comes out one below +0 and must not fall behind a later row that scores +0.
_ROW_BITS = (1 << 29) - 1
_NO_ROW = (1 << 28) - 1  # beyond every visible row
_SIGN_BIT_CLEAR = (1 << 63) - 1
_INF = float("inf")


def select_rows(q_TJX: Tensor, head_weight_TJ: Tensor, keys: KeyRows, visible_T: Tensor, k: int) -> Tensor:
    visible = _visible_counts(visible_T, keys)
    if max(visible, default=0) <= k:
        return _first(visible_T, k)
    if len(visible) == 1 and visible[0] <= _TILE:
        return _best_of(_score_one(q_TJX, head_weight_TJ, keys.span(0, visible[0], q_TJX.device)), k)
    out = []
    for part in _query_tiles(q_TJX, k):
        best = _Best(k)
        for start, score_TN in _scan(q_TJX[part], head_weight_TJ[part], keys, visible[part], 1):
            _hide(score_TN, start, visible[part], visible_T[part])
            best.offer(score_TN, _row_numbers(start, score_TN))
        out.append(best.finish(visible_T[part]))
    return torch.cat(out)


def select_rows_and_blocks(
    q_TJX: Tensor, head_weight_TJ: Tensor, keys: KeyRows, visible_T: Tensor, k: int, num_blocks: int, block_size: int
) -> tuple[Tensor, Tensor]:
    visible = _visible_counts(visible_T, keys)
    visible_blocks_T = (visible_T + (block_size - 1)) // block_size
    if max(visible, default=0) <= num_blocks * block_size:
        return select_rows(q_TJX, head_weight_TJ, keys, visible_T, k), _first(visible_blocks_T, num_blocks)
    if len(visible) == 1 and visible[0] <= _TILE:
        score_1N = _score_one(q_TJX, head_weight_TJ, keys.span(0, visible[0], q_TJX.device))
        block_1B = pad(score_1N, (0, -visible[0] % block_size), value=-_INF).view(1, -1, block_size).amax(2)
        block_1B[0, -1] = _INF
        return _best_of(score_1N, k), _best_of(block_1B, num_blocks)
    rows, blocks = [], []
    for part in _query_tiles(q_TJX, max(k, num_blocks)):
        best_row, best_block = _Best(k), _Best(num_blocks)
        for start, score_TN in _scan(q_TJX[part], head_weight_TJ[part], keys, visible[part], block_size):
            _hide(score_TN, start, visible[part], visible_T[part])
            best_row.offer(score_TN, _row_numbers(start, score_TN))
            if score_TN.shape[1] % block_size:
                score_TN = pad(score_TN, (0, -score_TN.shape[1] % block_size), value=-_INF)
            block_TB = score_TN.view(score_TN.shape[0], -1, block_size).amax(2)
            number_B = _row_numbers(start // block_size, block_TB)
            block_TB.masked_fill_(number_B == visible_blocks_T[part, None] - 1, _INF)
            best_block.offer(block_TB, number_B)
        rows.append(best_row.finish(visible_T[part]))
        blocks.append(best_block.finish(visible_blocks_T[part]))
    return torch.cat(rows), torch.cat(blocks)


def select_in_blocks(
    q_TJX: Tensor,
    head_weight_TJ: Tensor,
    keys: KeyRows,
    visible_T: Tensor,
    block_idx_TB: Tensor,
    block_size: int,
    k: int,
) -> Tensor:
    visible = _visible_counts(visible_T, keys)
    B = block_idx_TB.shape[1]
    # Distinct blocks that hold as many rows as are visible hold all of them: nothing is restricted.
    if max(visible, default=0) <= B * block_size and bool(((block_idx_TB >= 0).sum(1) * block_size >= visible_T).all()):
        return select_rows(q_TJX, head_weight_TJ, keys, visible_T, k)
    offset_R = torch.arange(block_size, device=q_TJX.device)
    if len(visible) == 1 and B * block_size <= _TILE:
        row_N = (block_idx_TB[0].long().sort().values.unsqueeze(1) * block_size + offset_R).flatten()
        row_N = row_N[(row_N >= 0) & (row_N < visible_T)]
        return _best_of(_score_one(q_TJX, head_weight_TJ, keys.gather(row_N)), k, row_N)
    step = max(1, min(B, _SPAN // block_size))
    out = []
    for part in _query_tiles(q_TJX, max(k, step * block_size)):
        best = _Best(k)
        scorer = _Scorer(q_TJX[part], head_weight_TJ[part])
        for b in range(0, B, step):
            block_TB = block_idx_TB[part, b : b + step].long()
            row_TN = (block_TB[:, :, None] * block_size + offset_R).flatten(1)
            hidden_TN = (row_TN < 0) | (row_TN >= visible_T[part, None])
            safe_TN = row_TN.masked_fill(hidden_TN, 0)
            score_TN = q_TJX.new_full(row_TN.shape, -_INF, dtype=torch.float32)
            for i, num_visible in enumerate(visible[part]):
                if num_visible > 0:
                    for a in range(0, row_TN.shape[1], _TILE):
                        scorer.load(keys.gather(safe_TN[i, a : a + _TILE]))
                        scorer.score(i, i + 1, out_TN=score_TN[i : i + 1, a : a + _TILE])
            score_TN.masked_fill_(hidden_TN, -_INF)
            best.offer(score_TN, row_TN.masked_fill_(hidden_TN, _NO_ROW))
        out.append(best.finish(visible_T[part]))
    return torch.cat(out)


def _score_one(q_1JX: Tensor, head_weight_1J: Tensor, row_NX: Tensor) -> Tensor:
    """fp32 [1, N] for one query and few rows: the products of `_Scorer`, without its tiles."""
    scorer = _Scorer(q_1JX, head_weight_1J)
    scorer.load(row_NX)
    product_JN = torch.mm(scorer.q, scorer.rows.t()).relu_()
    return torch.bmm(scorer.head_weight_T1J, product_JN.unsqueeze(0))[:, 0, : scorer.num_rows]


def _best_of(score_1N: Tensor, k: int, row_N: Tensor | None = None) -> Tensor:
    """int32 [1, k]: the k best of one query's scores, as `_Best` finds them; row_N: their rows, ascending."""
    row_1K = score_1N.sort(descending=True, stable=True).indices[:, :k]
    if row_N is not None:
        row_1K = row_N[row_1K]
    row_1K = row_1K.sort().values.int()
    missing = k - row_1K.shape[1]
    return pad(row_1K, (0, missing), value=-1) if missing else row_1K


class _Scorer:
    """Scores of the queries of one tile against the rows loaded last."""

    def __init__(self, q_TJX: Tensor, head_weight_TJ: Tensor) -> None:
        missing = -q_TJX.shape[1] % _HEADS
        if missing:  # heads that score nothing
            q_TJX, head_weight_TJ = pad(q_TJX, (0, 0, 0, missing)), pad(head_weight_TJ, (0, missing))
        _, self.num_heads, width = q_TJX.shape
        self.q = q_TJX.float().view(-1, width)
        self.head_weight_T1J = head_weight_TJ.unsqueeze(1)
        self.rows = self.q.new_empty(0, width)
        self.products = self.q.new_empty(0)  # reused: fresh memory costs as much as the product

    def load(self, row_NX: Tensor) -> None:
        """Widen bf16 rows to fp32, in place of the ones before; the rest of the width is not read by anyone."""
        self.num_rows = row_NX.shape[0]
        self.width = -(-self.num_rows // _ALIGN) * _ALIGN
        if self.rows.shape[0] < self.width:
            self.rows = self.rows.new_empty(self.width, row_NX.shape[1])
        self.rows[: self.num_rows].copy_(row_NX)

    def group_size(self) -> int:
        """Queries that go into one product with the loaded rows."""
        return max(1, _PRODUCTS // (self.num_heads * self.width))

    def score(self, first: int, last: int, out_TN: Tensor) -> None:
        """sum over heads of w * relu(q . k) of queries first..last-1, into out_TN [last - first, loaded rows]."""
        q = self.q[first * self.num_heads : last * self.num_heads]
        size = q.shape[0] * self.width
        if self.products.shape[0] < size:
            self.products = self.q.new_empty(size)
        product = self.products[:size].view(-1, self.width)
        torch.mm(q, self.rows[: self.width].t(), out=product)
        product_TJN = product.relu_().view(last - first, self.num_heads, self.width)
        out_TN.copy_(torch.bmm(self.head_weight_T1J[first:last], product_TJN)[:, 0, : self.num_rows])


def _scan(
    q_TJX: Tensor, head_weight_TJ: Tensor, keys: KeyRows, visible: list[int], unit: int
) -> Iterator[tuple[int, Tensor]]:
    """Scores of all rows that any of the queries sees, as (first row, fp32 [T, N]) in ascending order.

    First rows are multiples of `unit`. Rows that a query does not see hold anything.
    """
    scorer = _Scorer(q_TJX, head_weight_TJ)
    T, longest = len(visible), max(visible)
    tile = max(unit, _TILE // unit * unit)
    span = max(1, min(_SPAN, _SCORES // T) // tile) * tile
    for start in range(0, longest, span):
        score_TN = scorer.q.new_empty(T, min(span, longest - start))
        for a in range(start, start + score_TN.shape[1], tile):
            b = min(a + tile, longest)
            scorer.load(keys.span(a, b, q_TJX.device))
            size = scorer.group_size()
            for first in range(0, T, size):
                last = min(first + size, T)
                part_TN = score_TN[first:last, a - start : b - start]
                if max(visible[first:last]) > a:
                    scorer.score(first, last, part_TN)
                else:
                    part_TN.fill_(-_INF)
        yield start, score_TN


class _Best:
    """The `keep` best of all rows offered so far, for every query of a tile."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.rank_TK: Tensor | None = None

    def offer(self, score_TN: Tensor, row_number: Tensor) -> None:
        """row_number: int64 [N] or [T, N], at most _NO_ROW, none offered before (_NO_ROW apart)."""
        T, N = score_TN.shape
        size = max(1, _RANKED // N)
        twice = row_number * 2
        parts = []
        for first in range(0, T, size):
            bits = score_TN[first : first + size].double().view(torch.int64)
            flip = (bits >> 63).bitwise_and_(_SIGN_BIT_CLEAR)
            rank = bits.bitwise_xor_(flip).sub_(twice if twice.dim() == 1 else twice[first : first + size])
            if self.rank_TK is not None:
                rank = torch.cat((self.rank_TK[first : first + size], rank), dim=1)
            parts.append(rank.topk(min(self.keep, rank.shape[1]), sorted=False).values)
        self.rank_TK = parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self, visible_T: Tensor) -> Tensor:
        """int32 [T, keep]: the rows ascending, then -1; hidden rows are numbered beyond the visible, so come last."""
        if self.rank_TK is None:  # nothing was offered: no query of the tile sees a row, or there are no blocks
            return visible_T.new_full((visible_T.shape[0], self.keep), -1, dtype=torch.int32)
        row_TK = self.rank_TK.neg_().bitwise_and_(_ROW_BITS).bitwise_right_shift_(1).sort().values
        row_TK = torch.where(row_TK < visible_T[:, None], row_TK, -1).int()
        missing = self.keep - row_TK.shape[1]
        return pad(row_TK, (0, missing), value=-1) if missing else row_TK


def _visible_counts(visible_T: Tensor, keys: KeyRows) -> list[int]:
    visible: list[int] = visible_T.tolist()
    if keys.physical_M is not None and keys.physical_M.shape[0] < max(visible, default=0):
        raise OperatorError(
            f"physical_M: expected at least {max(visible)} rows, as many as a query sees, got "
            f"{keys.physical_M.shape[0]}; map every visible row"
        )
    return visible


def _query_tiles(q_TJX: Tensor, keep: int) -> Iterator[slice]:
    T, J, X = q_TJX.shape
    size = max(1, min(_SCORES // max(J * X, _TILE), _BEST // keep))
    for first in range(0, T, size):
        yield slice(first, first + size)


def _first(count_T: Tensor, k: int) -> Tensor:
    """int32 [T, k]: 0 .. count-1, then -1."""
    number_K = torch.arange(k, dtype=torch.int32, device=count_T.device)
    return torch.where(number_K < count_T[:, None], number_K, -1)


def _row_numbers(start: int, score_TN: Tensor) -> Tensor:
    return torch.arange(start, start + score_TN.shape[1], device=score_TN.device)


def _hide(score_TN: Tensor, start: int, visible: list[int], visible_T: Tensor) -> None:
    """-inf for rows beyond the visible ones: they lose against every visible row, equal scores included."""
    if min(visible) < start + score_TN.shape[1]:
        score_TN.masked_fill_(_row_numbers(start, score_TN) >= visible_T[:, None], -_INF)
