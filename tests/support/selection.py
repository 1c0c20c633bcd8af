"""Operands of the index selection with scores chosen by the test."""

import torch
from torch import Tensor


def operands_for_scores(score_TM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_TJX bf16, head_weight_TJ fp32 and key rows_MX bf16 that score exactly `score_TM` (finite fp32, any sign).

    Each score is split into three bf16 parts, which is exact; query t reads its own three channels, once with each
    sign, so that the rectified halves add up to the score.
    """
    T, M = score_TM.shape
    parts = []
    rest_TM = score_TM.float()
    for _ in range(3):
        parts.append(rest_TM.bfloat16())
        rest_TM = rest_TM - parts[-1].float()
    rows_MX = torch.stack(parts, dim=1).permute(2, 0, 1).reshape(M, 3 * T)
    q_TX = torch.eye(T).repeat_interleave(3, dim=1).bfloat16()
    return torch.stack((q_TX, -q_TX), dim=1), torch.tensor([[1.0, -1.0]]).repeat(T, 1), rows_MX
