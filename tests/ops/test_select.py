"""Index selection against a plain sort of float64 scores, and the faults of other engines (ties, padding, memory)."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.errors import OperatorError
from leadline.formats.rows import DenseRows, PackedRows, index_row
from leadline.ops import select
from leadline.ops.reference import select as reference
from tests.support.selection import operands_for_scores

pytestmark = pytest.mark.unit

# Sizes that make a few hundred rows cross every border of the tiling.
SMALL_TILES = {"_TILE": 64, "_SPAN": 128, "_SCORES": 512, "_BEST": 128, "_PRODUCTS": 1024, "_RANKED": 300}


def best_rows(score_N: Tensor, row_N: list[int], k: int) -> list[int]:
    order = sorted(range(len(row_N)), key=lambda i: (-float(score_N[i]), row_N[i]))[:k]
    return sorted(row_N[i] for i in order)


def padded(rows: list[int], k: int) -> list[int]:
    return rows + [-1] * (k - len(rows))


def naive_scores(q_TJX: Tensor, w_TJ: Tensor, rows_MX: Tensor) -> Tensor:
    dot_TJM = torch.einsum("tjx,mx->tjm", q_TJX.double(), rows_MX.double())
    return torch.einsum("tj,tjm->tm", w_TJ.double(), dot_TJM.clamp_min(0))


def naive_rows(score_TM: Tensor, visible: list[int], k: int) -> list[list[int]]:
    return [padded(best_rows(s[:n], list(range(n)), k), k) for s, n in zip(score_TM, visible, strict=True)]


def naive_blocks(score_TM: Tensor, visible: list[int], num_blocks: int, block_size: int) -> list[list[int]]:
    out = []
    for score_M, n in zip(score_TM, visible, strict=True):
        blocks = list(range(-(-n // block_size)))
        best = [float(score_M[b * block_size : min((b + 1) * block_size, n)].max()) for b in blocks]
        if best:
            best[-1] = float("inf")
        out.append(padded(best_rows(torch.tensor(best, dtype=torch.float64), blocks, num_blocks), num_blocks))
    return out


def naive_in_blocks(
    score_TM: Tensor, visible: list[int], blocks: list[list[int]], block_size: int, k: int
) -> list[list[int]]:
    out = []
    for score_M, n, chosen in zip(score_TM, visible, blocks, strict=True):
        rows = [r for b in chosen if b >= 0 for r in range(b * block_size, min((b + 1) * block_size, n))]
        out.append(padded(best_rows(score_M[rows], rows, k), k))
    return out


def exact_operands(seed: int, T: int, J: int, X: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values so coarse that fp32 scores are exact and equal scores are common."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
    q = grid[torch.randint(0, 15, (T, J, X), generator=g)].bfloat16()
    rows = (grid[torch.randint(0, 15, (M, X), generator=g)] * (torch.rand(M, X, generator=g) < 0.1)).bfloat16()
    return q, torch.randint(-3, 6, (T, J), generator=g) / 64, rows


def real_operands(seed: int, T: int, J: int, X: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unquantised values: no dot product is exact, so any change of summation order shows."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(T, J, X, generator=g).bfloat16()
    return q, torch.randn(T, J, generator=g) / 64, torch.randn(M, X, generator=g).bfloat16()


def paged(rows_MX: Tensor, num_rows: int, seed: int = 0, page: int = 16) -> select.KeyRows:
    """The first `num_rows` rows scattered over the pages of a pool that is NaN everywhere else."""
    g = torch.Generator().manual_seed(seed)
    num_pages = rows_MX.shape[0] // page + 3
    order_P = torch.randperm(num_pages, generator=g)
    physical = (order_P[:, None] * page + torch.arange(page)).flatten()
    pool = torch.full((num_pages * page, rows_MX.shape[1]), float("nan"), dtype=torch.bfloat16)
    pool[physical[:num_rows]] = rows_MX[:num_rows]
    return select.KeyRows(DenseRows(pool), physical)


def scored(score_TM: Tensor) -> tuple[Tensor, Tensor, select.KeyRows]:
    q, w, rows = operands_for_scores(score_TM)
    return q, w, select.KeyRows(DenseRows(rows))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_all_three_equal_a_sort(data: st.DataObject) -> None:
    T = data.draw(st.integers(0, 9), "T")
    M = data.draw(st.integers(0, 400), "M")
    J, X = data.draw(st.sampled_from([(1, 32), (3, 32), (4, 64), (8, 64), (32, 128)]), "J, X")
    k = data.draw(st.sampled_from([1, 2, 7, 16, 64, 500]), "k")
    num_blocks = data.draw(st.sampled_from([1, 2, 5, 16, 70]), "num_blocks")
    block_size = data.draw(st.sampled_from([1, 3, 4, 8, 100]), "block_size")
    visible = data.draw(st.lists(st.integers(0, M), min_size=T, max_size=T), "visible")
    q, w, rows = exact_operands(data.draw(st.integers(0, 99), "seed"), T, J, X, M)
    keys = paged(rows, max(visible, default=0))
    score_TM = naive_scores(q, w, rows)
    visible_T = torch.tensor(visible, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), "small tiles"):
            for name, value in SMALL_TILES.items():
                patch.setattr(reference, name, value)
        row_TK = select.select_rows(q, w, keys, visible_T, k)
        both_TK, block_TB = select.select_rows_and_blocks(q, w, keys, visible_T, k, num_blocks, block_size)
        inside_TK = select.select_in_blocks(q, w, keys, visible_T, block_TB, block_size, k)
    for out, width in ((row_TK, k), (both_TK, k), (block_TB, num_blocks), (inside_TK, k)):
        assert out.dtype is torch.int32
        assert out.shape == (T, width)
    assert row_TK.tolist() == both_TK.tolist() == naive_rows(score_TM, visible, k)
    assert block_TB.tolist() == naive_blocks(score_TM, visible, num_blocks, block_size)
    assert inside_TK.tolist() == naive_in_blocks(score_TM, visible, block_TB.tolist(), block_size, k)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=60), st.integers(1, 20), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_ranks_order_every_float_like_a_stable_sort(scores: list[float], keep: int, border: int) -> None:
    """Signed zeros, subnormals and infinities included, in one piece or two."""
    score_1N = torch.tensor([scores])
    best = reference._Best(keep)
    for start, piece in ((0, score_1N[:, :border]), (border, score_1N[:, border:])):
        if piece.shape[1]:
            best.offer(piece, torch.arange(start, start + piece.shape[1]))
    expected = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:keep])
    assert best.finish(torch.tensor([len(scores)])).tolist() == [padded(expected, keep)]


@pytest.mark.parametrize("T", [1, 7, 64])
def test_f1_all_lengths_zero(T: int) -> None:
    q, w, rows = real_operands(0, T, 32, 128, 16)
    keys = paged(rows, 0)
    visible_T = torch.zeros(T, dtype=torch.int64)
    row_TK, block_TB = select.select_rows_and_blocks(q, w, keys, visible_T, 512, 2048, 8)
    inside_TK = select.select_in_blocks(q, w, keys, visible_T, torch.zeros(T, 4, dtype=torch.int32), 8, 512)
    for out, width in ((row_TK, 512), (block_TB, 2048), (inside_TK, 512)):
        assert torch.equal(out, torch.full((T, width), -1, dtype=torch.int32))


def test_f1_a_tile_of_queries_that_see_nothing_beside_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCORES", reference._TILE)  # one query a tile
    q, w, rows = real_operands(8, 3, 4, 32, 40)
    keys, visible_T = paged(rows, 40), torch.tensor([0, 40, 0])
    row_TK, block_TB = select.select_rows_and_blocks(q, w, keys, visible_T, 5, 3, 8)
    inside_TK = select.select_in_blocks(q, w, keys, visible_T, block_TB, 8, 5)
    for out in (row_TK, block_TB, inside_TK):
        assert (out >= 0).any(1).tolist() == [False, True, False]
    no_blocks_TB = torch.zeros(3, 0, dtype=torch.int32)
    assert not bool((select.select_in_blocks(q, w, keys, visible_T, no_blocks_TB, 8, 5) >= 0).any())


@pytest.mark.parametrize(("J", "X"), [(32, 128), (8, 64), (3, 32)])
def test_f2_selection_does_not_depend_on_neighbours(J: int, X: int) -> None:
    """The same query alone, among others, among others that see more, elsewhere in the pool, and in other tiles."""
    T, M, k, num_blocks, block_size = 37, 2500, 40, 50, 8
    q, w, rows = real_operands(1, T, J, X, M)
    q, w = q.index_copy(0, torch.tensor([36]), q[:1]), w.index_copy(0, torch.tensor([36]), w[:1])
    rows[::3] = rows[0]  # equal scores
    visible_T = torch.randint(600, 1300, (T,), generator=torch.Generator().manual_seed(2))
    visible_T[0] = visible_T[36] = 1111
    visible_T[7] = M

    def run(part: slice | Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        keys = paged(rows, int(visible_T[part].max()), seed)
        row, block = select.select_rows_and_blocks(q[part], w[part], keys, visible_T[part], k, num_blocks, block_size)
        return row, block, select.select_in_blocks(q[part], w[part], keys, visible_T[part], block, block_size, k)

    whole = run(slice(None), 0)
    assert torch.equal(whole[0][0], whole[0][36])
    pieces = [slice(i, i + 1) for i in range(T)] + [slice(3, 8), slice(8, 37), torch.tensor([20, 7, 0, 36, 5])]
    for i, part in enumerate(pieces):
        for got, expected in zip(run(part, i), whole, strict=True):
            assert torch.equal(got, expected[part])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_TILES.items():
            patch.setattr(reference, name, value)
        for got, expected in zip(run(slice(None), 1), whole, strict=True):
            assert torch.equal(got, expected)


def test_f2_scores_are_bitwise_the_same_in_every_shape() -> None:
    T, J, X, M = 20, 4, 128, 1000
    q, w, rows = real_operands(3, T, J, X, M)
    whole = reference._Scorer(q, w)
    whole.load(rows)
    expected_TM = torch.empty(T, M)
    whole.score(0, T, expected_TM)
    for first, last, a, b in ((0, 1, 0, 1), (3, 4, 5, 1000), (2, 7, 64, 77), (19, 20, 999, 1000), (0, 20, 300, 420)):
        part = reference._Scorer(q[first:last], w[first:last])
        part.load(rows[a:b])
        out = torch.empty(last - first, b - a)
        part.score(0, last - first, out)
        assert torch.equal(out, expected_TM[first:last, a:b])


@pytest.mark.parametrize("visible", [0, 1, 100, 511, 512, 513, 514, 1000])
def test_f3_rows_beyond_the_visible_never_win(visible: int) -> None:
    """All visible scores are negative and the rows behind them would score 0 or NaN."""
    score_TM = torch.full((1, 1200), 5.0)
    score_TM[0, :visible] = -1.0 - torch.rand(visible, generator=torch.Generator().manual_seed(visible))
    q, w, rows = operands_for_scores(score_TM.repeat(2, 1))
    visible_T = torch.tensor([visible, 1150])  # the neighbour sees more: the same tile holds hidden rows
    row_TK, block_TB = select.select_rows_and_blocks(q, w, paged(rows, 1150), visible_T, 512, 64, 8)
    assert row_TK[0].tolist() == naive_rows(score_TM, [visible], 512)[0]
    assert block_TB[0].tolist() == naive_blocks(score_TM, [visible], 64, 8)[0]
    alone = select.select_rows(q[:1], w[:1], paged(rows, visible), visible_T[:1], 512)
    assert torch.equal(alone, row_TK[:1])


@pytest.mark.parametrize("score", [0.0, 1.5, -2.25])
def test_f4_constant_scores_give_the_lowest_rows(score: float) -> None:
    q, w, keys = scored(torch.full((2, 5000), score))
    visible_T = torch.tensor([5000, 3001])
    row_TK, block_TB = select.select_rows_and_blocks(q, w, keys, visible_T, 512, 128, 8)
    assert row_TK.tolist() == [list(range(512))] * 2
    assert block_TB.tolist() == [[*range(127), 624], [*range(127), 375]]
    inside_TK = select.select_in_blocks(q, w, keys, visible_T, block_TB[:, 100:], 8, 100)
    assert inside_TK.tolist() == [list(range(800, 900))] * 2


def test_f4_plateau_across_the_cut() -> None:
    """300 rows win, 400 tie for the other 212 places, over several tiles; then the same inside blocks."""
    M = 5000
    order = torch.randperm(M, generator=torch.Generator().manual_seed(4))
    score_1M = torch.full((1, M), -1.0)
    score_1M[0, order[:300]] = 2.0
    score_1M[0, order[300:700]] = 1.0
    q, w, keys = scored(score_1M)
    expected = sorted(order[:300].tolist() + sorted(order[300:700].tolist())[:212])
    visible_T = torch.tensor([M])
    assert select.select_rows(q, w, keys, visible_T, 512).tolist() == [expected]
    block_TB = torch.arange(0, 600, 2, dtype=torch.int32)[None]
    inside = select.select_in_blocks(q, w, keys, visible_T, block_TB, 8, 512)
    assert inside.tolist() == naive_in_blocks(score_1M, [M], block_TB.tolist(), 8, 512)


LARGE = """
    import json, resource, time
    import torch
    from leadline.formats.rows import DenseRows
    from leadline.ops import select
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    M, T, J, X = 1 << 20, 96, 4, 32
    pool = torch.empty(M, X, dtype=torch.bfloat16)
    for page in pool.split(1 << 14):  # in pieces, so that building it does not raise the peak
        page.normal_()
    keys = select.KeyRows(DenseRows(pool), torch.randperm(M))
    q, w = torch.randn(T, J, X).bfloat16(), torch.randn(T, J)
    def run(n, t):
        start = time.perf_counter()
        select.select_rows_and_blocks(q[:t], w[:t], keys, torch.full((t,), n), 512, 2048, 8)
        return time.perf_counter() - start
    run(1 << 15, 1)
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * resource.getpagesize()
    run(M, T)
    with open("/proc/self/status") as status:  # not ru_maxrss, which includes the parent process
        grown = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 - before
    print(json.dumps({"grown": grown, "short": min(run(M // 8, 1) for _ in range(3)),
                      "long": min(run(M, 1) for _ in range(3))}))
"""


def test_f5_a_million_rows_fit_the_budget_in_linear_time() -> None:
    """A [T, M] buffer alone would take 384 MiB here. Growth is the peak above what was resident before the call."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(LARGE)], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert 0 < measured["grown"] < select.BUDGET_BYTES
    assert measured["long"] < 8 * 3 * measured["short"]  # 8 times the rows; 64 times if it were quadratic


def test_f5_sizes_of_the_temporaries_add_up() -> None:
    """Queries, scores, two lists of best ranks, and the larger of their sort or the ranking of a piece."""
    q_and_scores = 2 * 4 * reference._SCORES
    best = 2 * 8 * reference._BEST
    sorting = 4 * 8 * reference._BEST
    pieces = 4 * reference._PRODUCTS + 4 * 8 * (reference._RANKED + reference._SPAN)
    assert q_and_scores + best + sorting + pieces < select.BUDGET_BYTES


def test_f7_released_shapes_by_name_on_packed_rows() -> None:
    """32 heads of 128 on byte rows, by the named implementation; a name that does not exist is refused."""
    T, M = 3, 5000
    layout = index_row(128)
    g = torch.Generator().manual_seed(5)
    values, scales = layout.pack(torch.randn(M, 128, generator=g).bfloat16())
    q = layout.unpack(*layout.pack(torch.randn(T, 32, 128, generator=g).bfloat16()))
    w = torch.randn(T, 32, generator=g) / 64
    visible_T = torch.tensor([M, 4097, 600])
    packed = select.KeyRows(PackedRows(layout, values, scales))
    dense = select.KeyRows(DenseRows(layout.unpack(values, scales)))
    got = select.select_rows(q, w, packed, visible_T, 512, impl="reference")
    assert torch.equal(got, select.select_rows(q, w, dense, visible_T, 512))
    score_TM = naive_scores(q, w, layout.unpack(values, scales))
    assert got.tolist() == naive_rows(score_TM, visible_T.tolist(), 512)
    with pytest.raises(OperatorError, match="no implementation named 'triton9'"):
        select.select_rows(q, w, packed, visible_T, 512, impl="triton9")


def test_nothing_is_scored_while_everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_Scorer", None)
    q, w, rows = real_operands(6, 2, 8, 64, 40)
    keys = paged(rows, 40)
    row_TK, block_TB = select.select_rows_and_blocks(q, w, keys, torch.tensor([5, 40]), 40, 10, 4)
    assert row_TK.tolist() == [padded(list(range(5)), 40), list(range(40))]
    assert block_TB.tolist() == [padded([0, 1], 10), list(range(10))]


def test_blocks_that_hold_everything_restrict_nothing() -> None:
    q, w, rows = real_operands(7, 6, 32, 128, 3000)
    visible_T = torch.tensor([3000, 2999, 2992, 600, 7, 0])
    keys = paged(rows, 3000)
    row_TK, block_TB = select.select_rows_and_blocks(q, w, keys, visible_T, 64, 375, 8)
    assert torch.equal(select.select_in_blocks(q, w, keys, visible_T, block_TB, 8, 64), row_TK)
    wider_TB = torch.cat((block_TB, torch.full((6, 1), -1)), dim=1)
    one_short_TB = wider_TB.clone()
    one_short_TB[0, 100] = -1  # now query 0 is restricted, and all go the other way
    other_TK = select.select_in_blocks(q, w, keys, visible_T, one_short_TB, 8, 64)
    assert torch.equal(other_TK[1:], row_TK[1:])
    assert not bool(((other_TK[0] >= 800) & (other_TK[0] < 808)).any())
    almost_TB = torch.tensor([[0, 1, -1, -1]])  # row 16 is visible, and in no block
    got_TK = select.select_in_blocks(q[:1], w[:1], keys, torch.tensor([17]), almost_TB, 8, 20)
    assert got_TK.tolist() == [padded(list(range(16)), 20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_TJX": torch.zeros(2, 4, 32)}, "q_TJX: expected bf16"),
        ({"head_weight_TJ": torch.zeros(2, 3)}, r"head_weight_TJ: expected fp32 \[2, 4\]"),
        ({"visible_T": torch.zeros(3, dtype=torch.int64)}, r"visible_T: expected int64 \[2\]"),
        ({"visible_T": torch.tensor([9, 5])}, "physical_M: expected at least 9 rows"),
        ({"k": 0}, "k: expected 1 or more, got 0"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "q_TJX": torch.zeros(2, 4, 32, dtype=torch.bfloat16),
        "head_weight_TJ": torch.zeros(2, 4),
        "keys": select.KeyRows(DenseRows(torch.zeros(64, 32, dtype=torch.bfloat16)), torch.arange(8)),
        "visible_T": torch.tensor([4, 5]),
        "k": 3,
    }
    with pytest.raises(OperatorError, match=message):
        select.select_rows(**(arguments | change))  # type: ignore[arg-type]
