"""Linear layers in torch, every row on its own.

A row of a library product may depend on the number of rows of the call: other row counts go through other kernels,
which sum in another order. Within calls of one shape it does not depend on the row's place. So fp32 products run in
tiles of a fixed number of rows, and bf16 ones do where a trial on this machine shows that they must (docs/log.md).
Other bf16 products take a few row counts only, since the library keeps some 250 KiB and a kernel for each shape it met.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

_TILE_ROWS = 8  # one row costs less than in tiles of 16, and many rows no more
_MATRIX_ROWS = 16  # of the matrix units: fewer rows cost them as much
_TRIAL_ROWS = 512  # one call of so many is the standard

Product = Callable[[Tensor, Tensor], Tensor]


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """w_NK: dense, or as `packed` gives it."""
    product = _packed_product if w_NK.is_mkldnn else F.linear
    if not _rows_are_independent(product, w_NK.shape, w_NK.device, torch.get_num_threads()):
        return _in_tiles(product, x_TK, w_NK)
    return _filled_up(product, x_TK, w_NK)


def linear_f32(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return _in_tiles(F.linear, x_TK.float(), w_NK)


def grouped_linear(x_TGI: Tensor, w_NI: Tensor) -> Tensor:
    T, G, _ = x_TGI.shape
    w_GYI = w_NI.view(G, -1, w_NI.shape[1])
    if _rows_are_independent(_grouped_product, w_GYI.shape, w_GYI.device, torch.get_num_threads()):
        return _filled_up(_grouped_product, x_TGI, w_GYI).reshape(T, w_NI.shape[0])
    return torch.cat([linear(x_TGI[:, g], w_GYI[g]) for g in range(G)], dim=-1)


def packed(w_NK: Tensor) -> Tensor:
    """A bf16 weight in the layout of the library's CPU kernel; elsewhere as it is. `to_dense` gives it back.

    A product with a plain weight packs it again in every call, which for one row is most of the work.
    """
    if w_NK.device.type != "cpu" or not _can_pack():
        return w_NK
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(w_NK, 1)
    return out


@cache
def _can_pack() -> bool:
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_product(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    out: Tensor = _pointwise()(x_TK, w_NK, None, "none", (), "")
    return out


@cache
def _pointwise() -> Callable[..., Tensor]:
    op: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default  # the look-up costs as much as the call
    return op


def _grouped_product(x_TGI: Tensor, w_GYI: Tensor) -> Tensor:
    return torch.bmm(x_TGI.transpose(0, 1), w_GYI.transpose(1, 2)).transpose(0, 1)


def _filled_up(product: Product, x: Tensor, w: Tensor) -> Tensor:
    """The product of x [T, ...] with rows of zeros up to the next of few counts."""
    T = x.shape[0]
    missing = _next_count(T) - T
    if not missing:
        return product(x, w)
    return product(pad(x, (0, 0) * (x.dim() - 1) + (0, missing)), w)[:T]


def _next_count(T: int) -> int:
    """A power of two up to 16, then a multiple of 16, at most a quarter above T from 64 on: four in each octave."""
    step = 1 << (T - 1).bit_length()
    if step > _MATRIX_ROWS:
        step = max(_MATRIX_ROWS, step >> 3)
    return max(1, -(-T // step)) * step


def _in_tiles(product: Product, x_TK: Tensor, w_NK: Tensor) -> Tensor:
    T = x_TK.shape[0]
    if T == 1:  # cheaper than rows of zeros, and rows do not meet
        return product(x_TK.expand(_TILE_ROWS, -1), w_NK)[:1]
    missing = -T % _TILE_ROWS if T else _TILE_ROWS
    if missing:
        x_TK = pad(x_TK, (0, 0, 0, missing))
    parts = [product(x_TK[first : first + _TILE_ROWS], w_NK) for first in range(0, T + missing, _TILE_ROWS)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:T]


@cache
def _rows_are_independent(product: Product, shape: torch.Size, device: torch.device, num_threads: int) -> bool:
    """Whether bf16 products with a weight of this shape give a row the same bits for any number of rows, by trial.

    The exact result is nearly zero: the inputs of each pair cancel. What is left is the rounding of the sums, and no
    rounding of the result hides that they ran in another order.
    """
    *groups, N, K = shape
    generator = torch.Generator().manual_seed(0)
    order_K = torch.randperm(K, generator=generator)
    x = torch.randn(_TRIAL_ROWS, *groups, -(-K // 2), generator=generator).bfloat16()
    w = torch.randn(*groups, N, -(-K // 2), generator=generator).bfloat16()
    x, w = torch.cat((x, -x), dim=-1)[..., order_K].to(device), torch.cat((w, w), dim=-1)[..., order_K].to(device)
    if product is _packed_product:
        w = packed(w)
    standard = product(x, w)
    counts = sorted({_next_count(T) for T in range(1, _TRIAL_ROWS)})
    return all(torch.equal(product(x[-rows:], w), standard[-rows:]) for rows in counts)
