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


def angles(position_T: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, each fp32 [T, rope_dim / 2].

    position_T: int64 [T]. Numerics: the angle is the fp32 product, as in the published code, so its error grows with
    the position (about 0.06 rad in the second pair at one million). A row does not depend on other rows, bitwise.
    """
    return reference.angles(position_T, freqs)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, *, impl: str | None = None) -> Tensor:
    """Turn the pairs (2i, 2i+1) of the last rope_dim channels; the channels before stay as they are.

    Args:
        x: [T, ..., C] bf16, C >= rope_dim; anything between T and C (heads) shares the token's angle.
        cos, sin: [T, rope_dim / 2] fp32 from `angles`.
        inverse: turn back, by the negative angle.
    Returns: bf16, a new tensor of x's shape. T = 0 is fine.
    Numerics: fp32 products, one rounding to bf16; bitwise independent of other rows.
    Raises: OperatorError if the shapes do not belong together or x is not bf16.
    Source: architecture.md 4.3, 4.10.
    """
    if x.dtype is not torch.bfloat16:
        raise OperatorError(f"apply_rope x: expected bf16, got {x.dtype}; cast before calling")
    if cos.shape[0] != x.shape[0] or cos.shape[1] * 2 > x.shape[-1] or cos.shape != sin.shape:
        raise OperatorError(
            f"apply_rope cos, sin: expected [{x.shape[0]}, up to {x.shape[-1] // 2}], got {list(cos.shape)} and "
            f"{list(sin.shape)}; build them with angles() for the same tokens"
        )
    out: Tensor = dispatch.choose("apply_rope", impl, x.device)(x, cos, sin, inverse)
    return out


dispatch.register("apply_rope", "reference", reference.apply_rope)
