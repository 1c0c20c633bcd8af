"""Activations onto their quantisation grid, kept as bf16.

The grids hold at most 4 significant bits, so bf16 carries the restored values exactly and a bf16 product of them equals
the scaled FP8 product up to the order of fp32 sums. Quantisation is part of the model, not an optimisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import quantize as reference


def act_quant(x: Tensor, *, impl: str | None = None) -> Tensor:
    """E4M3 with a power-of-two scale per 32 channels, restored: the input of every FP8 or FP4 linear.

    Args: x: [..., C] bf16, finite, C a multiple of 32.
    Returns: bf16, x's shape. Zero rows are fine; the sign of zero is kept.
    Numerics: bitwise by architecture.md 3.2; each block of 32 stands alone.
    Raises: OperatorError on another dtype or width.
    """
    _check("act_quant", x)
    out: Tensor = dispatch.choose("act_quant", impl, x.device)(x)
    return out


def index_quant(x: Tensor, *, impl: str | None = None) -> Tensor:
    """E2M1 with a power-of-two scale per 32 channels, restored: index queries after rotation.

    Args, Returns and Raises as for `act_quant`. Numerics: bitwise by architecture.md 3.3.
    """
    _check("index_quant", x)
    out: Tensor = dispatch.choose("index_quant", impl, x.device)(x)
    return out


def _check(op: str, x: Tensor) -> None:
    if x.dtype is not torch.bfloat16 or x.shape[-1] % 32:
        raise OperatorError(
            f"{op} x: expected bf16 with a last dimension that is a multiple of 32, got {x.dtype} {list(x.shape)}; "
            "round to bf16 before quantising"
        )


dispatch.register("act_quant", "reference", reference.act_quant)
dispatch.register("index_quant", "reference", reference.index_quant)
