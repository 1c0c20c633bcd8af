"""RMSNorm over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import norm as reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, impl: str | None = None) -> Tensor:
    """bf16(weight * (x * rsqrt(mean(x^2) + eps))).

    Args:
        x: [..., D] bf16 or fp32.
        weight: [D] bf16 or fp32; fp32 (widened once by the caller) is faster.
        eps: 1e-20 in the text model, where an all-zero row gives zeros; 1e-6 in vision.
    Returns: bf16 [..., D].
    Numerics: fp32 throughout, one rounding at the end; a row does not depend on other rows, bitwise.
    Raises: OperatorError on a width mismatch or other dtypes.
    Source: architecture.md 4.2.
    """
    if weight.shape[0] != x.shape[-1]:
        raise OperatorError(
            f"rms_norm weight: expected [{x.shape[-1]}], got {list(weight.shape)}; check the layer's norm"
        )
    if x.dtype is not torch.bfloat16 and x.dtype is not torch.float32:
        raise OperatorError(f"rms_norm x: expected bf16 or fp32, got {x.dtype}; cast before calling")
    out: Tensor = dispatch.choose("rms_norm", impl, x.device)(x, weight, eps)
    return out


dispatch.register("rms_norm", "reference", reference.rms_norm)
