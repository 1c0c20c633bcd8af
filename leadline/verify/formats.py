"""Number formats and row layouts against known values."""

from __future__ import annotations

import torch

from leadline.formats import fp4, fp8
from leadline.formats.rows import compressed_row, index_row, window_row
from leadline.verify.parts import Part, exact


@torch.inference_mode()
def check_formats() -> list[Part]:
    """Number formats: every FP4 value, known E4M3 and E8M0 bytes, and rows of all three kinds packed and unpacked."""
    fp4_values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    block = torch.cat((fp4_values, -fp4_values)).bfloat16()  # code i at place i, scale one in both formats
    packed = torch.arange(1, 16, 2, dtype=torch.uint8) * 16 + torch.arange(0, 16, 2, dtype=torch.uint8)
    e4m3 = {0x00: 0.0, 0x01: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xFE: -448.0}
    codes = torch.tensor([*e4m3, *[0] * (fp8.BLOCK - len(e4m3))], dtype=torch.uint8)
    values = torch.tensor([*e4m3.values(), *[0.0] * (fp8.BLOCK - len(e4m3))]).bfloat16()
    one_e8m0, one_e4m3 = torch.tensor([127], dtype=torch.uint8), torch.tensor([0x38], dtype=torch.uint8)
    parts = [
        exact("formats: E4M3, E8M0", fp8.dequantize_e4m3_e8m0(codes, one_e8m0), values),
        exact("formats: E4M3 encoded", torch.cat(fp8.quantize_e4m3_e8m0(values)), torch.cat((codes, one_e8m0))),
        exact("formats: FP4, E4M3", fp4.dequantize_fp4_e4m3(packed, one_e4m3), block),
        exact("formats: FP4, E4M3 encoded", torch.cat(fp4.quantize_fp4_e4m3(block)), torch.cat((packed, one_e4m3))),
        exact("formats: FP4, E8M0", fp4.dequantize_fp4_e8m0(packed.repeat(2), one_e8m0), block.repeat(2)),
    ]
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layout in (window_row(128), compressed_row(128), index_row(128)):
        once = layout.unpack(*layout.pack(x))
        parts.append(exact(f"formats: {layout.name} row", layout.unpack(*layout.pack(once)), once))
    return parts
