"""Rotary embedding in torch: complex products of adjacent pairs."""

import math

import torch
from torch import Tensor

from leadline.config.model import YarnConfig


def frequencies(rope_dim: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    f = 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return f

    def pair_of_turns(turns: float) -> float:
        """The pair index whose angle makes `turns` full turns over the original context."""
        return (
            rope_dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(pair_of_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of_turns(yarn.beta_slow)), rope_dim - 1)
    span = high - low if high != low else 0.001
    m = 1 - ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return f / yarn.factor * (1 - m) + f * m


def turns(position_T: Tensor, freqs: Tensor) -> Tensor:
    angle = position_T.float().unsqueeze(-1) * freqs
    return torch.complex(angle.cos(), angle.sin())


def apply_rope(x: Tensor, turn_TR: Tensor) -> Tensor:
    half = turn_TR.shape[-1]
    if x.dim() > 2:
        turn_TR = turn_TR.view(-1, *[1] * (x.dim() - 2), half)
    out = x.clone(memory_format=torch.contiguous_format)
    turning = out[..., -2 * half :]
    pairs = turning.to(torch.float32, memory_format=torch.contiguous_format).view(torch.complex64)
    turning.copy_(pairs.mul_(turn_TR).view(torch.float32))
    return out
