"""Half an hour of load on a server, or hours: does it stay whole, and does its memory stay flat?

Starts `leadline serve` with the small default model and sends rounds of requests with random lengths, a shared prefix,
dropped answers and cut connections. The cache is small, so that it is full after the first rounds and sequences have to
wait and to give way. After each round nothing may run, wait or hold a slot or a page. Exit status 1 if a request
failed, something leaked, or the memory's peak of the second half of all rounds is higher than that of the first.

    python -m benchmarks.soak [--minutes 30] [--concurrency 32] [--model FOLDER] [--output FILE]
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

from leadline.bench.workload import Range, Workload
from leadline.cli.options import table
from tests.support.load import settled, storm
from tests.support.server_process import ServerProcess

REQUESTS = 100  # of a round, half of them second turns
HANG_UPS = 8  # on top of them
SERVER = ("--max-cache-tokens", "32768", "--max-snapshots", "64")
MAX_GROWTH = 0.04  # of the memory's peak: about 40 KiB for each request of half an hour
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "leadline:slots_used", "leadline:kv_pages_used",
        "leadline:window_pages_used")  # fmt: skip
KEPT = ("completed", "cancelled", "failed", "errors", "cached_share", "output_throughput", "p90_ttft_ms",
        "p90_ttft_short_ms", "p90_ttft_long_ms")  # fmt: skip
COLUMNS = {
    "minute": "minute", "completed": "completed", "dropped": "cancelled", "failed": "failed",
    "% cached": "cached_share", "out/s": "output_throughput", "p90 TTFT ms": "p90_ttft_ms",
    "short": "p90_ttft_short_ms",
    "long": "p90_ttft_long_ms", "MiB": "memory_mib", "held": "held", "nodes": "prefix_nodes",
    "snapshots": "snapshots", "preempted": "preemptions",
}  # fmt: skip


async def soak(server: ServerProcess, minutes: float, concurrency: int, console: Console) -> list[dict[str, Any]]:
    """The figures of every round; at least four."""
    rounds: list[dict[str, Any]] = []
    start = time.monotonic()
    while time.monotonic() - start < 60 * minutes or len(rounds) < 4:
        workload = Workload(
            sessions=REQUESTS // 2,
            turns=2,
            shared_prefix=300,
            input_len=Range(1, 400),
            output_len=Range(1, 48),
            max_concurrency=concurrency,
            cancel=0.2,
            seed=len(rounds),
        )
        figures = await storm(server.url, workload, HANG_UPS)
        after = await settled(server.url)
        minute = (time.monotonic() - start) / 60
        entry = {"minute": minute, **{key: figures[key] for key in KEPT}, "memory_mib": server.memory_mib()}
        entry |= {key: after[f"leadline:{key}"] for key in ("prefix_nodes", "snapshots")}
        entry |= {"preemptions": after["vllm:num_preemptions_total"], "held": sum(after[name] for name in HELD)}
        rounds.append(entry)
        console.print(f"minute {minute:.1f}: {entry['completed']} completed, {entry['cancelled']} dropped, "
                      f"{entry['failed']} failed, {entry['held']:.0f} held, {entry['memory_mib']:.0f} MiB")  # fmt: skip
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
    parser.add_argument("--output", type=Path, help="write the result, all rounds included, as JSON to this file")
    arguments = parser.parse_args()
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with ServerProcess(*([arguments.model] if arguments.model else []), *SERVER, log=log) as server:
            rounds = asyncio.run(soak(server, arguments.minutes, arguments.concurrency, progress))

    minutes = rounds[-1]["minute"]
    some = rounds[:: max(1, len(rounds) // 20)]
    rows = [{heading: cell(heading, entry[key]) for heading, key in COLUMNS.items()} for entry in some]
    title = f"{minutes:.1f} minutes, {len(rounds)} rounds of {REQUESTS} requests"
    Console(highlight=False, width=120).print(table(title, rows, right=COLUMNS))

    totals = {key: sum(entry[key] for entry in rounds) for key in ("completed", "cancelled", "failed", "held")}
    memory = [entry["memory_mib"] for entry in rounds]
    growth = max(memory[len(memory) // 2 :]) / max(memory[: len(memory) // 2]) - 1
    is_good = totals["failed"] == totals["held"] == 0 and growth <= MAX_GROWTH
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
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document | {"all": rounds}, indent=1) + "\n")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
