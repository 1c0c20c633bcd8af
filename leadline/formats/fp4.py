"""E2M1 values, two to a byte, with two kinds of scales (architecture.md 3.1, 3.3, 3.4).

    fp4_e8m0  32 channels share a power of two that rounds up: index queries, index keys, expert weights
    fp4_e4m3  16 channels share an E4M3 value that rounds to nearest: compressed rows

Code 0 to 7 stands for 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign, kept also for zero. The even channel of a pair
sits in the low nibble. Results never depend on other blocks.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from leadline.formats import fp8

BLOCK_E8M0 = 32
BLOCK_E4M3 = 16
E2M1_MAX = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GRID = (torch.tensor(1.5 * 2.0**22), torch.tensor(1.5 * 2.0**22))  # 1 mantissa bit, smallest step 0.5
_PER_6 = torch.tensor(1 / 6)
_FLOOR_E8M0 = torch.tensor(6 * 2.0**-126)
_FLOOR_E4M3 = 6 * 2.0**-9


def quantize_fp4_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode by architecture.md 3.3.

    x: bf16 [..., C], finite, C a multiple of 32. Returns (packed uint8 [..., C/2], scale E8M0 uint8 [..., C/32]).
    Numerics: fp32; the scale P(max(amax, 6 * 2^-126) * fp32(1/6)) rounds up, values to nearest even.
    """
    x_ZB = x.reshape(-1, BLOCK_E8M0)
    s = _scale_e8m0(x_ZB)
    packed = _pack(fp8.round_to_grid(x_ZB / s, _GRID))
    return packed.view(*x.shape[:-1], x.shape[-1] // 2), fp8.exponent_byte(s).view(
        *x.shape[:-1], x.shape[-1] // BLOCK_E8M0
    )


def restore_fp4_e8m0(x: Tensor) -> Tensor:
    """bf16 [..., C] as `dequantize_fp4_e8m0(*quantize_fp4_e8m0(x))` gives it, without the bytes."""
    x_ZB = x.reshape(-1, BLOCK_E8M0)
    s = _scale_e8m0(x_ZB)
    return fp8.round_to_grid(x_ZB / s, _GRID).mul_(s).bfloat16().view(x.shape)


def dequantize_fp4_e8m0(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode packed uint8 [..., C/2], scales E8M0 uint8 [..., C/32] to bf16 [..., C]; exact above bf16 subnormals."""
    return _decode(packed, fp8.decode_e8m0(scale), BLOCK_E8M0)


def quantize_fp4_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode by architecture.md 3.4.

    x: bf16 [..., C], finite, C a multiple of 16. Returns (packed uint8 [..., C/2], scale E4M3 uint8 [..., C/16]).
    Numerics: fp32; the scale is e4m3(max(amax, 6 * 2^-9) / 6) to nearest, saturating at 448; it may round down, so
    values beyond six scales are clipped.
    """
    x_ZB = x.reshape(-1, BLOCK_E4M3)
    amax = x_ZB.abs().amax(-1, True).float().clamp_min_(_FLOOR_E4M3)
    scale = amax.div_(E2M1_MAX).clamp_max_(fp8.E4M3_MAX).to(torch.float8_e4m3fn)
    y = (x_ZB / scale.float()).clamp_(-E2M1_MAX, E2M1_MAX)
    packed = _pack(fp8.round_to_grid(y, _GRID))
    return packed.view(*x.shape[:-1], x.shape[-1] // 2), scale.view(torch.uint8).view(
        *x.shape[:-1], x.shape[-1] // BLOCK_E4M3
    )


def dequantize_fp4_e4m3(packed: Tensor, scale: Tensor) -> Tensor:
    """Decode packed uint8 [..., C/2] with E4M3 scales uint8 [..., C/16] to bf16 [..., C]; exact."""
    return _decode(packed, fp8.decode_e4m3(scale), BLOCK_E4M3)


def _scale_e8m0(x_ZB: Tensor) -> Tensor:
    s = x_ZB.abs().amax(-1, True).float()
    return fp8.round_up_to_power_of_two_(torch.maximum(s, _FLOOR_E8M0).mul_(_PER_6))


def _pack(rounded_ZB: Tensor) -> Tensor:
    """Bytes of values that are already on the E2M1 grid: [Z, B] fp32 -> [Z, B/2] uint8."""
    codes = torch.bucketize(rounded_ZB.abs(), _code_edges(rounded_ZB.device), out_int32=True)
    codes += torch.signbit(rounded_ZB).int() << 3
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _decode(packed: Tensor, scale: Tensor, block: int) -> Tensor:
    pairs = _pair_table(packed.device).index_select(0, packed.reshape(-1).int())
    values = pairs.view(torch.bfloat16).view(-1, block) * scale.view(-1, 1)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


@lru_cache(maxsize=64)
def _code_edges(device: torch.device) -> Tensor:
    """Midpoints between neighbouring magnitudes; only used on rounded values, so no value meets one."""
    return torch.tensor([(a + b) / 2 for a, b in pairwise(_MAGNITUDES)], device=device)


@lru_cache(maxsize=64)
def _pair_table(device: torch.device) -> Tensor:
    """int32 [256]: the two bf16 values of every byte, the low nibble's first in memory."""
    values = torch.tensor([sign * v for sign in (1.0, -1.0) for v in _MAGNITUDES], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return (
        torch.stack((values[byte & 15], values[byte >> 4]), dim=1).contiguous().view(torch.int32).view(256).to(device)
    )
