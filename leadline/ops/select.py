"""Index selection: which compressed rows, and which candidate blocks, each query attends to.

J index heads, X index width, T queries, M rows of the sequence, K = k selected rows, B candidate blocks.

The score of row j is sum_h w_h * relu(q_h . k_j) in fp32. All three operators rank by it, newest row or not, and break
ties by the lowest row. One sequence per call: rows are numbered from 0 within it.

    select_rows             the k best visible rows
    select_rows_and_blocks  the same, and the best blocks of rows by their best row; the newest block always
    select_in_blocks        the k best visible rows inside given blocks

Common contract
    q_TJX: bf16 [T, J, X], rotated, quantised and restored (architecture.md 3.3).
    head_weight_TJ: fp32 [T, J], scaled; any sign.
    keys: KeyRows, bf16 values of width X once gathered. Rows at or beyond max(visible_T) are never read.
    visible_T: int64 [T], rows 0 .. visible-1 of each query, 0 or more, below 2^28, in any order.
Edge cases: zero queries give [0, k]; queries that see nothing give -1 only; k may exceed the rows.
Numerics: products, rectification and sum over heads in fp32, not rounded to bf16 as the published code does. A
    selection depends on the query, its visible rows and k alone, bitwise: not on neighbours, chunks, T or the
    physical order.
    If a visible row scores NaN, the ids are in range and distinct, and nothing else is promised for that query.
Memory: temporaries stay within BUDGET_BYTES whatever T and M; nothing of size T * M is built.
Time: linear in the rows scored. No row is scored if every query sees at most k rows, or if blocks restrict nothing.
Raises: OperatorError on shapes, dtypes or counts that do not fit, and if physical_M is shorter than the visible rows.
Source: architecture.md 4.7, 4.8, 9 (items 2 to 5, 23).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.formats.rows import Rows
from leadline.ops import dispatch
from leadline.ops.reference import select as reference

BUDGET_BYTES = reference.BUDGET_BYTES


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Index keys of one sequence: a pool of rows, and where in the pool each row of the sequence lies."""

    rows: Rows
    physical_M: Tensor | None = None  # int64 [M]: pool row of every row; None: the pool holds them in order

    def span(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Rows start .. stop-1 as bf16 [stop - start, X]; device: where the pool is."""
        if self.physical_M is None:
            return self.rows.gather(torch.arange(start, stop, device=device))
        return self.rows.gather(self.physical_M[start:stop])

    def gather(self, row_N: Tensor) -> Tensor:
        """Rows by number, int64 [N], as bf16 [N, X]."""
        return self.rows.gather(row_N if self.physical_M is None else self.physical_M.index_select(0, row_N))


def select_rows(
    q_TJX: Tensor, head_weight_TJ: Tensor, keys: KeyRows, visible_T: Tensor, k: int, *, impl: str | None = None
) -> Tensor:
    """The k best visible rows of each query: int32 [T, k], ascending, -1 at the end if fewer are visible."""
    _check("select_rows", q_TJX, head_weight_TJ, keys, visible_T, k=k)
    out: Tensor = dispatch.choose("select_rows", impl, q_TJX.device)(q_TJX, head_weight_TJ, keys, visible_T, k)
    return out


def select_rows_and_blocks(
    q_TJX: Tensor,
    head_weight_TJ: Tensor,
    keys: KeyRows,
    visible_T: Tensor,
    k: int,
    num_blocks: int,
    block_size: int,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best visible rows, and the best `num_blocks` blocks of `block_size` rows.

    Returns: row_idx_TK as `select_rows` gives it (not restricted to the blocks), and block_idx_TB int32
        [T, num_blocks], ascending, -1 at the end. A block ranks by its best visible row, equal blocks by the lowest
        number; the block of the newest visible row is always in.
    """
    name = "select_rows_and_blocks"
    _check(name, q_TJX, head_weight_TJ, keys, visible_T, k=k, num_blocks=num_blocks, block_size=block_size)
    out: tuple[Tensor, Tensor] = dispatch.choose(name, impl, q_TJX.device)(
        q_TJX, head_weight_TJ, keys, visible_T, k, num_blocks, block_size
    )
    return out


def select_in_blocks(
    q_TJX: Tensor,
    head_weight_TJ: Tensor,
    keys: KeyRows,
    visible_T: Tensor,
    block_idx_TB: Tensor,
    block_size: int,
    k: int,
    *,
    impl: str | None = None,
) -> Tensor:
    """The k best visible rows inside the blocks of each query: int32 [T, k], ascending, -1 at the end.

    block_idx_TB: int32 or int64 [T, B], distinct blocks of a query in any order, -1 for none; blocks may reach beyond
        the visible rows. Only rows of the blocks are gathered and scored.
    """
    name = "select_in_blocks"
    _check(name, q_TJX, head_weight_TJ, keys, visible_T, k=k, block_size=block_size)
    if block_idx_TB.dim() != 2 or block_idx_TB.shape[0] != q_TJX.shape[0] or block_idx_TB.is_floating_point():
        raise OperatorError(
            f"{name} block_idx_TB: expected int32 [{q_TJX.shape[0]}, B], got {block_idx_TB.dtype} "
            f"{list(block_idx_TB.shape)}; pass one list of blocks per query"
        )
    out: Tensor = dispatch.choose(name, impl, q_TJX.device)(
        q_TJX, head_weight_TJ, keys, visible_T, block_idx_TB, block_size, k
    )
    return out


def _check(name: str, q_TJX: Tensor, head_weight_TJ: Tensor, keys: KeyRows, visible_T: Tensor, **counts: int) -> None:
    if q_TJX.dim() != 3 or q_TJX.dtype is not torch.bfloat16:
        raise OperatorError(
            f"{name} q_TJX: expected bf16 [T, J, X], got {q_TJX.dtype} {list(q_TJX.shape)}; quantise and restore first"
        )
    if head_weight_TJ.shape != q_TJX.shape[:2] or head_weight_TJ.dtype is not torch.float32:
        raise OperatorError(
            f"{name} head_weight_TJ: expected fp32 {list(q_TJX.shape[:2])}, got {head_weight_TJ.dtype} "
            f"{list(head_weight_TJ.shape)}; scale in fp32 before calling"
        )
    if visible_T.shape != q_TJX.shape[:1] or visible_T.dtype is not torch.int64:
        raise OperatorError(
            f"{name} visible_T: expected int64 [{q_TJX.shape[0]}], got {visible_T.dtype} {list(visible_T.shape)}; "
            "pass one count per query"
        )
    if keys.physical_M is not None and (keys.physical_M.dim() != 1 or keys.physical_M.is_floating_point()):
        raise OperatorError(
            f"{name} physical_M: expected int64 [M], got {keys.physical_M.dtype} {list(keys.physical_M.shape)}; "
            "pass one pool row per row"
        )
    for what, count in counts.items():
        if count < 1:
            raise OperatorError(f"{name} {what}: expected 1 or more, got {count}; check the configuration")


dispatch.register("select_rows", "reference", reference.select_rows)
dispatch.register("select_rows_and_blocks", "reference", reference.select_rows_and_blocks)
dispatch.register("select_in_blocks", "reference", reference.select_in_blocks)
