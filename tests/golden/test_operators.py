"""Operators against the recorded outputs of the published reference (tolerances are those of the recordings)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadline.config.model import ModelConfig, YarnConfig, read_config
from leadline.formats import fp8, rows
from leadline.ops import engram, hyper, router
from leadline.ops.linear import Weight, linear, linear_f32
from leadline.ops.quantize import act_quant
from leadline.ops.reference.hyper import split
from leadline.ops.rope import apply_rope, frequencies, turns
from leadline.text.token_map import token_map
from tests.support.released_tokenizer import released_tokenizer

pytestmark = pytest.mark.golden

HERE = Path(__file__).parent
GEMM_SUM_ORDER = 2e-6  # of the sum of absolute products: any order of fp32 sums
MIXING_REL = 2e-5  # fp32 coefficients after 39 normalisations
ROUTING_REL = 1e-5
GATE_RMS = 5e-3  # of what the gate adds to the stream
EPS = 1e-20
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
    turn = turns(position, freqs)
    limit = (ANGLE_BASE + ANGLE_PER_POSITION * position).unsqueeze(-1)
    assert ((turn.real - data[f"{setting}/cos"]).abs() <= limit).all()
    assert ((turn.imag - data[f"{setting}/sin"]).abs() <= limit).all()
    turn = turns(data[f"{setting}/apply_positions"].long(), freqs)
    for layout in ("bsd", "bshd"):
        for x, forward, inverse in zip(
            *(data[f"{setting}/{layout}/{k}"] for k in ("x", "forward", "inverse")), strict=True
        ):
            assert bf16_steps(apply_rope(x, turn), forward) <= 1
            assert bf16_steps(apply_rope(x, turn.conj()), inverse) <= 1


@pytest.mark.parametrize(("case", "S", "iters"), [("plain", 4, 20), ("wide_logits", 4, 20), ("two_copies", 2, 5)])
def test_stream_coefficients(case: str, S: int, iters: int) -> None:
    data = {k.rsplit("/", 1)[1]: v for k, v in load("stream_mixing").items() if k.startswith(f"split/{case}/")}
    out = split(data["mixes"].flatten(0, 1), data["base"], data["scale"], S, iters, 1e-6)
    for got, name in zip(out, ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(got, data[name].flatten(0, 1), rtol=MIXING_REL, atol=0)


@pytest.mark.parametrize("case", [0, 1])
def test_stream_mixing(case: int) -> None:
    data = {k.rsplit("/", 1)[1]: v for k, v in load("stream_mixing").items() if k.startswith(f"block/{case}/")}
    h, y = data["stream"].flatten(0, 1), data["sublayer_out"].flatten(0, 1)
    out = hyper.mix_coefficients(h, data["fn"], data["base"], data["scale"], 20, 1e-6, EPS)
    for got, name in zip(out, ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(got, data[name].flatten(0, 1), rtol=MIXING_REL, atol=0)
    assert bf16_steps(hyper.collapse(h, data["pre_mix_in"].flatten(0, 1)), data["collapsed"].flatten(0, 1)) <= 1
    assert bf16_steps(hyper.expand(y, h, out[1], out[2]), data["expanded"].flatten(0, 1)) <= 1


@pytest.mark.parametrize("tokens", ["text", "mixed"])
@pytest.mark.parametrize(
    ("case", "top_k", "scaling"),
    [("small", 4, 1.5), ("released_counts", 6, 1.5), ("draft_counts", 3, 1.5), ("one_expert", 1, 2.0)],
)
def test_routing(case: str, top_k: int, scaling: float, tokens: str) -> None:
    data = {k.removeprefix(f"{case}/"): v for k, v in load("routing").items() if k.startswith(f"{case}/")}
    image = data["image_mask"].bool() if tokens == "mixed" else None
    gate = data["weight"].float()
    ids, weights = router.route(data["x"], gate, data["bias"], data["bias_image"], image, top_k, True, scaling)
    assert torch.equal(ids, data[f"{tokens}/experts"].long())
    torch.testing.assert_close(weights, data[f"{tokens}/weights"], rtol=ROUTING_REL, atol=0)


def test_engram_gate() -> None:
    data = load("engram_gate")
    table = rows.PackedRows(rows.window_row(32), data["table_codes"], data["table_scale"])
    fetched = table.gather(data["rows"])
    assert torch.equal(fetched, data["fetched"])
    x = act_quant(fetched.flatten(2).flatten(0, 1))
    wkv = Weight.from_fp8(data["wkv_codes"].view(torch.float8_e4m3fn), e8m0(data["wkv_scale"]))
    assert bf16_steps(linear(x, wkv), data["key_value"].flatten(0, 1)) <= 1
    key, value = data["key_value"].flatten(0, 1).split((256, 64), dim=-1)
    h = data["stream"].flatten(0, 1)
    shut = data["token_mask"].flatten() == 0
    for image, name in ((None, "out"), (shut, "out_masked")):
        out = engram.engram_gate(h, key.view(-1, 4, 64), value, data["q_weight"], data["k_weight"], EPS, image)
        want = data[name].flatten(0, 1)
        added = want.float() - h.float()
        assert (out.float() - want.float()).square().mean() <= GATE_RMS**2 * added.square().mean()
    assert torch.equal(out[shut], h[shut])


@pytest.fixture(scope="module")
def released_config() -> ModelConfig:
    return read_config(HERE / "released_config.json")


@pytest.fixture(scope="module")
def compressed_ids(released_config: ModelConfig) -> torch.Tensor:
    return token_map(released_tokenizer(released_config), released_config)


def hash_config(layout: str, released: ModelConfig) -> ModelConfig:
    if layout == "released":
        return released
    return replace(
        released,
        engram_layer_ids=(0, 2, 5),
        engram_num_embeddings=(630, 834, 1020),
        engram_vocab_size=97,
        engram_max_ngram_size=3,
        engram_n_heads=3,
    )


@pytest.mark.parametrize("layout", ["released", "small"])
def test_engram_hash(layout: str, released_config: ModelConfig, compressed_ids: torch.Tensor) -> None:
    data = {k.removeprefix(f"{layout}/"): v for k, v in load("engram_hash").items() if k.startswith(f"{layout}/")}
    config = hash_config(layout, released_config)
    tables = engram.build_hash_tables(config)
    n = config.engram_max_ngram_size
    assert tuple(tables) == config.engram_layer_ids
    for i, table in enumerate(tables.values()):
        assert torch.equal(table.primes, data["primes"][i].flatten().long())
        assert torch.equal(table.offsets, data["offsets"][i].long())
        assert torch.equal(table.multipliers, data["multipliers"][i])
    for case in ("text", "image", "continued", "random"):
        ids = compressed_ids[data[f"{case}/input_ids"].long()]
        if f"{case}/token_mask" in data:
            ids = torch.where(data[f"{case}/token_mask"].bool(), ids, -1)
        padded = torch.nn.functional.pad(ids, (n - 1, 0), value=-1)
        window = padded.unfold(1, n, 1).flip(-1).flatten(0, 1)
        for i, table in enumerate(tables.values()):
            got = engram.hash_rows(window, table, compressed_ids[config.engram_pad_token_id].item())
            assert torch.equal(got, data[f"{case}/hash_ids"][:, :, i].flatten(0, 1)), case
