"""E4M3 values with E8M0 scales: one power of two for 32 neighbouring channels (architecture.md 3.1, 3.2).

The format of activations in front of every FP8 or FP4 linear, and of the window rows. Bytes are uint8 throughout; the
E4M3 byte is sign, 4 exponent bits (bias 7), 3 mantissa bits; the E8M0 byte e stands for 2^(e-127), 255 for NaN.

Everything here is a function of one block of 32 channels alone, so results never depend on other rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 32
E4M3_MAX = 448.0

# Up to this many elements the native E4M3 cast costs less than the arithmetic of `round_to_grid`; above, the cast
# (a scalar loop on CPUs) is four times slower. Both give the same bits.
_CAST_LIMIT = 8192

# Zero-dimensional tensors: a Python scalar makes an operator call about 1.5 us longer on CPU, and they combine with
# tensors of any device.
_AMAX_FLOOR = torch.tensor(1e-4)
_PER_448 = torch.tensor(1 / 448)
_CARRY = torch.tensor(0x7FFFFF, dtype=torch.int32)
_EXPONENT_UP = torch.tensor(0xFF800000 - (1 << 32), dtype=torch.int32)
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_E4M3_GRID = (torch.tensor(1.5 * 2.0**20), torch.tensor(1.5 * 2.0**14))


def round_up_to_power_of_two_(v: Tensor) -> Tensor:
    """Replace positive normal fp32 values by 2^ceil(log2 v), in place: exponent + 1 if any mantissa bit is set."""
    v.view(torch.int32).add_(_CARRY).bitwise_and_(_EXPONENT_UP)
    return v


def round_to_grid(y: Tensor, grid: tuple[Tensor, Tensor]) -> Tensor:
    """Round fp32 to a short floating-point format, to nearest with ties to even, keeping the sign of zero.

    `grid` is (1.5 * 2^(23 - m), 1.5 * 2^23 * q) for m mantissa bits and a smallest step q. Adding 1.5 * 2^23 steps
    leaves no room for a fraction of a step, so the addition itself rounds; the step follows the exponent of each value.
    |y| must not exceed the format's largest value.
    """
    shift = y.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).mul_(grid[0])
    shift = torch.maximum(shift, grid[1], out=shift)
    return (y + shift).sub_(shift).copysign_(y)


def activation_scale(x_ZB: Tensor) -> Tensor:
    """P(max(amax, 1e-4) * fp32(1/448)) of blocks [Z, 32] bf16: bf16 [Z, 1], exact, never below 2^-22."""
    amax_Z = x_ZB.abs().amax(-1)
    return _activation_scales(x_ZB.device).index_select(0, amax_Z.view(torch.int16).int()).unsqueeze(1)


def restore_activation(x: Tensor) -> Tensor:
    """The bf16 values that `dequantize_e4m3_e8m0(*quantize_e4m3_e8m0(x))` gives, without the bytes.

    x: bf16 [..., C], finite, C a multiple of 32. For bf16 the scale rounds up far enough that no value exceeds 448.
    """
    x_ZB = x.reshape(-1, BLOCK)
    s = activation_scale(x_ZB)
    if x.numel() <= _CAST_LIMIT:
        # In bf16 everything is exact: s is a power of two, and what underflows in the division rounds to zero anyway.
        return (x_ZB / s).to(torch.float8_e4m3fn).bfloat16().mul_(s).view_as(x)
    return round_to_grid(x_ZB.float().div_(s), _E4M3_GRID).mul_(s).bfloat16().view(x.shape)


def quantize_e4m3_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode by architecture.md 3.2.

    x: bf16 [..., C], finite, C a multiple of 32. Returns (codes uint8 [..., C], scale uint8 [..., C/32]).
    Numerics: fp32; the scale rounds up to a power of two, the value to nearest even; the sign of zero is kept.
    """
    x_ZB = x.reshape(-1, BLOCK)
    s = activation_scale(x_ZB)
    codes = (x_ZB / s).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(x.shape), exponent_byte(s.float()).view(*x.shape[:-1], x.shape[-1] // BLOCK)


def dequantize_e4m3_e8m0(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode codes uint8 [..., C] with scales uint8 [..., C/32] to bf16 [..., C].

    Exact unless the product is a bf16 subnormal (scales below 2^-117), where it rounds once. NaN codes and the NaN
    scale byte give NaN.
    """
    return (decode_e4m3(codes).view(-1, BLOCK) * decode_e8m0(scale).view(-1, 1)).view(codes.shape)


def exponent_byte(s: Tensor) -> Tensor:
    """The E8M0 byte of positive normal fp32 powers of two."""
    return s.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 bytes (uint8, any shape) to bf16, exact; 0x7F and 0xFF are NaN."""
    return _e4m3_table(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def decode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 bytes (uint8, any shape) to bf16, exact: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    return _e8m0_table(scale.device).index_select(0, scale.reshape(-1).int()).view(scale.shape)


@lru_cache(maxsize=64)
def _activation_scales(device: torch.device) -> Tensor:
    """bf16 [2^15]: the scale of a block, by the bits of its largest magnitude. One look-up instead of five passes."""
    amax = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16).float()
    return round_up_to_power_of_two_(torch.maximum(amax, _AMAX_FLOOR).mul_(_PER_448)).bfloat16().to(device)


@lru_cache(maxsize=64)
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).to(device)


@lru_cache(maxsize=64)
def _e8m0_table(device: torch.device) -> Tensor:
    bits = torch.arange(256) << 7  # the exponent field of bf16
    bits[0], bits[255] = 0x0040, 0x7FC0
    return bits.to(torch.int16).view(torch.bfloat16).to(device)
