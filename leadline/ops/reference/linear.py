"""Linear layers in torch, every row on its own.

A row of a library product may depend on the number of rows of the call: other row counts go through other kernels,
which sum in another order. Within calls of one shape it does not depend on the row's place. So fp32 products run in
tiles of a fixed number of rows, and bf16 ones do where a trial on this machine shows that they must (docs/log.md).
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE_ROWS = 16
# Row counts of the trial: the smallest ones, powers of two and their neighbours. One call of the last is the standard.
_TRIAL_ROWS = (1, 2, 3, 4, 6, 8, 9, 15, 16, 24, 32, 33, 64, 100, 128, 256, 300, 512)


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    N, K = w_NK.shape
    if x_TK.device.type == "cpu" and not _rows_are_independent(N, K, x_TK.dtype, torch.get_num_threads()):
        return _in_tiles(x_TK, w_NK)
    return F.linear(x_TK, w_NK)


def linear_f32(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return _in_tiles(x_TK.float(), w_NK)


def grouped_linear(x_TGI: Tensor, w_NI: Tensor) -> Tensor:
    G = x_TGI.shape[1]
    w_GYI = w_NI.view(G, -1, w_NI.shape[1])
    # One product per group: the batched product of torch picks another kernel for one row than for many.
    return torch.cat([linear(x_TGI[:, g], w_GYI[g]) for g in range(G)], dim=-1)


def _in_tiles(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    T, K = x_TK.shape
    if T == _TILE_ROWS:
        return F.linear(x_TK, w_NK)
    whole = T - T % _TILE_ROWS
    out_TN = x_TK.new_empty(-(-T // _TILE_ROWS) * _TILE_ROWS, w_NK.shape[0])
    w_KN = w_NK.t()
    for first in range(0, whole, _TILE_ROWS):
        torch.mm(x_TK[first : first + _TILE_ROWS], w_KN, out=out_TN[first : first + _TILE_ROWS])
    if whole < T:
        padded = x_TK.new_zeros(_TILE_ROWS, K)
        padded[: T - whole] = x_TK[whole:]
        torch.mm(padded, w_KN, out=out_TN[whole:])
    return out_TN[:T]


@cache
def _rows_are_independent(N: int, K: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether products with a weight [N, K] give a row the same bits whatever the number of rows, by trial."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_ROWS[-1], K, generator=generator).to(dtype)
    w = torch.randn(N, K, generator=generator).to(dtype)
    standard = F.linear(x, w)
    return all(torch.equal(F.linear(x[-rows:], w), standard[-rows:]) for rows in _TRIAL_ROWS)
