"""Number formats against the recorded outputs of the published reference: equal bytes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadline.formats import fp4, fp8

pytestmark = pytest.mark.golden

QUANT = load_file(Path(__file__).parent / "quant.safetensors")
FAMILIES = {
    "act_e4m3_e8m0_32": ("codes", fp8.quantize_e4m3_e8m0, fp8.dequantize_e4m3_e8m0, fp8.restore_activation),
    "fp4_e8m0_32": ("packed", fp4.quantize_fp4_e8m0, fp4.dequantize_fp4_e8m0, fp4.restore_fp4_e8m0),
    "fp4_e4m3_16": ("packed", fp4.quantize_fp4_e4m3, fp4.dequantize_fp4_e4m3, None),
}


def bits(t: torch.Tensor) -> torch.Tensor:
    """bf16 as integers, so that -0 differs from 0."""
    return t.view(torch.int16)


@pytest.mark.parametrize("inputs", ["random", "adversarial", "denormal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantisation_is_bit_exact(family: str, inputs: str) -> None:
    word, quantize, dequantize, restore = FAMILIES[family]
    case = {k.rsplit("/", 1)[1]: v for k, v in QUANT.items() if k.startswith(f"{family}/{inputs}/")}
    codes, scale = quantize(case["x"])
    assert torch.equal(scale, case["scale"])
    assert torch.equal(codes, case[word])
    assert torch.equal(bits(dequantize(case[word], case["scale"])), bits(case["dequant"]))
    if restore is not None:
        assert torch.equal(bits(restore(case["x"])), bits(case["dequant"]))
        tall = case["x"].repeat(200, 1)  # long enough for the arithmetic rounding instead of the cast
        assert torch.equal(bits(restore(tall)), bits(case["dequant"].repeat(200, 1)))
