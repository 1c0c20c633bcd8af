"""Rotary embedding: adjacent pairs of the last channels turn by position * frequency."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.config.model import YarnConfig
from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import rope as reference


def frequencies(rope_dim: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """f_i = theta^(-2i / rope_dim), stretched by YaRN where given; no extra attention scale.

    Returns: fp32 [rope_dim / 2] on CPU. YaRN keeps the fast pairs, divides the slow ones by `factor` and blends
    linearly between the pairs that make beta_fast and beta_slow turns over the original context.
    Source: architecture.md 4.3.
    """
    return reference.frequencies(rope_dim, theta, yarn)


def turns(position_T: Tensor, freqs: Tensor) -> Tensor:
    """e^(i * position * frequency), complex64 [T, rope_dim / 2]; its conjugate turns back.

    position_T: int64 [T]. Numerics: the angle is the fp32 product, as in the published code, so its error grows with
    the position (about 0.06 rad in the second pair at one million). A row does not depend on other rows, bitwise.
    """
    return reference.turns(position_T, freqs)


def apply_rope(x: Tensor, turn_TR: Tensor, *, impl: str | None = None) -> Tensor:
    """Turn the pairs (2i, 2i+1) of the last rope_dim channels; the channels before stay as they are.

    Args:
        x: [T, ..., C] bf16, C >= rope_dim; anything between T and C (heads) shares the token's angle.
        turn_TR: complex64 [T, rope_dim / 2] from `turns`.
    Returns: bf16, a new tensor of x's shape. T = 0 is fine.
    Numerics: fp32 products, one rounding to bf16; bitwise independent of other rows.
    Raises: OperatorError if the shapes do not belong together or x is not bf16.
    Source: architecture.md 4.3, 4.10.
    """
    if x.dtype is not torch.bfloat16:
        raise OperatorError(f"apply_rope x: expected bf16, got {x.dtype}; cast before calling")
    if not turn_TR.is_complex() or turn_TR.shape[0] != x.shape[0] or turn_TR.shape[1] * 2 > x.shape[-1]:
        raise OperatorError(
            f"apply_rope turn_TR: expected complex64 [{x.shape[0]}, up to {x.shape[-1] // 2}], got {turn_TR.dtype} "
            f"{list(turn_TR.shape)}; build it with turns() for the same tokens"
        )
    out: Tensor = dispatch.choose("apply_rope", impl, x.device)(x, turn_TR)
    return out


dispatch.register("apply_rope", "reference", reference.apply_rope)
