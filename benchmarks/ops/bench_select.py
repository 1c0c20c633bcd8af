"""Time of the index selection at the released sizes: 32 heads of 128, 512 rows, 2048 blocks of 8, packed rows.

    python -m benchmarks.ops.bench_select [--rows 1048576] [--queries 64] [--repeat 5]

Prints a table and one JSON line. Before a size is timed, its selection is compared with a plain sort of all scores for
one query; a size that fails has no figure, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Column, Table

from leadline.formats.rows import PackedRows, index_row
from leadline.ops import select

HEADS, WIDTH, TOPK, NUM_BLOCKS, BLOCK_SIZE = 32, 128, 512, 2048, 8
PAGE = 64
ROW_BYTES = 68


def operands(num_rows: int, num_queries: int) -> tuple[torch.Tensor, torch.Tensor, select.KeyRows]:
    g = torch.Generator().manual_seed(0)
    layout = index_row(WIDTH)
    num_pages = -(-num_rows // PAGE)
    values = torch.randint(0, 256, (num_pages * PAGE, layout.value_bytes), dtype=torch.uint8, generator=g)
    scales = torch.randint(120, 124, (num_pages * PAGE, layout.scale_bytes), dtype=torch.uint8, generator=g)
    physical = (torch.randperm(num_pages, generator=g)[:, None] * PAGE + torch.arange(PAGE)).flatten()
    q = layout.unpack(*layout.pack(torch.randn(num_queries, HEADS, WIDTH, generator=g).bfloat16()))
    w = torch.randn(num_queries, HEADS, generator=g).bfloat16().float() / 64
    return q, w, select.KeyRows(PackedRows(layout, values, scales), physical)


def naive_scores(q_JX: torch.Tensor, w_J: torch.Tensor, keys: select.KeyRows, num_rows: int) -> torch.Tensor:
    pieces = [keys.span(a, min(a + 65536, num_rows), q_JX.device).float() for a in range(0, num_rows, 65536)]
    return torch.cat([w_J @ (q_JX.float() @ row_NX.t()).relu() for row_NX in pieces])


def same_choice(got_K: torch.Tensor, score_M: torch.Tensor, k: int) -> bool:
    """The set of a stable sort, up to scores within rounding of the cut."""
    chosen = got_K[got_K >= 0].long()
    expected = score_M.sort(descending=True, stable=True).indices[:k]
    cut = score_M[expected[-1]]
    moved = torch.cat((chosen, expected)).unique(return_counts=True)
    moved_rows = moved[0][moved[1] == 1]
    return len(chosen) == len(expected) and bool(((score_M[moved_rows] - cut).abs() <= 1e-5 * cut.abs() + 1e-6).all())


def times_us(fn: Callable[[], object], repeat: int) -> list[float]:
    fn()
    out = []
    for _ in range(repeat):
        start = time.perf_counter()
        fn()
        out.append((time.perf_counter() - start) * 1e6)
    return sorted(out)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1048576, help="largest number of visible rows")
    parser.add_argument("--queries", type=int, default=64, help="queries of the prefill lines")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()

    q, w, keys = operands(args.rows, args.queries)
    sizes = [(1, m) for m in (400, 1000, 2000, 16384, 131072, 1048576) if m <= args.rows]
    sizes += [(args.queries, m) for m in (2000, 16384, 131072) if m <= args.rows]
    lines = []
    for num_queries, num_rows in sizes:
        visible_T = torch.full((num_queries,), num_rows)
        part = (q[:num_queries], w[:num_queries], keys, visible_T)
        _, block_TB = select.select_rows_and_blocks(*part, TOPK, NUM_BLOCKS, BLOCK_SIZE)
        score_M = naive_scores(q[0], w[0], keys, num_rows)
        inside_M = torch.full_like(score_M, -torch.inf)
        row_N = (block_TB[0][block_TB[0] >= 0][:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        row_N = row_N[row_N < num_rows]
        inside_M[row_N] = score_M[row_N]
        calls = {
            "select_rows": (lambda part=part: select.select_rows(*part, TOPK), score_M),
            "select_rows_and_blocks": (
                lambda part=part: select.select_rows_and_blocks(*part, TOPK, NUM_BLOCKS, BLOCK_SIZE)[0],
                score_M,
            ),
            "select_in_blocks": (
                lambda part=part, block_TB=block_TB: select.select_in_blocks(*part, block_TB, BLOCK_SIZE, TOPK),
                inside_M,
            ),
        }
        for name, (call, expected_M) in calls.items():
            scored = min(num_rows, NUM_BLOCKS * BLOCK_SIZE) if name == "select_in_blocks" else num_rows
            line = {"op": name, "queries": num_queries, "rows": num_rows, "bytes": scored * ROW_BYTES}
            line["flops"] = 2 * num_queries * scored * HEADS * WIDTH if num_rows > TOPK else 0
            line["correct"] = same_choice(call()[0], expected_M, min(TOPK, num_rows))
            if line["correct"]:
                t = times_us(call, args.repeat)
                line |= {"p20_us": t[len(t) // 5], "p50_us": statistics.median(t), "p80_us": t[len(t) * 4 // 5]}
            lines.append(line)

    console = Console()
    table = Table(Column("operator", no_wrap=True), "queries", "rows", "p20 us", "p50 us", "p80 us", "GFLOP/s")
    for line in lines:
        figures = ["refused: wrong choice", "", "", ""]
        if line["correct"]:
            figures = [f"{line[p]:,.0f}" for p in ("p20_us", "p50_us", "p80_us")]
            figures.append(f"{line['flops'] / line['p50_us'] / 1e3:,.1f}")
        table.add_row(line["op"], f"{line['queries']:,}", f"{line['rows']:,}", *figures)
    console.print(table)
    result = {
        "benchmark": "select",
        "command": " ".join(sys.argv),
        "commit": commit(),
        "device": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lines": lines,
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if all(line["correct"] for line in lines) else 1


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
