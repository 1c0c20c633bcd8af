"""Attention over gathered rows: the window and the selected compressed rows under one softmax with a sink."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.formats.rows import Rows
from leadline.ops import dispatch
from leadline.ops.reference import sparse_attention as reference


def sparse_attention(
    q_THC: Tensor,
    window: Rows,
    window_idx_TW: Tensor,
    selected: Rows | None,
    selected_idx_TK: Tensor | None,
    sink_H: Tensor,
    scale: float,
    *,
    impl: str | None = None,
) -> Tensor:
    """softmax(scale * q . rows, sink) . rows over the rows that each query names; a row is key and value at once.

    Args:
        q_THC: bf16 [T, H, C], rotated.
        window: rows of width C; window_idx_TW: int64 or int32 [T, W], rows of `window`, -1 for none.
        selected, selected_idx_TK: the same for the selected rows, [T, K]; both None where a layer has none.
            A pool holds at least one row, which stands in where a list says -1.
        sink_H: fp32 [H], one more logit per head: not scaled, and without a value.
        scale: C ** -0.5 in the model.
    Returns: bf16 [T, H, C], in the rotated frame of the rows.
    Edge cases: zero queries; -1 anywhere, contributing nothing (no row content reaches the result, NaN included);
        a query without any index gives exact zeros; an index named twice, or by both lists, counts twice.
        There is no mask besides the indices: causality is theirs.
    Numerics: logits are fp32 products of bf16 values, times `scale`. Indices count in blocks of 64 over window, then
        selected; probabilities are relative to the running maximum of their block, which starts at -1e30, and are
        rounded to bf16 for the values but not for the denominator. Sums in fp32, one rounding to bf16 at the end.
        A query's result does not depend on other queries of the call, bitwise; it may depend on W and K.
    Memory: a fixed number of queries is gathered at a time, a few tens of MiB.
    Raises: OperatorError on shapes or dtypes that do not fit.
    Source: architecture.md 4.9, 9 (item 15).
    """
    _check(q_THC, window_idx_TW, selected, selected_idx_TK, sink_H)
    out: Tensor = dispatch.choose("sparse_attention", impl, q_THC.device)(
        q_THC, window, window_idx_TW, selected, selected_idx_TK, sink_H, scale
    )
    return out


def _check(
    q_THC: Tensor, window_idx_TW: Tensor, selected: Rows | None, selected_idx_TK: Tensor | None, sink_H: Tensor
) -> None:
    if q_THC.dim() != 3 or q_THC.dtype is not torch.bfloat16:
        raise OperatorError(
            f"sparse_attention q_THC: expected bf16 [T, H, C], got {q_THC.dtype} {list(q_THC.shape)}; cast it"
        )
    if (selected is None) != (selected_idx_TK is None):
        raise OperatorError("sparse_attention selected, selected_idx_TK: expected both or neither, got one; pass both")
    for name, idx in (("window_idx_TW", window_idx_TW), ("selected_idx_TK", selected_idx_TK)):
        if idx is not None and (idx.dim() != 2 or idx.shape[0] != q_THC.shape[0] or idx.is_floating_point()):
            raise OperatorError(
                f"sparse_attention {name}: expected int64 [{q_THC.shape[0]}, N], got {idx.dtype} {list(idx.shape)}; "
                "pass one list of rows per query"
            )
    if sink_H.shape != q_THC.shape[1:2] or sink_H.dtype is not torch.float32:
        raise OperatorError(
            f"sparse_attention sink_H: expected fp32 [{q_THC.shape[1]}], got {sink_H.dtype} {list(sink_H.shape)}; "
            "pass one value per head"
        )


dispatch.register("sparse_attention", "reference", reference.sparse_attention)
