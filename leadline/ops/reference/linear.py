"""Linear layers in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Fewer rows than this go through a multiple of ROW_STEP rows: fp32 products of other row counts sum in another order.
_MANY_ROWS = 12
_ROW_STEP = 4


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return F.linear(x_TK, w_NK)


def widened_rows(x_TK: Tensor) -> Tensor:
    """x as fp32, with unspecified rows appended until the row count is safe for `F.linear`."""
    T, K = x_TK.shape
    if T >= _MANY_ROWS or T % _ROW_STEP == 0:
        return x_TK.float()
    padded = torch.empty((T + -T % _ROW_STEP, K), dtype=torch.float32, device=x_TK.device)
    padded[:T] = x_TK
    return padded


def linear_f32(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return F.linear(widened_rows(x_TK), w_NK)[: x_TK.shape[0]]


def grouped_linear(x_TGI: Tensor, w_NI: Tensor) -> Tensor:
    G = x_TGI.shape[1]
    w_GYI = w_NI.view(G, -1, w_NI.shape[1])
    # One product per group: the batched product of torch picks another kernel for one row than for many.
    return torch.cat([F.linear(x_TGI[:, g], w_GYI[g]) for g in range(G)], dim=-1)
