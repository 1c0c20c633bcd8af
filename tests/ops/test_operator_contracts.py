"""Operators: a token's result never depends on the other tokens of the call, and small cases worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from leadline.config.model import YarnConfig
from leadline.errors import OperatorError
from leadline.formats import fp4, fp8
from leadline.ops import compressor, dispatch, engram, experts, hyper, linear, norm, quantize, rope, router
from leadline.ops.linear import Weight

pytestmark = pytest.mark.unit

T_ALL = 70
S = 4
EPS = 1e-20
FP32_REL = 2e-6  # a few fp32 roundings
BF16_REL = 2.0**-8  # one bf16 rounding


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1000 * len(shape) + shape[-1]))


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (randn(*shape, seed=seed) * scale).bfloat16()


def weight(N: int, K: int, seed: int = 0) -> Weight:
    return Weight.from_bf16(bf16(N, K, seed=seed, scale=K**-0.5))


def packed_weight(kind: str, N: int, K: int, seed: int = 0) -> Weight:
    x = bf16(N, K, seed=seed, scale=K**-0.5)
    if kind == "fp4":
        packed, scale = fp4.quantize_fp4_e8m0(x)
        return Weight.from_fp4(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    codes, _ = fp8.quantize_e4m3_e8m0(x)
    scale = torch.randint(118, 124, (-(-N // 32), K // 32), generator=torch.Generator().manual_seed(seed))
    return Weight.from_fp8(codes.view(torch.float8_e4m3fn), scale.to(torch.uint8).view(torch.float8_e8m0fnu))


def per_token_ops(D: int) -> dict[str, Callable[[slice], tuple[torch.Tensor, ...]]]:
    """Every operator as a function of a slice of the same 70 tokens, at an odd set of widths."""
    x, h, y = bf16(T_ALL, D), bf16(T_ALL, S, D), bf16(T_ALL, D, seed=5)
    xq = quantize.act_quant(x)
    image = torch.arange(T_ALL) % 3 == 0
    q = bf16(T_ALL, 3, 64)
    freqs = rope.frequencies(16, 1e4, None)
    position = torch.arange(T_ALL) * 977
    fn, base, scale = randn((2 + S) * S, S * D) * 0.05, randn((2 + S) * S), randn(3)
    pre, post, comb = hyper.mix_coefficients(h, fn, base, scale, 20, 1e-6, EPS)
    E, K, width = 13, 3, 96
    gate, bias, bias_vl = randn(E, D), randn(E), randn(E, seed=1)
    ids, weights = router.route(x, gate, bias, None, None, K, True, 1.5)
    pool = experts.ExpertWeights(
        [weight(width, D, e) for e in range(E)],
        [packed_weight("fp4", width, D, 100 + e).densified() for e in range(E)],
        [weight(D, width, 200 + e) for e in range(E)],
    )
    w13 = packed_weight("fp8", 2 * width, D)
    table = engram.HashTable(torch.tensor([3, 5, 7, 9]), torch.arange(6) + 101, torch.arange(6) * 200)
    window = torch.randint(-1, 90, (T_ALL, 4), generator=torch.Generator().manual_seed(7))
    c, g = randn(T_ALL, 2, 47), randn(T_ALL, 2, 47, seed=3) * 5
    w_group, wx = weight(5 * 24, 64), weight(41, D)
    w32 = randn(41, D, seed=1)

    def rotate(s: slice) -> tuple[torch.Tensor, ...]:
        turn = rope.turns(position[s], freqs)
        return turn, rope.apply_rope(q[s], turn), rope.apply_rope(q[s, 0], turn.conj())

    return {
        "rms_norm": lambda s: (norm.rms_norm(x[s], y[0], EPS), norm.rms_norm(h[s], y[0].float(), EPS)),
        "rope": rotate,
        "act_quant": lambda s: (quantize.act_quant(x[s]),),
        "index_quant": lambda s: (quantize.index_quant(q[s]),),
        "linear": lambda s: (linear.linear(x[s], wx), linear.linear(xq[s], w13)),
        "linear_f32": lambda s: (linear.linear_f32(x[s].float(), w32), linear.linear_f32(x[s], w32)),
        "grouped_linear": lambda s: (linear.grouped_linear(bf16(T_ALL, 5, 64)[s], w_group),),
        "mix_coefficients": lambda s: hyper.mix_coefficients(h[s], fn, base, scale, 20, 1e-6, EPS),
        "collapse": lambda s: (hyper.collapse(h[s], pre[s]),),
        "expand": lambda s: (hyper.expand(y[s], h[s], post[s], comb[s]),),
        "route": lambda s: router.route(x[s], gate, bias, bias_vl, image[s], K, True, 1.5),
        "moe": lambda s: (experts.moe(xq[s], ids[s], weights[s], pool, 1.0),),
        "pool_pairs": lambda s: (compressor.pool_pairs(c[s], g[s]),),
        "hash_rows": lambda s: (engram.hash_rows(window[s], table, 2),),
        "engram_gate": lambda s: (engram.engram_gate(h[s], h[s].flip(1), y[s], gate[:S], gate[:S], EPS, image[s]),),
    }


OPS = {D: per_token_ops(D) for D in (96, 384)}


@pytest.mark.parametrize("D", OPS)
@pytest.mark.parametrize("op", OPS[96])
def test_a_token_does_not_depend_on_its_neighbours(op: str, D: int) -> None:
    run = OPS[D][op]
    whole = run(slice(0, T_ALL))
    for T in [*range(14), 64]:
        for start in (0, 5):
            for got, want in zip(run(slice(start, start + T)), whole, strict=True):
                assert got.shape[0] == T
                assert torch.equal(got, want[start : start + T]), (T, start)


def test_every_registered_operator_is_covered() -> None:
    ours = {row.op for row in dispatch.table(torch.device("cpu"))} - {"sparse_attention"}
    covered = {"apply_rope" if op == "rope" else op for op in OPS[96]}
    assert {op for op in ours if not op.startswith("select")} == covered


@pytest.mark.parametrize(("K", "N"), [(20480, 24), (5120, 384), (1536, 24), (100, 7)])
def test_fp32_products_do_not_depend_on_the_row_count(K: int, N: int) -> None:
    x, w = randn(40, K), randn(N, K, seed=1)
    whole = linear.linear_f32(x, w)
    for T in [*range(1, 17), 39]:
        assert torch.equal(linear.linear_f32(x[:T], w), whole[:T]), T
    exact = x.double() @ w.double().T
    assert ((whole - exact).abs() <= FP32_REL * (x.abs() @ w.abs().T)).all()


@pytest.mark.parametrize("D", [5120, 20480, 97])
def test_norm_at_released_widths(D: int) -> None:
    x, w = bf16(40, D), bf16(D)
    whole = norm.rms_norm(x, w, EPS)
    for T in [*range(1, 14), 39]:
        assert torch.equal(norm.rms_norm(x[:T], w, EPS), whole[:T])
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
    torch.testing.assert_close(whole.double(), exact, rtol=BF16_REL, atol=0)
    assert torch.equal(norm.rms_norm(torch.zeros(1, D, dtype=torch.bfloat16), w, EPS), torch.zeros(1, D).bfloat16())


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_packed_weights_decode_by_their_blocks(kind: str) -> None:
    w = packed_weight(kind, 71, 96)
    dense = w.dense_NK()
    scale = w.scale.view(torch.uint8).double()
    n, k = 70, 65
    if kind == "fp8":
        want = w.codes[n, k].double() * 2 ** (scale[n // 32, k // 32] - 127)
    else:
        code = (w.codes[n, k // 2].item() & 0xFF) >> 4
        want = (-1) ** (code >> 3) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7] * 2 ** (scale[n, k // 32] - 127)
    assert dense[n, k].double() == want
    assert w.densified().codes is None
    assert torch.equal(w.densified().dense_NK(), dense)
    pair = Weight.stack((packed_weight(kind, 64, 96, 1), w))
    assert pair.shape == (135, 96)
    assert torch.equal(pair.dense_NK()[64:], dense)


def test_products_where_weights_cannot_be_packed_or_rows_are_dependent(monkeypatch: pytest.MonkeyPatch) -> None:
    x, values = bf16(19, 96), weight(40, 96).dense_NK()
    monkeypatch.setattr(linear.reference, "_can_pack", lambda: False)
    w = Weight.from_bf16(values)
    assert w.operand() is values
    assert torch.equal(linear.linear(x, w), F.linear(x, values))
    monkeypatch.undo()
    monkeypatch.setattr(linear.reference, "_rows_are_independent", lambda *_: False)
    for w in (Weight.from_bf16(values), packed_weight("fp8", 40, 96)):
        out = linear.linear(x, w)
        assert torch.equal(w.dense_NK(), w.densified().dense_NK())
        assert torch.equal(torch.cat([linear.linear(row, w) for row in x.split(1)]), out)
        torch.testing.assert_close(out, F.linear(x, w.dense_NK()), rtol=2**-7, atol=1e-3)


def test_sinkhorn_ways_agree_bitwise() -> None:
    h = bf16(33, S, 64, scale=3)
    args = randn(24, 256), randn(24) * 3, randn(3) * 4, 20, 1e-6, EPS
    few = [hyper.mix_coefficients(h[i : i + 1], *args)[2] for i in range(33)]
    many = hyper.mix_coefficients(h, *args)[2]
    assert torch.equal(torch.cat(few), many)
    torch.testing.assert_close(many.sum(1), torch.ones(33, S), rtol=0, atol=2e-6)  # the input side comes last


def test_mixing_sums_over_the_first_stream_index() -> None:
    h = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]]).bfloat16()
    y = torch.tensor([[0.5, 0.25]]).bfloat16()
    comb = torch.tensor([[[1.0, 2.0], [0.0, 3.0]]])  # [input, output]
    out = hyper.expand(y, h, torch.tensor([[2.0, 4.0]]), comb)
    assert out.tolist() == [[[2.0, 2.5], [34.0, 65.0]]]
    assert hyper.collapse(h, torch.tensor([[2.0, 0.5]])).tolist() == [[7.0, 14.0]]


def test_routing_ties_take_the_lowest_expert_and_bias_only_chooses() -> None:
    x, gate = torch.ones(1, 2).bfloat16(), torch.zeros(5, 2)
    ids, weights = router.route(x, gate, torch.zeros(5), None, None, 3, True, 1.5)
    assert ids.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 0.5), rtol=FP32_REL, atol=0)
    bias, image_bias = torch.tensor([0, 0, 0, 9.0, 0]), torch.tensor([0, 0, 0, 0, 9.0])
    image = torch.tensor([False, True])
    ids, weights = router.route(x.expand(2, -1), gate, bias, image_bias, image, 1, True, 2.0)
    assert ids.tolist() == [[3], [4]]
    # one expert alone is not normalised
    torch.testing.assert_close(weights, torch.full((2, 1), 2 * math.sqrt(math.log(2))), rtol=FP32_REL, atol=0)


def naive_expert(xq: torch.Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float, r: float) -> torch.Tensor:
    g = F.linear(xq, w1.dense_NK()).float().clamp(max=limit)
    u = F.linear(xq, w3.dense_NK()).float().clamp(-limit, limit)
    v = quantize.act_quant((F.silu(g) * u * r).bfloat16())
    return F.linear(v, w2.dense_NK())


@pytest.mark.parametrize("T", [1, 9])
def test_experts_sum_in_ascending_order(T: int) -> None:
    """Experts 0, 1 and 2 answer 2^24, 1 and -2^24: one is lost unless it comes last."""

    def only_first(rows: int, columns: int, value: float) -> Weight:
        dense = torch.zeros(rows, columns).bfloat16()
        dense[0, 0] = value
        return Weight.from_bf16(dense)

    gates, ups = ([only_first(32, 32, value)] * 3 for value in (32.0, 1.0))  # silu(32) is 32
    outs = [only_first(32, 32, value) for value in (2.0**19, 2.0**-5, -(2.0**19))]
    pool = experts.ExpertWeights(gates, ups, outs)
    x = quantize.act_quant(torch.ones(T, 32).bfloat16())
    for ids in ([0, 2, 1], [2, 0, 1], [1, 0, 2]):
        out = experts.moe(x, torch.tensor([ids] * T), torch.ones(T, 3), pool, 100.0)
        assert not out.any()


@pytest.mark.parametrize("T", [1, 9])
def test_experts_weigh_before_they_round(T: int) -> None:
    E, D, width, limit = 6, 64, 32, 0.5
    w1, w3, w2 = (
        [packed_weight("fp4", *s, i + e) for e in range(E)]
        for s, i in (((width, D), 0), ((width, D), 50), ((D, width), 90))
    )
    xq = quantize.act_quant(bf16(T, D, scale=3))
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:3] for t in range(T)])
    weights = randn(T, 3).abs()
    out = experts.moe(xq, ids, weights, experts.ExpertWeights(w1, w3, w2), limit)
    for t in range(T):
        want = torch.zeros(D)
        for e, r in sorted(zip(ids[t].tolist(), weights[t].tolist(), strict=True)):
            want += naive_expert(xq[t : t + 1], w1[e], w3[e], w2[e], limit, r)[0]
        # silu written with exp differs from torch's by an fp32 unit, which can move a quantised value by a step
        torch.testing.assert_close(out[t], want, rtol=0.02, atol=0.02 * want.abs().max().item())


def test_groups_of_the_output_projection_stay_apart() -> None:
    x, w = bf16(3, 2, 32), weight(10, 32)
    out = linear.grouped_linear(x, w)
    assert torch.equal(out[:, :5], F.linear(x[:, 0], w.dense_NK()[:5]))
    assert torch.equal(out[:, 5:], F.linear(x[:, 1], w.dense_NK()[5:]))


def test_rotation_pairs_neighbours_and_undoes_itself() -> None:
    turn = torch.tensor([[1j, 1 + 0j]])  # a quarter turn, then none
    x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]]).bfloat16()
    turned = rope.apply_rope(x, turn)
    assert turned.tolist() == [[9.0, -2.0, 1.0, 3.0, 4.0]]
    assert torch.equal(rope.apply_rope(turned, turn.conj()), x)


@pytest.mark.parametrize("position", [1, 4097, 1_000_003])
def test_angles_are_fp32_products(position: int) -> None:
    freqs = rope.frequencies(16, 1e4, None)
    for turn, freq in zip(rope.turns(torch.tensor([position]), freqs)[0], freqs, strict=True):
        angle = (torch.tensor(float(position)) * freq).item()  # one unit in its last place is 0.06 at a million
        assert abs(turn.item() - complex(math.cos(angle), math.sin(angle))) < FP32_REL


def test_the_stretched_pairs_stay_within_the_pairs_that_exist() -> None:
    plain = rope.frequencies(8, 10.0, None)
    wide = YarnConfig(factor=4, beta_fast=1_000_000, beta_slow=1, original_max_position_embeddings=65536)
    share = torch.arange(4) / 7  # from pair 0, not below, to 7 = width - 1, not the 17th
    torch.testing.assert_close(rope.frequencies(8, 10.0, wide), plain / 4 * share + plain * (1 - share))
    none = YarnConfig(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=6)
    torch.testing.assert_close(rope.frequencies(8, 10.0, none), plain / torch.tensor([1, 4, 4, 4]))


def test_pooling_survives_extreme_gates() -> None:
    c = torch.tensor([[[1.0, 1.0, 4.0], [3.0, 3.0, 8.0]]])
    g = torch.tensor([[[500.0, -500.0, 7.0], [-500.0, 500.0, 7.0]]])
    assert compressor.pool_pairs(c, g).tolist() == [[1.0, 3.0, 6.0]]


def test_a_dead_position_blocks_everything_before_it() -> None:
    table = engram.HashTable(torch.tensor([1, 1, 1, 1]), torch.tensor([1009] * 3), torch.tensor([0, 5000, 9000]))
    rows = engram.hash_rows(torch.tensor([[16, 32, -1, 64], [-1, 32, 64, 128]]), table, 2)
    assert rows.tolist() == [[16 ^ 32, 5000 + (16 ^ 32 ^ 2), 9000 + (16 ^ 32 ^ 2 ^ 2)], [0, 5002, 9000]]


def test_the_engram_gate_around_zero_agreement_is_just_open_or_just_not() -> None:
    h, value = torch.full((4, 1, 32), -1.0).bfloat16(), torch.full((4, 32), 2.0).bfloat16()
    key = torch.zeros(4, 1, 32).bfloat16()
    key[1], key[2, 0, 0] = 1.0, 1.0
    w = torch.ones(1, 32)
    w[0, 0] = 1e-7  # agreements: 0, about -sqrt(32), about -1e-7, and 0 inside an image
    out = engram.engram_gate(h, key, value, w, w, EPS, torch.tensor([False, False, False, True]))[:, 0, 0]
    just = math.tanh(0.5e-3)  # 2 sigma(0.001) - 1
    torch.testing.assert_close(out[[0, 2, 3]].float(), torch.tensor([just, -just, -1.0]), rtol=BF16_REL, atol=0)
    assert out[1] < -0.8


def test_operands_that_do_not_fit_are_named() -> None:
    x, w = bf16(2, 64), weight(8, 96)
    for call, words in (
        (lambda: linear.linear(x, w), r"linear x_TK: expected bf16 \[T, 96\]"),
        (lambda: linear.linear_f32(x, w.dense_NK()), "fp32 w"),
        (lambda: quantize.act_quant(x.float()), "expected bf16"),
        (lambda: quantize.index_quant(x[:, :40]), "multiple of 32"),
        (lambda: norm.rms_norm(x, x[0, :32], EPS), r"expected \[64\]"),
        (lambda: Weight.from_fp8(x.to(torch.float8_e4m3fn), torch.zeros(1, 1)), "fp8 weight"),
        (lambda: rope.apply_rope(x, torch.ones(3, 8)), "turn_TR"),
        (lambda: compressor.pool_pairs(x.view(1, 2, 64), x.view(1, 2, 64)), "fp32"),
    ):
        with pytest.raises(OperatorError, match=words):
            call()


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(OperatorError, match="no implementation named 'cuda'"):
        quantize.act_quant(bf16(1, 32), impl="cuda")
    dispatch.register("test_only", "reference", abs)
    dispatch.register("test_only", "rare", abs, lambda device: f"needs an accelerator, not {device.type}")
    try:
        with pytest.raises(OperatorError, match="'rare' cannot run on cpu: needs an accelerator"):
            dispatch.choose("test_only", "rare", torch.device("cpu"))
        listed = [(r.impl, r.runs, r.reason) for r in dispatch.table(torch.device("cpu")) if r.op == "test_only"]
        assert listed == [("reference", True, ""), ("rare", False, "needs an accelerator, not cpu")]
    finally:
        del dispatch._registry["test_only"]
