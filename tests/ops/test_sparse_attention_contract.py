"""Sparse attention against the block loop of the specification and against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.errors import OperatorError
from leadline.formats.rows import DenseRows, PackedRows, compressed_row, window_row
from leadline.ops.reference import sparse_attention as reference
from leadline.ops.sparse_attention import sparse_attention

pytestmark = pytest.mark.unit

# Against the loop with the same rounding points: only fp32 summation order differs, which moves the final rounding to
# bf16 by one unit now and then, and a probability by one unit of bf16 even more rarely.
LOOP_RTOL, LOOP_ATOL = 2**-7, 2**-9
LOOP_EQUAL = 0.99  # share of elements equal bit for bit; measured: 0.9997 (without the rounding of p: 0.75)
# Against float64: probabilities carry 8 bits.
EXACT_ATOL = 2**-7


def loop(q_THC: Tensor, rows_MC: Tensor, idx_TN: Tensor, sink_H: Tensor, scale: float, round_p: bool = True) -> Tensor:
    """architecture.md 4.9 read aloud: one query, one head, one block of 64 after the other."""
    T, H, C = q_THC.shape
    out = torch.empty_like(q_THC)
    for t in range(T):
        for h in range(H):
            maximum, total, acc_C = torch.tensor(-1e30), torch.tensor(0.0), torch.zeros(C)
            for a in range(0, idx_TN.shape[1], 64):
                ids = [int(i) for i in idx_TN[t, a : a + 64] if i >= 0]
                logit = (rows_MC[ids].float() @ q_THC[t, h].float()) * scale
                grown = torch.maximum(maximum, logit.max()) if ids else maximum
                p = (logit - grown).exp()
                rescale = (maximum - grown).exp()
                total = total * rescale + p.sum()
                acc_C = acc_C * rescale + (p.bfloat16().float() if round_p else p) @ rows_MC[ids].float()
                maximum = grown
            total = total + (sink_H[h] - maximum).exp()
            out[t, h] = acc_C / total if bool((idx_TN[t] >= 0).any()) else 0.0
    return out


def exact(q_THC: Tensor, rows_MC: Tensor, idx_TN: Tensor, sink_H: Tensor, scale: float) -> Tensor:
    """Float64 softmax over the named rows and the sink."""
    row_TNC = rows_MC.double()[idx_TN.clamp(min=0)]
    logit_THN = torch.einsum("thc,tnc->thn", q_THC.double(), row_TNC) * scale
    logit_THN = logit_THN.masked_fill((idx_TN < 0)[:, None], -torch.inf)
    sink_TH1 = sink_H.double()[None, :, None].expand(q_THC.shape[0], -1, 1)
    p_THN = torch.cat((logit_THN, sink_TH1), dim=2).softmax(2)[:, :, :-1]
    return torch.einsum("thn,tnc->thc", p_THN, row_TNC)


def operands(seed: int, T: int, H: int, C: int, M: int, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(T, H, C, generator=g) * sharp).bfloat16()
    return q, torch.randn(M, C, generator=g).bfloat16(), torch.randn(H, generator=g)


def indices(seed: int, T: int, N: int, M: int, holes: float) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    idx_TN = torch.randint(0, M, (T, N), generator=g)
    return idx_TN.masked_fill(torch.rand(T, N, generator=g) < holes, -1)


def attend(q: Tensor, rows: Tensor, idx: Tensor, num_window: int, sink: Tensor, scale: float) -> Tensor:
    """One pool serves both lists."""
    pool = DenseRows(rows)
    return sparse_attention(q, pool, idx[:, :num_window], pool, idx[:, num_window:], sink, scale)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_equals_the_block_loop_and_float64(data: st.DataObject) -> None:
    T, H = data.draw(st.integers(0, 4), "T"), data.draw(st.integers(1, 5), "H")
    C = data.draw(st.sampled_from([16, 32, 64]), "C")
    W, K = data.draw(st.integers(0, 140), "W"), data.draw(st.integers(0, 140), "K")
    seed = data.draw(st.integers(0, 99), "seed")
    holes = data.draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]), "holes")
    q, rows, sink = operands(seed, T, H, C, 30, data.draw(st.sampled_from([0.3, 1.0, 6.0]), "sharp"))
    idx = indices(seed, T, W + K, 30, holes)  # more places than rows: repeats
    got = attend(q, rows, idx, W, sink, C**-0.5)
    assert got.dtype is torch.bfloat16
    assert got.shape == (T, H, C)
    torch.testing.assert_close(got, loop(q, rows, idx, sink, C**-0.5), rtol=LOOP_RTOL, atol=LOOP_ATOL)
    limit = EXACT_ATOL * float(rows.abs().max())
    torch.testing.assert_close(got.double(), exact(q, rows, idx, sink, C**-0.5), rtol=0, atol=limit)


def test_keeps_the_rounding_points() -> None:
    q, rows, sink = operands(1, 8, 16, 64, 200, 2.0)
    idx = indices(1, 8, 200, 200, 0.1)
    got = attend(q, rows, idx, 64, sink, 0.125)
    same = (got == loop(q, rows, idx, sink, 0.125)).float().mean()
    assert same > LOOP_EQUAL
    without = (got == loop(q, rows, idx, sink, 0.125, round_p=False)).float().mean()
    assert without < LOOP_EQUAL


@pytest.mark.parametrize(("H", "C", "W", "K"), [(64, 512, 128, 512), (4, 64, 8, 5), (3, 32, 70, 7), (8, 64, 64, 66)])
def test_f2_result_does_not_depend_on_neighbours(
    H: int, C: int, W: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise: alone, in pieces, and in tiles of every size; full and half empty queries side by side."""
    T = 9 if C == 512 else 30
    q, rows, sink = operands(2, T, H, C, 300)
    idx = indices(2, T, W + K, 300, 0.0)
    idx[::2, W + K // 2 :] = -1
    whole = attend(q, rows, idx, W, sink, C**-0.5)
    for part in [*(slice(t, t + 1) for t in range(T)), slice(1, 4), slice(2, T)]:
        assert torch.equal(attend(q[part], rows, idx[part], W, sink, C**-0.5), whole[part])
    monkeypatch.setattr(reference, "_TILE", 4 * (W + K) * max(C, H))
    assert torch.equal(attend(q, rows, idx, W, sink, C**-0.5), whole)


def test_f7_released_shapes_by_name_on_packed_rows() -> None:
    """64 heads of 512, byte rows of both kinds, 128 + 512 places."""
    T, H, C, M = 2, 64, 512, 700
    q, rows, sink = operands(3, T, H, C, M)
    window_layout, compressed_layout = window_row(C), compressed_row(C)
    window = PackedRows(window_layout, *window_layout.pack(rows))
    selected = PackedRows(compressed_layout, *compressed_layout.pack(rows))
    w_idx, s_idx = indices(3, T, 128, M, 0.2), indices(4, T, 512, M, 0.2)
    got = sparse_attention(q, window, w_idx, selected, s_idx, sink, C**-0.5, impl="reference")
    both = torch.cat((window.gather(torch.arange(M)), selected.gather(torch.arange(M))))
    idx = torch.cat((w_idx, torch.where(s_idx < 0, -1, s_idx + M)), dim=1)
    limit = EXACT_ATOL * float(both.abs().max())
    torch.testing.assert_close(got.double(), exact(q, both, idx, sink, C**-0.5), rtol=0, atol=limit)
    with pytest.raises(OperatorError, match="no implementation named 'other'"):
        sparse_attention(q, window, w_idx, selected, s_idx, sink, C**-0.5, impl="other")


def test_f8_nothing_selected_is_attention_over_the_window() -> None:
    """The pool of selected rows was never written; one query has no index at all."""
    q, rows, sink = operands(5, 3, 4, 64, 50)
    unwritten = DenseRows(torch.full((8, 64), float("nan"), dtype=torch.bfloat16))
    w_idx = indices(5, 3, 16, 50, 0.3)
    w_idx[1] = -1
    none_TK = torch.full((3, 70), -1)
    got = sparse_attention(q, DenseRows(rows), w_idx, unwritten, none_TK, sink, 0.125)
    window_only = sparse_attention(q, DenseRows(rows), w_idx, None, None, sink, 0.125)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert bool(torch.isfinite(got).all())
    torch.testing.assert_close(got, window_only, rtol=LOOP_RTOL, atol=0)


@pytest.mark.parametrize("sink", [float("-inf"), float("inf"), 0.0, 1e4])
def test_f8_extreme_sinks_stay_finite(sink: float) -> None:
    q, rows, _ = operands(6, 2, 4, 64, 50)
    idx = indices(6, 2, 70, 50, 0.0)
    idx[1] = -1
    got = attend(q, rows, idx, 64, torch.full((4,), sink), 0.125)
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert bool((got[0] != 0).any()) == (sink < 100)


def test_unwritten_rows_never_leak() -> None:
    q, rows, sink = operands(7, 4, 4, 64, 50)
    idx = indices(7, 4, 100, 49, 0.5) + 1
    idx[idx == 0] = -1
    poisoned = rows.clone()
    poisoned[0] = float("nan")  # the row that a clamped -1 would read
    assert torch.equal(attend(q, poisoned, idx, 30, sink, 0.125), attend(q, rows, idx, 30, sink, 0.125))


def test_an_index_named_twice_counts_twice() -> None:
    q, rows, _ = operands(8, 1, 2, 32, 4)
    low_sink = torch.full((2,), -100.0)
    twice = attend(q, rows, torch.tensor([[0, 1, 0]]), 2, low_sink, 0.2).double()
    p = (torch.einsum("hc,mc->hm", q[0].double(), rows[:2].double()) * 0.2).exp() * torch.tensor([2.0, 1.0])
    expected = (p / p.sum(1, keepdim=True)) @ rows[:2].double()
    torch.testing.assert_close(twice[0], expected, rtol=0, atol=EXACT_ATOL * float(rows.abs().max()))


def test_operands_that_do_not_fit_are_refused() -> None:
    q, rows, sink = operands(9, 2, 4, 32, 5)
    pool, idx = DenseRows(rows), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(OperatorError, match="q_THC: expected bf16"):
        sparse_attention(q.float(), pool, idx, None, None, sink, 1.0)
    with pytest.raises(OperatorError, match="expected both or neither"):
        sparse_attention(q, pool, idx, pool, None, sink, 1.0)
    with pytest.raises(OperatorError, match=r"window_idx_TW: expected int64 \[2, N\]"):
        sparse_attention(q, pool, idx[:1], None, None, sink, 1.0)
    with pytest.raises(OperatorError, match=r"sink_H: expected fp32 \[4\]"):
        sparse_attention(q, pool, idx, None, None, sink[:3], 1.0)
