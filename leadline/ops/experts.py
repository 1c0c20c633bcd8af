"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.linear import Weight
from leadline.ops.reference import experts as reference


class ExpertWeights:
    """The experts of one layer. w1 and w3 read the same input, so they are stacked into one product.

    w13: per expert [2F, D], w1's rows first; w2: per expert [D, F].
    """

    __slots__ = ("w2", "w13")

    def __init__(self, w1: Iterable[Weight], w3: Iterable[Weight], w2: Iterable[Weight]) -> None:
        """w1, w3: [F, D] each, w2: [D, F], one per expert in order; iterated once, so generators keep the peak low."""
        self.w13 = [Weight.stack((gate, up)) for gate, up in zip(w1, w3, strict=True)]
        self.w2 = list(w2)
        if len(self.w13) != len(self.w2):
            raise OperatorError(f"experts: expected as many w2 as w1, got {len(self.w2)} and {len(self.w13)}")


def moe(
    xq_TD: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    experts: ExpertWeights,
    swiglu_limit: float,
    *,
    impl: str | None = None,
) -> Tensor:
    """sum over a token's experts of w2 quant(bf16(silu(min(w1 x, L)) * clamp(w3 x, -L, L) * weight)).

    Args:
        xq_TD: [T, D] bf16, act-quantised. expert_TK: int64 [T, K], distinct ids per token. weight_TK: fp32 [T, K].
        swiglu_limit: L. The gate branch is clamped from above only.
    Returns: fp32 [T, D]. T = 0 is fine. A shared expert is one that every token names, with weight 1.
    Numerics: products round to bf16, SwiGLU and weighting in fp32, one rounding to bf16 before the quantisation; the
        sum is fp32 in ascending expert id. Bitwise independent of other tokens. Reads expert_TK on the host.
    Memory: about 20 bytes for each of T * K * F values.
    Raises: OperatorError on a dtype or shape mismatch.
    Source: architecture.md 4.12.
    """
    if xq_TD.dtype is not torch.bfloat16 or expert_TK.shape != weight_TK.shape or len(expert_TK) != len(xq_TD):
        raise OperatorError(
            f"moe: expected bf16 x [T, D] with experts and weights [T, K], got {xq_TD.dtype} {list(xq_TD.shape)}, "
            f"{list(expert_TK.shape)} and {list(weight_TK.shape)}; route the same tokens"
        )
    out: Tensor = dispatch.choose("moe", impl, xq_TD.device)(
        xq_TD, expert_TK, weight_TK, experts.w13, experts.w2, swiglu_limit
    )
    return out


dispatch.register("moe", "reference", reference.moe)
