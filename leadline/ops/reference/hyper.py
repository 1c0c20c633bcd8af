"""Hyper-connections in torch: mixing coefficients with their Sinkhorn balancing, collapse and expand."""

from array import array
from functools import lru_cache, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from leadline.ops.reference.linear import linear_f32
from leadline.ops.reference.scalar import inverse_rms, scalar

# Up to this many tokens, balancing each in plain Python floats (about 17 us) is cheaper than 40 rounds of array calls.
_FEW_TOKENS = 8


def mix_coefficients(
    h_TSD: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    T, S, D = h_TSD.shape
    x = h_TSD.reshape(T, S * D).float()
    return split(linear_f32(x, fn).mul_(inverse_rms(x, norm_eps)), base, scale, S, iters, eps)


def split(m: Tensor, base: Tensor, scale: Tensor, S: int, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Raw coefficients [T, (2+S)*S] to (pre, post, comb)."""
    z = m * scale.index_select(0, _scale_of(S, m.device)) + base
    # Not torch.sigmoid: its last elements of a call go through another exponential, so rows would depend on neighbours.
    gate = z[:, : 2 * S].neg().exp_().add_(scalar(1.0)).reciprocal_()
    comb = z[:, 2 * S :].reshape(-1, S, S).softmax(-1).add_(scalar(eps))
    return gate[:, :S] + scalar(eps), gate[:, S:] * scalar(2.0), _balance(comb, 2 * iters - 1, eps)


def collapse(h_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    return torch.bmm(pre_TS.unsqueeze(1), h_TSD.float()).squeeze(1).bfloat16()


def expand(y_TD: Tensor, h_TSD: Tensor, post_TS: Tensor, comb_TSS: Tensor) -> Tensor:
    fresh_TSD = post_TS.unsqueeze(-1) * y_TD.unsqueeze(1)
    return torch.baddbmm(fresh_TSD, comb_TSS.transpose(1, 2), h_TSD.float()).bfloat16()


def _balance(comb_TSS: Tensor, rounds: int, eps: float) -> Tensor:
    """Normalise over input streams and output streams in turn, `rounds` times, starting and ending with the inputs.

    Float64 with a fixed order of additions: both ways of computing give equal bits, and fp32 sees one rounding.
    """
    T, S, _ = comb_TSS.shape
    if comb_TSS.device.type == "cpu":
        if S == 4 and 0 < T <= _FEW_TOKENS:
            balanced = array("f")  # rounds like a tensor of the list, and is one in a fifth of the time
            for c in comb_TSS.tolist():
                balanced.extend(_balance_four(c, rounds, eps))
            return torch.frombuffer(balanced, dtype=torch.float32).view(T, S, S)
        c_SST = comb_TSS.double().permute(1, 2, 0).contiguous()
        _balance_array(c_SST.numpy(), rounds, eps)  # the same memory; numpy calls cost a third of torch calls
    else:
        c_SST = comb_TSS.double().permute(1, 2, 0).contiguous()
        _balance_array(c_SST, rounds, eps)
    return c_SST.float().permute(2, 0, 1).contiguous()


def _balance_array(c_SST: Any, rounds: int, eps: float) -> None:
    """In place on a numpy array or a tensor, tokens last."""
    views = c_SST, c_SST.swapaxes(0, 1)
    for i in range(rounds):
        c = views[i % 2]
        c *= 1.0 / (reduce(add, c) + eps)


def _balance_four(c: list[list[float]], rounds: int, eps: float) -> list[float]:
    """One token with four streams, written out: rows are input streams a to d, columns output streams 0 to 3."""
    (a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3) = c
    for i in range(rounds):
        if i % 2 == 0:
            s0, s1 = 1.0 / (a0 + b0 + c0 + d0 + eps), 1.0 / (a1 + b1 + c1 + d1 + eps)
            s2, s3 = 1.0 / (a2 + b2 + c2 + d2 + eps), 1.0 / (a3 + b3 + c3 + d3 + eps)
            a0, a1, a2, a3 = a0 * s0, a1 * s1, a2 * s2, a3 * s3
            b0, b1, b2, b3 = b0 * s0, b1 * s1, b2 * s2, b3 * s3
            c0, c1, c2, c3 = c0 * s0, c1 * s1, c2 * s2, c3 * s3
            d0, d1, d2, d3 = d0 * s0, d1 * s1, d2 * s2, d3 * s3
        else:
            sa, sb = 1.0 / (a0 + a1 + a2 + a3 + eps), 1.0 / (b0 + b1 + b2 + b3 + eps)
            sc, sd = 1.0 / (c0 + c1 + c2 + c3 + eps), 1.0 / (d0 + d1 + d2 + d3 + eps)
            a0, a1, a2, a3 = a0 * sa, a1 * sa, a2 * sa, a3 * sa
            b0, b1, b2, b3 = b0 * sb, b1 * sb, b2 * sb, b3 * sb
            c0, c1, c2, c3 = c0 * sc, c1 * sc, c2 * sc, c3 * sc
            d0, d1, d2, d3 = d0 * sd, d1 * sd, d2 * sd, d3 * sd
    return [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3]


@lru_cache(maxsize=64)
def _scale_of(S: int, device: torch.device) -> Tensor:
    """Which of the three scales each raw coefficient takes."""
    return torch.tensor([0] * S + [1] * S + [2] * S * S, device=device)
