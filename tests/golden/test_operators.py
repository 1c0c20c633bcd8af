"""Operators against the recorded outputs of the published reference (tolerances are those of the recordings)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadline.config.model import YarnConfig
from leadline.formats import fp8
from leadline.ops.linear import Weight, linear, linear_f32
from leadline.ops.quantize import act_quant
from leadline.ops.rope import angles, apply_rope, frequencies

pytestmark = pytest.mark.golden

HERE = Path(__file__).parent
GEMM_SUM_ORDER = 2e-6  # of the sum of absolute products: any order of fp32 sums
ANGLE_BASE, ANGLE_PER_POSITION = 2e-6, 2.5e-7  # angles are fp32 products


def load(name: str) -> dict[str, torch.Tensor]:
    return load_file(HERE / f"{name}.safetensors")


def bf16_steps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place of bf16; -0 and 0 are the same."""

    def ordered(t: torch.Tensor) -> torch.Tensor:
        i = t.contiguous().view(torch.int16).int()
        return torch.where(i < 0, -(i & 0x7FFF), i)

    assert a.dtype == b.dtype == torch.bfloat16
    assert a.shape == b.shape
    return int((ordered(a) - ordered(b)).abs().max())


def e8m0(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_gemm(kind: str, case: int) -> None:
    data = {k.rsplit("/", 1)[1]: v for k, v in load("gemm").items() if k.startswith(f"{kind}/case{case}/")}
    if kind == "fp8":
        weight = Weight.from_fp8(data["w_codes"].view(torch.float8_e4m3fn), e8m0(data["w_scale"]))
    else:
        weight = Weight.from_fp4(data["w_codes"].view(torch.int8), e8m0(data["w_scale"]))
    x = act_quant(data["x"])
    assert torch.equal(x, fp8.dequantize_e4m3_e8m0(data["x_codes"], data["x_scale"]))
    w = weight.dense_NK().float()
    limit = GEMM_SUM_ORDER * (x.float().abs() @ w.abs().T)
    assert ((linear_f32(x, w) - data["y_f32"]).abs() <= limit).all()
    assert bf16_steps(linear(x, weight), data["y"]) <= 1
    assert torch.equal(linear(x, weight), linear(x, weight.densified()))


ROTARY = {
    "window_released": (64, 10000.0, None),
    "compressed_released": (
        64,
        160000.0,
        YarnConfig(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
    ),
    "window_small": (16, 10000.0, None),
    "compressed_small": (
        16,
        160000.0,
        YarnConfig(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=32),
    ),
    "yarn_on_window_base": (
        32,
        10000.0,
        YarnConfig(factor=8, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096),
    ),
}


@pytest.mark.parametrize("setting", ROTARY)
def test_rotary(setting: str) -> None:
    data = load("rotary")
    freqs = frequencies(*ROTARY[setting])
    position = data["positions"].long()
    cos, sin = angles(position, freqs)
    limit = (ANGLE_BASE + ANGLE_PER_POSITION * position).unsqueeze(-1)
    assert ((cos - data[f"{setting}/cos"]).abs() <= limit).all()
    assert ((sin - data[f"{setting}/sin"]).abs() <= limit).all()
    cos, sin = angles(data[f"{setting}/apply_positions"].long(), freqs)
    for layout in ("bsd", "bshd"):
        for x, forward, inverse in zip(
            *(data[f"{setting}/{layout}/{k}"] for k in ("x", "forward", "inverse")), strict=True
        ):
            assert bf16_steps(apply_rope(x, cos, sin), forward) <= 1
            assert bf16_steps(apply_rope(x, cos, sin, inverse=True), inverse) <= 1
