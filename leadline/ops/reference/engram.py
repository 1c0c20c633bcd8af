"""Engram hashing and gate in torch."""

import torch
from torch import Tensor

from leadline.ops.reference.scalar import inverse_rms, scalar


def hash_rows(window_TN: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    T, n = window_TN.shape
    blocked_TN = (window_TN < 0).cumsum(1) > 0
    mixed_TN = window_TN.masked_fill(blocked_TN, pad) * multipliers
    mix_T = mixed_TN[:, 0]
    orders = []
    for s in range(1, n):
        mix_T = mix_T ^ mixed_TN[:, s]
        orders.append(mix_T)
    hashed = torch.stack(orders, dim=1).unsqueeze(-1) % primes.view(n - 1, -1)
    return hashed.view(T, primes.numel()).add_(offsets)


def engram_gate(
    h_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    q_weight_SD: Tensor,
    k_weight_SD: Tensor,
    eps: float,
    image_T: Tensor | None,
) -> Tensor:
    h, key = h_TSD.float(), key_TSD.float()
    norms = inverse_rms(h, eps).mul_(inverse_rms(key, eps))
    agreement = (h * (q_weight_SD.float() * k_weight_SD)).mul_(key).sum(-1, True).mul_(norms)
    agreement = agreement.mul_(scalar(h.shape[-1] ** -0.5))
    # copysign, so that an agreement of zero opens the gate like +1e-6
    root = agreement.abs().clamp_min_(1e-6).sqrt_().copysign_(agreement)
    gate = root.neg_().exp_().add_(scalar(1.0)).reciprocal_()
    if image_T is not None:
        gate = gate.masked_fill(image_T.view(-1, 1, 1), 0)
    return (gate * value_TD.unsqueeze(1)).add_(h).bfloat16()
