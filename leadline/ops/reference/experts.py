"""Routed and shared experts in torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.formats.fp8 import restore_activation
from leadline.ops.linear import Weight
from leadline.ops.reference.linear import linear


def moe(
    xq_TD: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    w13: Sequence[Weight],
    w2: Sequence[Weight],
    swiglu_limit: float,
) -> Tensor:
    T, K = expert_TK.shape
    if T == 0:
        return xq_TD.float()
    # The T*K pairs (token, expert), sorted by expert: each expert sees its rows as one block, and everything between
    # the products runs once over all of them.
    if T == 1:
        expert_N, order_N = expert_TK[0].sort()
        blocks = [(e, i, i + 1) for i, e in enumerate(expert_N.tolist())]
        hidden = [linear(xq_TD, w13[e].dense_NK()) for e, _, _ in blocks]
    else:
        order_N = expert_TK.reshape(-1).argsort(stable=True)
        blocks = _blocks(expert_TK, len(w13))
        x_ND = xq_TD.index_select(0, order_N // K)
        hidden = [linear(x_ND[start:end], w13[e].dense_NK()) for e, start, end in blocks]
    weight_N1 = weight_TK.reshape(-1).index_select(0, order_N).unsqueeze(-1)
    v_NF = _swiglu(torch.cat(hidden), swiglu_limit).mul_(weight_N1)
    vq_NF = restore_activation(v_NF.bfloat16())
    y_ND = torch.cat([linear(vq_NF[start:end], w2[e].dense_NK()) for e, start, end in blocks])
    if T > 1:
        place_N = torch.empty_like(order_N)
        place_N[order_N] = torch.arange(T * K, device=order_N.device)
        # Places ascend with the expert, so sorting a token's places puts its outputs in ascending expert order.
        y_ND = y_ND.index_select(0, place_N.view(T, K).sort(dim=1).values.reshape(-1))
    y_TKD = y_ND.view(T, K, -1)
    out_TD = y_TKD[:, 0].float()
    for k in range(1, K):
        out_TD += y_TKD[:, k]
    return out_TD


def shared_expert(xq_TD: Tensor, w1: Weight, w3: Weight | None, w2: Weight, swiglu_limit: float) -> Tensor:
    hidden = linear(xq_TD, w1.dense_NK())
    if w3 is not None:
        hidden = torch.cat((hidden, linear(xq_TD, w3.dense_NK())), dim=-1)
    return linear(restore_activation(_swiglu(hidden, swiglu_limit).bfloat16()), w2.dense_NK())


def _blocks(expert_TK: Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) of every expert that has rows, ascending."""
    ends = expert_TK.reshape(-1).bincount(minlength=num_experts).cumsum(0).tolist()
    return [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if end > start]


def _swiglu(hidden_NF2: Tensor, limit: float) -> Tensor:
    """silu(min(g, limit)) * clamp(u, -limit, limit) of [N, g | u] bf16, in fp32."""
    g_NF, u_NF = hidden_NF2.float().chunk(2, dim=-1)
    g_NF = g_NF.clamp_max(limit)
    # g / (1 + exp(-g)) rather than torch's silu: that one treats the last elements of a call differently.
    return g_NF.div(g_NF.neg().exp_().add_(1)).mul_(u_NF.clamp(-limit, limit))
