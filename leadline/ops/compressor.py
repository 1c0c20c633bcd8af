"""Two tokens become one compressed latent."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import compressor as reference


def pool_pairs(c_N2C: Tensor, g_N2C: Tensor, *, impl: str | None = None) -> Tensor:
    """Per channel the mean of the two values c, weighted by the softmax over the two gates g.

    Args: c_N2C, g_N2C: [N, 2, C] fp32, projections and gates of tokens 2j and 2j+1 in this order.
    Returns: fp32 [N, C], to be rounded to bf16 and normed by the caller. N = 0 is fine.
    Numerics: fp32; bitwise independent of other groups.
    Raises: OperatorError on a dtype or shape mismatch.
    Source: architecture.md 4.6.
    """
    if c_N2C.dtype is not torch.float32 or c_N2C.shape != g_N2C.shape or c_N2C.shape[1] != 2:
        raise OperatorError(
            f"pool_pairs: expected fp32 c and g [N, 2, C], got {c_N2C.dtype} {list(c_N2C.shape)} and "
            f"{list(g_N2C.shape)}; keep incomplete groups as state"
        )
    out: Tensor = dispatch.choose("pool_pairs", impl, c_N2C.device)(c_N2C, g_N2C)
    return out


dispatch.register("pool_pairs", "reference", reference.pool_pairs)
