"""Half an hour of load on a server, or hours: does it stay whole, and does its memory stay flat?

Starts `leadline serve` with the small default model and sends rounds of requests with random lengths, a shared prefix,
dropped answers and cut connections. After each round nothing may run, wait or hold a slot. Exit status 1 if a request
failed, a slot leaked or memory grew.

    python benchmarks/soak.py [--minutes 30] [--concurrency 32] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from leadline.bench.workload import Workload
from leadline.testing.load import settled, storm
from leadline.testing.server_process import ServerProcess

REQUESTS = 200  # of a round, half of them second turns
HANG_UPS = 16  # on top of them
MAX_GROWTH = 0.05  # of memory, from the end of the first third of all rounds to the end
KEPT = ("completed", "cancelled", "failed", "errors", "cached_share", "output_throughput", "p90_ttft_ms",
        "p90_ttft_short_ms", "p90_ttft_long_ms")  # fmt: skip
COLUMNS = {
    "minute": "minute", "completed": "completed", "dropped": "cancelled", "failed": "failed",
    "% cached": "cached_share", "out/s": "output_throughput", "p90 TTFT ms": "p90_ttft_ms",
    "short": "p90_ttft_short_ms",
    "long": "p90_ttft_long_ms", "MiB": "memory_mib", "slots": "slots_used", "pages": "kv_pages_used",
    "snapshots": "snapshots",
}  # fmt: skip


async def soak(server: ServerProcess, minutes: float, concurrency: int, console: Console) -> list[dict[str, Any]]:
    """The figures of every round; at least three."""
    rounds: list[dict[str, Any]] = []
    start = time.monotonic()
    while time.monotonic() - start < 60 * minutes or len(rounds) < 3:
        workload = Workload(
            sessions=REQUESTS // 2,
            turns=2,
            shared_prefix=300,
            input_len=(1, 400),
            output_len=(1, 48),
            concurrency=concurrency,
            cancel=0.2,
            seed=len(rounds),
        )
        figures = await storm(server.url, workload, HANG_UPS)
        after = await settled(server.url)
        minute = (time.monotonic() - start) / 60
        entry = {"minute": minute, **{key: figures[key] for key in KEPT}, "memory_mib": server.memory_mib()}
        entry |= {key: after[f"leadline:{key}"] for key in ("slots_used", "kv_pages_used", "snapshots")}
        rounds.append(entry)
        console.print(f"minute {minute:.1f}: {entry['completed']} completed, {entry['cancelled']} dropped, "
                      f"{entry['failed']} failed, {entry['memory_mib']:.0f} MiB")  # fmt: skip
    return rounds


def cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.0f}" if name == "% cached" else f"{value:,.1f}" if name == "minute" else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--model", help="folder or hub id; default: the small random model")
    arguments = parser.parse_args()
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with ServerProcess(*([arguments.model] if arguments.model else []), log=log) as server:
            rounds = asyncio.run(soak(server, arguments.minutes, arguments.concurrency, progress))

    minutes = rounds[-1]["minute"]
    table = Table(title=f"{minutes:.1f} minutes, {len(rounds)} rounds of {REQUESTS} requests", title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for entry in rounds[:: max(1, len(rounds) // 20)]:
        table.add_row(*(cell(heading, entry[key]) for heading, key in COLUMNS.items()))
    Console(highlight=False, width=120).print(table)

    totals = {key: sum(entry[key] for entry in rounds) for key in ("completed", "cancelled", "failed", "slots_used")}
    growth = rounds[-1]["memory_mib"] / rounds[len(rounds) // 3]["memory_mib"] - 1
    is_good = totals["failed"] == totals["slots_used"] == 0 and growth <= MAX_GROWTH
    document = {
        "benchmark": "soak",
        "passed": is_good,
        "minutes": minutes,
        "rounds": len(rounds),
        "concurrency": arguments.concurrency,
        **totals,
        "memory_growth": growth,
        "first": rounds[0],
        "last": rounds[-1],
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    sys.stdout.write(json.dumps(document) + "\n")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
