"""Expert routing in torch."""

import torch
from torch import Tensor

from leadline.ops.reference.linear import linear_f32
from leadline.ops.reference.scalar import scalar


def route(
    x_TD: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor,
    bias_vl_E: Tensor | None,
    image_T: Tensor | None,
    top_k: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    logits_TE = linear_f32(x_TD, gate_ED)
    # softplus by parts: torch's own treats the last elements of a call differently, so rows would depend on neighbours.
    score_TE = logits_TE.abs().neg_().exp_().log1p_().add_(logits_TE.relu_()).sqrt_()
    bias = bias_E
    if image_T is not None and bias_vl_E is not None:
        bias = torch.where(image_T.unsqueeze(-1), bias_vl_E, bias_E)
    # A stable sort rather than topk: among equal scores the lowest expert wins.
    expert_TK = (score_TE + bias).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_TK = score_TE.gather(1, expert_TK)
    if norm_topk_prob and top_k > 1:
        weight_TK = weight_TK / (weight_TK.sum(-1, True).add_(scalar(1e-20)))
    return expert_TK, weight_TK * scalar(scaling)
