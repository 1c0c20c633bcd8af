"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import router as reference


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor,
    bias_vl_E: Tensor | None,
    image_T: Tensor | None,
    top_k: int,
    norm_topk_prob: bool,
    scaling: float,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """s = sqrt(softplus(x gate^T)); the top_k largest of s + bias; weights s / (sum s + 1e-20) * scaling, without bias.

    Args:
        x_TD: [T, D] bf16. gate_ED: [E, D] fp32 (widened once from bf16). bias_E: [E] fp32, chooses only.
        bias_vl_E: [E] fp32, replaces bias_E for tokens inside image spans; None if there are none.
        image_T: [T] bool, the tokens of image spans (start, newline and end included); None if there are none.
        norm_topk_prob: normalise over the chosen experts; without effect for top_k = 1.
    Returns: expert ids int64 [T, top_k] best first (ties: the lowest id), weights fp32 [T, top_k]. T = 0 is fine.
    Numerics: fp32 throughout; bitwise independent of other tokens.
    Raises: OperatorError on a dtype mismatch or top_k > E.
    Source: architecture.md 4.12.
    """
    if x_TD.dtype is not torch.bfloat16 or gate_ED.dtype is not torch.float32 or top_k > gate_ED.shape[0]:
        raise OperatorError(
            f"route: expected bf16 x, fp32 gate and top_k <= {gate_ED.shape[0]}, got {x_TD.dtype}, {gate_ED.dtype} and "
            f"{top_k}; widen the gate once at load"
        )
    out: tuple[Tensor, Tensor] = dispatch.choose("route", impl, x_TD.device)(
        x_TD, gate_ED, bias_E, bias_vl_E, image_T, top_k, norm_topk_prob, scaling
    )
    return out


dispatch.register("route", "reference", reference.route)
