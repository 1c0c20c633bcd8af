"""Number formats and row layouts: known single values, round trips, independence of neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.errors import ConfigError
from leadline.formats import fp4, fp8, rows

pytestmark = pytest.mark.unit

QUANTISERS = {
    "e4m3_e8m0": (fp8.quantize_e4m3_e8m0, fp8.dequantize_e4m3_e8m0),
    "fp4_e8m0": (fp4.quantize_fp4_e8m0, fp4.dequantize_fp4_e8m0),
    "fp4_e4m3": (fp4.quantize_fp4_e4m3, fp4.dequantize_fp4_e4m3),
}
# finite bf16 bit patterns: every exponent, both signs, subnormals, zeros
finite_bits = st.integers(0, 0xFFFF).filter(lambda b: (b >> 7) & 0xFF != 0xFF)
blocks = st.lists(finite_bits, min_size=32, max_size=32)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16)


# The definitions of architecture.md section 3 in float64: tables, the nearest entry, powers of two by their logarithm.

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.tensor([(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127]).double()


def nearest_code(y: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """The nearest entry for each magnitude: the even code of two equally near, the last code beyond the end."""
    upper = torch.searchsorted(magnitudes, y).clamp_max(len(magnitudes) - 1)
    lower = (upper - 1).clamp_min(0)
    farther = (magnitudes[upper] - y) - (y - magnitudes[lower])
    return torch.where((farther < 0) | ((farther == 0) & (upper % 2 == 0)), upper, lower)


def definition(name: str, x_ZB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale bytes and restored bf16 values of blocks."""
    x = x_ZB.double()
    amax = x.abs().amax(1, keepdim=True)
    magnitudes, sign_bit = (E4M3, 7) if name == "e4m3_e8m0" else (E2M1, 3)
    if name == "fp4_e4m3":
        scale = nearest_code(amax.clamp_min(6 * 2.0**-9) / 6, E4M3)
        s = E4M3[scale]
    else:
        floor = 1e-4 if name == "e4m3_e8m0" else 6 * 2.0**-126
        mantissa, exponent = torch.frexp(amax.clamp_min(floor) / magnitudes[-1])
        exponent = exponent - (mantissa == 0.5).int()
        scale, s = exponent + 127, torch.ldexp(torch.ones_like(amax), exponent)
    code = nearest_code((x / s).abs(), magnitudes)
    restored = (magnitudes[code] * s).copysign(x).bfloat16()
    code += torch.signbit(x).long() << sign_bit
    if sign_bit == 3:
        code = code[:, 0::2] + 16 * code[:, 1::2]
    return code.to(torch.uint8), scale.to(torch.uint8), restored


@pytest.mark.parametrize("name", QUANTISERS)
def test_every_bf16_value_follows_the_definition(name: str) -> None:
    """Every finite value as the largest of a block, and every one below each of many largest values."""
    quantize, dequantize = QUANTISERS[name]
    block = 16 if name == "fp4_e4m3" else 32
    place = torch.arange(block)
    sign = 0x8000 * (place % 2)
    magnitudes = torch.arange(0x7F80)
    # in blocks of its own, with smaller ones around it
    largest = magnitudes[:, None] * torch.where(place == 5, block, place) // block
    cases = [largest + sign]
    pairs = magnitudes.view(-1, block // 2).repeat_interleave(2, dim=1) + sign
    for anchor in (0x0001, *range(0, 0x7F80, 0x0440), *range(0x3F80, 0x4000, 0x10), 0x7F7F):
        cases.append(torch.where(place == 0, anchor, pairs))
    for case in cases:
        x = case.to(torch.int16).view(torch.bfloat16)
        want_codes, want_scale, want = definition(name, x)
        codes, scale = quantize(x)
        assert torch.equal(scale, want_scale)
        assert torch.equal(codes, want_codes)
        assert torch.equal(bits(dequantize(codes, scale)), bits(want))


@pytest.mark.parametrize("name", QUANTISERS)
def test_every_code_with_every_scale(name: str) -> None:
    """Decoding of bytes that our own encoders may never write: checkpoints hold them."""
    block = 16 if name == "fp4_e4m3" else 32
    all_bytes = torch.arange(256)
    e4m3 = torch.cat((E4M3, torch.full((1,), torch.nan)))
    e4m3 = torch.cat((e4m3, -e4m3))
    e8m0 = torch.cat((torch.exp2(all_bytes[:255].double() - 127), e4m3[-1:]))
    if name == "e4m3_e8m0":
        values = e4m3
    else:
        values = torch.cat((E2M1, -E2M1))[torch.stack((all_bytes & 15, all_bytes >> 4), dim=1)]
    scales = e4m3 if name == "fp4_e4m3" else e8m0
    rows_of_one_scale = values.numel() // block
    got = QUANTISERS[name][1](
        all_bytes.view(rows_of_one_scale, -1).repeat(256, 1).to(torch.uint8),
        all_bytes.repeat_interleave(rows_of_one_scale).view(-1, 1).to(torch.uint8),
    )
    want = (scales[:, None] * values.view(1, -1)).bfloat16().view_as(got)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got)[~want.isnan()], bits(want)[~want.isnan()])


@pytest.mark.parametrize("name", ["e4m3_e8m0", "fp4_e8m0"])
@settings(max_examples=150, deadline=None)
@given(block=blocks)
def test_quantising_restored_values_changes_nothing(name: str, block: list[int]) -> None:
    quantize, dequantize = QUANTISERS[name]
    once = dequantize(*quantize(from_bits(block)))
    if once.isfinite().all():  # the largest bf16 values may round up to infinity
        assert torch.equal(bits(dequantize(*quantize(once))), bits(once))


@settings(max_examples=150, deadline=None)
@given(block=blocks)
def test_restoring_equals_encoding_and_decoding(block: list[int]) -> None:
    x = from_bits(block).repeat(300, 1)  # past the size where the arithmetic replaces the cast
    want = bits(fp8.dequantize_e4m3_e8m0(*fp8.quantize_e4m3_e8m0(x[:1])))
    assert torch.equal(bits(fp8.restore_activation(x[:1])), want)
    assert torch.equal(bits(fp8.restore_activation(x)), want.expand(300, -1))
    assert torch.equal(bits(fp4.restore_fp4_e8m0(x[:1])), bits(fp4.dequantize_fp4_e8m0(*fp4.quantize_fp4_e8m0(x[:1]))))


def test_even_channel_sits_in_the_low_nibble() -> None:
    x = torch.zeros(32, dtype=torch.bfloat16)
    x[0], x[1], x[2], x[5] = 6.0, 0.5, -1.5, -0.0
    packed, scale = fp4.quantize_fp4_e8m0(x)
    assert packed[:3].tolist() == [0x17, 0x0B, 0x80]
    assert scale.tolist() == [127]
    assert fp4.dequantize_fp4_e8m0(torch.tensor([0x2F] * 16).to(torch.uint8), scale)[:2].tolist() == [-6.0, 1.0]


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (-0.25, 8), (-5.0, 14), (0.26, 1)],
)
def test_fp4_ties_go_to_the_even_code(value: float, code: int) -> None:
    x = torch.zeros(32, dtype=torch.bfloat16)
    x[0], x[2] = 6.0, value
    assert fp4.quantize_fp4_e8m0(x)[0][1].item() == code


@pytest.mark.parametrize(
    ("byte", "value"),
    [(0x00, 0.0), (0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6), (0x38, 1.0), (0x7E, 448.0), (0xFE, -448.0)],
)
def test_e4m3_bytes(byte: int, value: float) -> None:
    assert fp8.decode_e4m3(torch.tensor([byte], dtype=torch.uint8)).item() == value


def test_e8m0_bytes() -> None:
    values = fp8.decode_e8m0(torch.arange(256).to(torch.uint8)).double()
    assert torch.equal(values[:255], torch.pow(2.0, torch.arange(255).double() - 127))  # byte 0 is subnormal, not zero
    assert values[255].isnan()
    assert fp8.decode_e4m3(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()


def test_scales_at_their_floors() -> None:
    zero = torch.zeros(32, dtype=torch.bfloat16)
    assert fp8.quantize_e4m3_e8m0(zero)[1].tolist() == [127 - 22]
    assert fp4.quantize_fp4_e8m0(zero)[1].tolist() == [1]
    assert fp4.quantize_fp4_e4m3(zero)[1].tolist() == [1, 1]  # 2^-9 as E4M3


@pytest.mark.parametrize(
    ("make", "width", "value_bytes", "row_bytes"),
    [
        (rows.window_row, 512, 512, 528),
        (rows.compressed_row, 512, 256, 288),
        (rows.index_row, 128, 64, 68),
        (rows.window_row, 64, 64, 66),
    ],
)
def test_row_byte_maps(make, width: int, value_bytes: int, row_bytes: int) -> None:
    layout = make(width)
    assert (layout.value_bytes, layout.row_bytes) == (value_bytes, row_bytes)
    x = torch.randn(5, 3, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = layout.pack(x)
    assert values.shape == (5, 3, value_bytes)
    assert scales.shape == (5, 3, row_bytes - value_bytes)
    assert values.dtype == scales.dtype == torch.uint8
    # one scale belongs to one block of channels: the second block alone gives the same bytes
    block = width // layout.scale_bytes
    assert torch.equal(
        make(32).pack(torch.cat((x[..., block : 2 * block],) * (32 // block), -1))[1][..., 0], scales[..., 1]
    )
    empty = layout.unpack(*layout.pack(x[:0]))
    assert empty.shape == (0, 3, width)


@pytest.mark.parametrize("make", [rows.window_row, rows.compressed_row, rows.index_row])
def test_gather_reads_rows_in_any_order(make) -> None:
    layout = make(64)
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = rows.PackedRows(layout, *layout.pack(x))
    dense = rows.DenseRows(layout.unpack(packed.values, packed.scales))
    ids = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(3))
    for row_ids in (ids, ids.int(), ids[:0], ids.T):
        assert torch.equal(packed.gather(row_ids), dense.rows_MC[row_ids.long()])
        assert torch.equal(dense.gather(row_ids), dense.rows_MC[row_ids.long()])


def test_widths_that_split_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32, got 48"):
        rows.window_row(48)
    with pytest.raises(ConfigError, match="multiple of 16"):
        rows.compressed_row(40)
    with pytest.raises(ConfigError, match="positive multiple of 32, got 0"):
        rows.index_row(0)
