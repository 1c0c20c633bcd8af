"""Every operator implementation that runs here against the operator's definition, written down in float64.

The operands are small and seeded: odd counts, absent rows, ties, both sides of every clamp. Where a result depends on
an order or a border they are whole numbers, so that no rounding of fp32 can move it. Memory that must not be read holds
NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config.model import YarnConfig
from leadline.formats.rows import DenseRows
from leadline.ops import dispatch
from leadline.ops.compressor import pool_pairs
from leadline.ops.engram import HashTable, engram_gate, hash_rows
from leadline.ops.experts import ExpertWeights, moe
from leadline.ops.hyper import collapse, expand, mix_coefficients
from leadline.ops.linear import Weight, grouped_linear, linear, linear_f32
from leadline.ops.norm import rms_norm
from leadline.ops.quantize import act_quant, index_quant
from leadline.ops.rope import apply_rope, frequencies, turns
from leadline.ops.router import route
from leadline.ops.select import KeyRows, select_in_blocks, select_rows, select_rows_and_blocks
from leadline.ops.sparse_attention import sparse_attention
from leadline.verify.parts import Check, Part, check, part

EXACT = 0.0
FP32 = 1e-5  # sums of some tens of fp32 products, and exponentials
BF16 = 4e-3  # one rounding, at most 2^-8
TWO_BF16 = 8e-3  # probabilities, or products inside an expert, are rounded as well

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class _Case:
    """run: gives the operator's results for some of the rows when told an implementation. expected: for all rows.
    limit: on the error of each row, see `_error`."""

    run: Callable[[slice, str], tuple[Tensor, ...]]
    expected: tuple[Tensor, ...]
    limit: float


@torch.inference_mode()
def check_operators(device: torch.device) -> list[Part]:
    """One part for each implementation that runs on `device`, computed on all rows at once and on each row alone.

    On a CPU both have equal bits. The torch reference does not promise that elsewhere (decision 0001).
    """
    parts = [_check_rotations(device)]
    for row in dispatch.table(device):
        if row.runs:
            name = f"operators: {row.op}, {row.impl}"
            try:
                parts.append(_check_case(name, _CASES[row.op](_Operands(device)), row.impl, device.type == "cpu"))
            except Exception as error:  # is this part's failure; the others still say something
                reason = Check(what=f"{type(error).__name__}: {error}", value=_NAN, limit=0.0)
                parts.append(Part(name=name, worst=_NAN, rms=_NAN, checks=(reason,)))
    return parts


def _check_case(name: str, case: _Case, impl: str, same_bits: bool) -> Part:
    together = case.run(slice(None), impl)
    single = [case.run(slice(t, t + 1), impl) for t in range(len(case.expected[0]))]
    alone = [torch.cat(rows) for rows in zip(*single, strict=True)]
    error = torch.cat([_error(*both) for found in (together, alone) for both in zip(found, case.expected, strict=True)])
    checks = [check("worst", error.max(), case.limit)]
    if same_bits:
        differs = torch.stack([(a != b).any() for a, b in zip(together, alone, strict=True)])
        checks.append(check("other bits alone", differs.sum(), 0.0))
    return part(name, error, *checks)


def _error(found: Tensor, expected: Tensor) -> Tensor:
    """Per row: rms of the difference over the rms of what is expected, of the row or of all rows if that is more."""
    difference, size = ((x.flatten(1)).square().mean(1).sqrt() for x in (found.double() - expected, expected.double()))
    return difference / size.clamp_min(float(size.square().mean().sqrt()))


class _Operands:
    """Seeded tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Whole numbers from low to high."""
        return torch.randint(low, high + 1, shape, generator=self._generator).to(self.device, dtype)

    def weights(self, N: int, K: int) -> list[tuple[Weight, Tensor]]:
        """One weight of every stored form, and its values."""
        codes = self.whole(0, 255, N, K // 2, dtype=torch.uint8)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).view(N, K).long()
        fp4 = torch.cat((_E2M1, -_E2M1)).to(self.device)[nibbles]
        fp8 = self.normal(N, K).to(torch.float8_e4m3fn)
        bf16 = self.normal(N, K)
        line, tile = (self.whole(124, 130, rows, K // 32, dtype=torch.uint8) for rows in (N, -(-N // 32)))
        of_line, of_tile = (torch.exp2(e.double() - 127).repeat_interleave(32, dim=1) for e in (line, tile))
        return [
            (Weight.from_fp4(codes.view(torch.int8), line.view(torch.float8_e8m0fnu)), fp4 * of_line),
            (
                Weight.from_fp8(fp8, tile.view(torch.float8_e8m0fnu)),
                fp8.double() * of_tile.repeat_interleave(32, dim=0)[:N],
            ),
            (Weight.from_bf16(bf16), bf16.double()),
        ]


def _check_rotations(device: torch.device) -> Part:
    """Frequencies of both kinds, and what they make of positions that are small enough for fp32."""
    yarn = YarnConfig(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536)
    position_T, theta, pairs = torch.tensor([0, 1, 7, 60], device=device), 160000.0, 32
    pair = torch.arange(pairs, dtype=torch.float64, device=device)
    plain = theta ** (-pair / pairs)
    # The pairs between those that make 32 turns and one turn over the original context, rounded outwards, are blended.
    fast, slow = (pairs * math.log(65536 / (2 * math.pi * turned)) / math.log(theta) for turned in (32, 1))
    share = ((pair - math.floor(fast)) / (math.ceil(slow) - math.floor(fast))).clamp(0, 1)
    errors = []
    for scaling, frequency in ((None, plain), (yarn, plain * (1 - share + share / 16))):
        found = turns(position_T, frequencies(2 * pairs, theta, scaling).to(device))
        angle = position_T.double().unsqueeze(1) * frequency
        errors.append(_error(torch.view_as_real(found), torch.stack((angle.cos(), angle.sin()), dim=-1)))
    error = torch.cat(errors)
    return part("operators: frequencies and turns", error, check("worst", error.max(), FP32))


def _linear(o: _Operands) -> _Case:
    x, weights = o.whole(-8, 8, 5, 64), o.weights(40, 64)
    return _Case(
        lambda t, impl: tuple(linear(x[t], weight, impl=impl) for weight, _ in weights),
        tuple(x.double() @ values.T for _, values in weights),
        BF16,
    )


def _linear_f32(o: _Operands) -> _Case:
    xs, w = (o.normal(9, 64), o.normal(9, 64, dtype=torch.float32)), o.normal(40, 64, dtype=torch.float32)
    expected = tuple(x.double() @ w.double().T for x in xs)
    return _Case(lambda t, impl: tuple(linear_f32(x[t], w, impl=impl) for x in xs), expected, FP32)


def _grouped_linear(o: _Operands) -> _Case:
    x, weights = o.normal(5, 2, 64), o.weights(64, 64)
    return _Case(
        lambda t, impl: tuple(grouped_linear(x[t], weight, impl=impl) for weight, _ in weights),
        tuple(torch.cat((x[:, 0].double() @ v[:32].T, x[:, 1].double() @ v[32:].T), dim=1) for _, v in weights),
        BF16,
    )


def _rms_norm(o: _Operands) -> _Case:
    x, weight = o.normal(5, 96), o.normal(96, dtype=torch.float32)
    x[1] = 0
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    return _Case(lambda t, impl: (rms_norm(x[t], weight, 1e-6, impl=impl),), (normed,), BF16)


def _apply_rope(o: _Operands) -> _Case:
    x, angle = o.normal(5, 3, 48), o.normal(5, 16, dtype=torch.float32)
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_complex(x[..., 16:].double().view(5, 3, 16, 2)) * turn[:, None]
    expected = torch.cat((x[..., :16].double(), torch.view_as_real(turned).flatten(-2)), dim=-1)
    return _Case(lambda t, impl: (apply_rope(x[t], turn[t], impl=impl),), (expected,), BF16)


def _act_quant(o: _Operands) -> _Case:
    x = o.normal(90, 96) * o.normal(90, 1)  # more values than are cast one by one
    x[0], x[1] = 0, x[1] * 1e-7  # below the least scale
    step = _power_of_two(x, 448, 1e-4)
    expected = (x.double() / step).float().to(torch.float8_e4m3fn).double() * step
    return _Case(lambda t, impl: (act_quant(x[t], impl=impl),), (expected,), EXACT)


def _index_quant(o: _Operands) -> _Case:
    x = o.whole(-48, 48, 5, 96)  # ties between codes among them
    x[0] = 0
    step = _power_of_two(x, 6, 6 * 2.0**-126)
    distance = ((x.double() / step).abs().unsqueeze(-1) - _E2M1.to(x.device)).abs()
    code = (distance + 2.0**-20 * (torch.arange(8, device=x.device) % 2)).argmin(-1)  # of two as near the even one
    expected = _E2M1.to(x.device)[code].copysign(x.double()) * step
    return _Case(lambda t, impl: (index_quant(x[t], impl=impl),), (expected,), EXACT)


def _power_of_two(x: Tensor, largest: float, floor: float) -> Tensor:
    """The scale of each value's block of 32: the least power of two that brings the block down to `largest`."""
    amax = x.double().abs().view(*x.shape[:-1], -1, 32).amax(-1)
    return torch.exp2((amax.clamp_min(floor) / largest).log2().ceil()).repeat_interleave(32, dim=-1)


def _pool_pairs(o: _Operands) -> _Case:
    c, g = o.normal(5, 2, 48, dtype=torch.float32), o.normal(5, 2, 48, dtype=torch.float32)
    pooled = (c.double() * g.double().softmax(1)).sum(1)
    return _Case(lambda t, impl: (pool_pairs(c[t], g[t], impl=impl),), (pooled,), FP32)


def _mix_coefficients(o: _Operands) -> _Case:
    h, S, eps = o.normal(11, 4, 32), 4, 1e-6
    h[1] = 0
    fn, base = o.normal(24, 128, dtype=torch.float32), o.normal(24, dtype=torch.float32)
    scale = torch.tensor([0.5, 1.0, 1.5], device=o.device)
    x = h.double().flatten(1)
    m = x @ fn.double().T / (x.square().mean(1, keepdim=True) + 1e-20).sqrt()
    m = m * scale.double().repeat_interleave(torch.tensor([S, S, S * S], device=o.device)) + base.double()
    comb = m[:, 2 * S :].view(-1, S, S).softmax(-1) + eps
    for i in range(39):
        comb = comb / (comb.sum(1 + i % 2, keepdim=True) + eps)
    expected = (m[:, :S].sigmoid() + eps, 2 * m[:, S : 2 * S].sigmoid(), comb)
    return _Case(lambda t, impl: mix_coefficients(h[t], fn, base, scale, 20, eps, 1e-20, impl=impl), expected, FP32)


def _collapse(o: _Operands) -> _Case:
    h, pre = o.normal(5, 4, 48), o.normal(5, 4, dtype=torch.float32)
    expected = (h.double() * pre.double().unsqueeze(-1)).sum(1)
    return _Case(lambda t, impl: (collapse(h[t], pre[t], impl=impl),), (expected,), BF16)


def _expand(o: _Operands) -> _Case:
    y, h = o.normal(5, 48), o.normal(5, 4, 48)
    post, comb = o.normal(5, 4, dtype=torch.float32), o.normal(5, 4, 4, dtype=torch.float32)
    streams = post.double().unsqueeze(-1) * y.double().unsqueeze(1) + comb.double().transpose(1, 2) @ h.double()
    return _Case(lambda t, impl: (expand(y[t], h[t], post[t], comb[t], impl=impl),), (streams,), BF16)


def _route(o: _Operands) -> _Case:
    x, gate = o.whole(-2, 2, 7, 8), o.whole(-1, 1, 12, 8, dtype=torch.float32)
    gate[6:] = gate[:6]  # ties, which go to the lower expert
    bias, bias_vl = o.whole(0, 1, 2, 6, dtype=torch.float32).repeat(1, 2)
    image = torch.arange(7, device=o.device) % 3 == 0
    score = torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt()
    choice = score + torch.where(image[:, None], bias_vl, bias)
    ranked = choice.sort(dim=1, descending=True, stable=True).indices
    variants = ((4, True), (4, False), (1, True))  # a single expert is not normalised
    expected: list[Tensor] = []
    for top_k, is_normed in variants:
        weights = score.gather(1, ranked[:, :top_k])
        if is_normed and top_k > 1:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        expected += (ranked[:, :top_k], weights * 2.5)

    def run(t: slice, impl: str) -> tuple[Tensor, ...]:
        found = [route(x[t], gate, bias, bias_vl, image[t], *variant, 2.5, impl=impl) for variant in variants]
        return tuple(itertools.chain(*found))

    return _Case(run, tuple(expected), FP32)


def _moe(o: _Operands) -> _Case:
    x, limit = o.whole(-3, 3, 7, 32), 10.0
    experts = torch.stack([torch.arange(t, t + 3, device=o.device) % 5 for t in (0, 3, 1, 1, 4, 2, 2)])
    weights = o.normal(7, 3, dtype=torch.float32)
    w1, w3, w2 = ([o.weights(*shape)[0] for _ in range(5)] for shape in ((64, 32), (64, 32), (32, 64)))
    expected = torch.zeros(7, 32, dtype=torch.float64, device=o.device)
    for t, k in itertools.product(range(7), range(3)):
        e = int(experts[t, k])
        gate, up = ((x[t].double() @ w[e][1].T).bfloat16().double() for w in (w1, w3))
        gate = gate.clamp_max(limit)
        hidden = (gate * gate.sigmoid() * up.clamp(-limit, limit) * weights[t, k].double()).bfloat16()
        step = _power_of_two(hidden, 448, 1e-4)
        expected[t] += (hidden.double() / step).float().to(torch.float8_e4m3fn).double() * step @ w2[e][1].T
    stored = ExpertWeights(*([weight for weight, _ in w] for w in (w1, w3, w2)))
    return _Case(lambda t, impl: (moe(x[t], experts[t], weights[t], stored, limit, impl=impl),), (expected,), TWO_BF16)


def _hash_rows(o: _Operands) -> _Case:
    factors, primes, offsets, pad_id = [2**60 + 1, 2**59 + 3, 2**58 + 5], [11, 13, 17, 19], [0, 11, 24, 41], 5
    lines = [[3, 2, 1], [1, -1, 2], [0, 3, -1], [-1, -1, -1], [3, 3, 3]]
    expected = []
    for line in lines:
        blocked = list(itertools.accumulate(line, lambda before, token: -1 if before < 0 else token))
        mixed = [(token if token >= 0 else pad_id) * factor for token, factor in zip(blocked, factors, strict=True)]
        hashes = [mixed[0] ^ mixed[1]] * 2 + [mixed[0] ^ mixed[1] ^ mixed[2]] * 2
        expected.append([h % p + at for h, p, at in zip(hashes, primes, offsets, strict=True)])
    table = HashTable(*(torch.tensor(values, device=o.device) for values in (factors, primes, offsets)))
    window = torch.tensor(lines, device=o.device)
    return _Case(
        lambda t, impl: (hash_rows(window[t], table, pad_id, impl=impl),),
        (torch.tensor(expected, device=o.device),),
        EXACT,
    )


def _engram_gate(o: _Operands) -> _Case:
    h, key, value = o.normal(7, 4, 48), o.normal(7, 4, 48), o.normal(7, 48)
    h[2], key[3] = 0, 0
    q_weight, k_weight = o.normal(4, 48, dtype=torch.float32), o.normal(4, 48, dtype=torch.float32)
    image = torch.arange(7, device=o.device) % 3 == 1
    normed = [x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (h, key)]
    d = (normed[0] * normed[1] * q_weight.double() * k_weight.double()).sum(-1, keepdim=True) / 48**0.5
    gate = d.abs().clamp_min(1e-6).sqrt().copysign(d).sigmoid() * ~image[:, None, None]
    expected = h.double() + gate * value.double().unsqueeze(1)

    def run(t: slice, impl: str) -> tuple[Tensor, ...]:
        return (engram_gate(h[t], key[t], value[t], q_weight, k_weight, 1e-6, image[t], impl=impl),)

    return _Case(run, (expected,), BF16)


class _Selection:
    """Queries on 70 rows, of which some see fewer; keys lie scattered in a pool of NaN."""

    sizes = (16, 3), (80, 3), (16, 9)  # rows and blocks to keep: fewer than there are, all rows, all blocks
    block_size = 8

    def __init__(self, o: _Operands) -> None:
        self.q, keys = o.whole(-1, 1, 7, 2, 32), o.whole(-1, 1, 70, 32)
        self.weight = o.whole(-2, 3, 7, 2, dtype=torch.float32)
        self.weight[6] = -1  # no score above zero
        self.visible = [70, 0, 1, 16, 37, 64, 70]
        self.visible_T = torch.tensor(self.visible, device=o.device)
        physical = torch.arange(70, device=o.device) * 3 % 211 + 1
        pool = torch.full((212, 32), _NAN, dtype=torch.bfloat16, device=o.device)
        pool[physical] = keys
        self.keys = KeyRows(DenseRows(pool), physical)
        products = (self.q.double() @ keys.double().T).relu()
        self.score: list[list[float]] = (products * self.weight.double().unsqueeze(-1)).sum(1).tolist()

    def operands(self, t: slice) -> tuple[Tensor, Tensor, KeyRows, Tensor]:
        return self.q[t], self.weight[t], self.keys, self.visible_T[t]

    def blocks(self, num_blocks: int) -> Tensor:
        """The newest block and the best others, by the best row that is visible."""
        lines = []
        for score, visible in zip(self.score, self.visible, strict=True):
            best = [max(score[a : min(a + self.block_size, visible)]) for a in range(0, visible, self.block_size)]
            best[-1:] = [math.inf] * len(best[-1:])
            lines.append(_best(best, range(len(best)), num_blocks))
        return torch.tensor(lines, device=self.q.device)

    def rows(self, k: int, block_idx_TB: Tensor | None = None) -> Tensor:
        """The best rows of all that are visible, or of those inside the blocks."""
        lines = []
        for t, (score, visible) in enumerate(zip(self.score, self.visible, strict=True)):
            blocks = range(visible) if block_idx_TB is None else block_idx_TB[t].tolist()
            seen = [row for row in range(visible) if row // self.block_size in blocks]
            lines.append(_best(score, seen, k))
        return torch.tensor(lines, device=self.q.device)


def _best(score: Sequence[float], candidates: Sequence[int], keep: int) -> list[int]:
    """The `keep` best candidates in ascending order, of equal ones the lowest, and -1 for what is missing."""
    ranked = sorted(candidates, key=lambda number: (-score[number], number))[:keep]
    return sorted(ranked) + [-1] * (keep - len(ranked))


def _select_rows(o: _Operands) -> _Case:
    s = _Selection(o)
    return _Case(
        lambda t, impl: tuple(select_rows(*s.operands(t), k, impl=impl) for k, _ in s.sizes),
        tuple(s.rows(k) for k, _ in s.sizes),
        EXACT,
    )


def _select_rows_and_blocks(o: _Operands) -> _Case:
    s = _Selection(o)

    def run(t: slice, impl: str) -> tuple[Tensor, ...]:
        found = [select_rows_and_blocks(*s.operands(t), k, n, s.block_size, impl=impl) for k, n in s.sizes]
        return tuple(itertools.chain(*found))

    return _Case(run, tuple(itertools.chain(*((s.rows(k), s.blocks(n)) for k, n in s.sizes))), EXACT)


def _select_in_blocks(o: _Operands) -> _Case:
    s = _Selection(o)
    given = [(k, s.blocks(n)) for k, n in s.sizes]
    return _Case(
        lambda t, impl: tuple(select_in_blocks(*s.operands(t), b[t], s.block_size, k, impl=impl) for k, b in given),
        tuple(s.rows(k, b) for k, b in given),
        EXACT,
    )


def _sparse_attention(o: _Operands) -> _Case:
    q, sink, scale = o.normal(5, 3, 32), o.normal(3, dtype=torch.float32), 32**-0.5
    window, selected = o.normal(9, 32), o.normal(90, 32)
    window[0], selected[0] = _NAN, _NAN  # stands in where a list says -1
    window_idx = o.whole(1, 8, 5, 7, dtype=torch.int64)
    selected_idx = o.whole(1, 89, 5, 70, dtype=torch.int64)
    window_idx[0, :4], selected_idx[1, 60:], window_idx[2], selected_idx[2] = -1, -1, -1, -1

    def attended(*sources: tuple[Tensor, Tensor]) -> Tensor:
        out = []
        for t in range(5):
            rows = torch.cat([pool[idx[t][idx[t] >= 0]] for pool, idx in sources]).double()
            logits = torch.cat((q[t].double() @ rows.T * scale, sink.double().unsqueeze(1)), dim=1)
            out.append(logits.softmax(1)[:, :-1] @ rows)
        return torch.stack(out)

    near, far = DenseRows(window), DenseRows(selected)

    def run(t: slice, impl: str) -> tuple[Tensor, ...]:
        return (
            sparse_attention(q[t], near, window_idx[t], far, selected_idx[t], sink, scale, impl=impl),
            sparse_attention(q[t], near, window_idx[t], None, None, sink, scale, impl=impl),
        )

    both = attended((window, window_idx), (selected, selected_idx))
    return _Case(run, (both, attended((window, window_idx))), TWO_BF16)


_CASES: dict[str, Callable[[_Operands], _Case]] = {
    "act_quant": _act_quant,
    "apply_rope": _apply_rope,
    "collapse": _collapse,
    "engram_gate": _engram_gate,
    "expand": _expand,
    "grouped_linear": _grouped_linear,
    "hash_rows": _hash_rows,
    "index_quant": _index_quant,
    "linear": _linear,
    "linear_f32": _linear_f32,
    "mix_coefficients": _mix_coefficients,
    "moe": _moe,
    "pool_pairs": _pool_pairs,
    "rms_norm": _rms_norm,
    "route": _route,
    "select_in_blocks": _select_in_blocks,
    "select_rows": _select_rows,
    "select_rows_and_blocks": _select_rows_and_blocks,
    "sparse_attention": _sparse_attention,
}
