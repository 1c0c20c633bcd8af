"""Sparse attention in torch.

T queries, H heads, C head width, N = W + K indices, Z blocks of 64 indices.

The running softmax of architecture.md 4.9 rounds p to bf16 relative to the maximum up to its own block, and rescales
what is accumulated when a later block raises it. Here all maxima are known first: with M_z the maximum up to block z,
the output is sum_n c_z(n) * bf16(exp(l_n - M_z(n))) * v_n over the denominator, c_z = exp(M_z - M_last). The same
values are rounded to bf16 at the same place; two batched products do the work. Every query has its own products of
fixed shape, so its result does not depend on the tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from leadline.ops.reference.scalar import scalar

if TYPE_CHECKING:
    from leadline.formats.rows import Rows

_BLOCK = 64
_START = -1e30  # of the running maximum: finite, so that a block without indices subtracts cleanly
_TINY = 1e-30  # below every denominator of a query with an index, which is at least 1
_TILE = 2**22  # fp32 elements of the gathered rows of one tile of queries, or of its logits


def sparse_attention(
    q_THC: Tensor,
    window: Rows,
    window_idx_TW: Tensor,
    selected: Rows | None,
    selected_idx_TK: Tensor | None,
    sink_H: Tensor,
    scale: float,
) -> Tensor:
    T, H, C = q_THC.shape
    sources = [(window, window_idx_TW)]
    if selected is not None and selected_idx_TK is not None:
        sources.append((selected, selected_idx_TK))
    N = sum(idx.shape[1] for _, idx in sources)
    size = max(1, _TILE // max(1, N * max(C, H)))
    if 0 < T <= size:
        return _attend(q_THC, sources, sink_H, scale, N).bfloat16()
    out_THC = torch.empty_like(q_THC)
    for first in range(0, T, size):
        part = slice(first, first + size)
        tile = [(rows, idx[part]) for rows, idx in sources]
        out_THC[part] = _attend(q_THC[part], tile, sink_H, scale, N)
    return out_THC


def _attend(q_THC: Tensor, sources: list[tuple[Rows, Tensor]], sink_H: Tensor, scale: float, N: int) -> Tensor:
    """fp32 [T, H, C]."""
    T, H, C = q_THC.shape
    idx_TN = torch.cat([idx_TN for _, idx_TN in sources], dim=1)
    some_absent = bool((idx_TN < 0).any())
    row_TNC = q_THC.new_empty(T, N, C, dtype=torch.float32)
    parts = [rows.gather(idx_TN.clamp_min(0) if some_absent else idx_TN) for rows, idx_TN in sources]
    torch.cat(parts, dim=1, out=row_TNC)
    logit_THN = torch.bmm(q_THC.float(), row_TNC.transpose(1, 2)).mul_(scalar(scale))
    if some_absent:
        absent_TN = idx_TN < 0
        # Row 0 stands in for absent indices and may never have been written: 0 * NaN must not reach the sum.
        row_TNC.masked_fill_(absent_TN.unsqueeze(2), 0.0)
        logit_THN.masked_fill_(absent_TN.unsqueeze(1), -torch.inf)
    if N % _BLOCK or N == 0:
        logit_THN = pad(logit_THN, (0, max(_BLOCK, -(-N // _BLOCK) * _BLOCK) - N), value=-torch.inf)
    logit_THZB = logit_THN.view(T, H, -1, _BLOCK)
    max_THZ = logit_THZB.amax(3).cummax(2).values.clamp_min_(_START)
    p_THZB = logit_THZB.sub_(max_THZ.unsqueeze(3)).exp_()
    last_TH1 = max_THZ[:, :, -1:]
    rescale_THZ = (max_THZ - last_TH1).exp_()
    total_TH1 = (p_THZB.sum(3).mul_(rescale_THZ)).sum(2, keepdim=True)
    total_TH1 += (sink_H[:, None] - last_TH1).exp_()
    p_THN = (p_THZB.bfloat16() * rescale_THZ.unsqueeze(3)).view(T, H, -1)[:, :, :N]
    return torch.bmm(p_THN, row_TNC).div_(total_TH1.clamp_min_(_TINY))
