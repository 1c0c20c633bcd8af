"""`leadline bench serve`: what the clients of a running server see, under a load that can be repeated."""

from __future__ import annotations

import asyncio
import json as json_format
import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from leadline.bench.serve import Benchmark, summary
from leadline.bench.workload import Workload
from leadline.cli.options import MAX_SECONDS, ApiKey, Url, flat, progress_bar, table
from leadline.errors import ServerError

bench = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@bench.callback()
def _group() -> None:
    """Measure a running server."""


@bench.command("serve")
@flat
def serve(
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = "",
    model: Annotated[str, typer.Option("--model", "-m", help="Name at the server; empty: its first.")] = "",
    workload: Workload,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds after which a request counts as failed.")
    ] = 600.0,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts of ids below it.", show_default="plain ids from /tokenize")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Drive a server with random prompts and print times, throughput and cache hits.

    A table, and as the last line of stdout one JSON document with names as in `vllm bench serve`. Ctrl-C ends it early
    and prints what was measured. Works with any server that has /v1/completions, and /tokenize or --vocab-size.
    """
    is_interrupted = False
    with progress_bar("requests", MofNCompleteColumn(), TimeElapsedColumn()) as report:
        benchmark = Benchmark(
            url,
            workload,
            model=model,
            api_key=api_key,
            vocab_size=vocab_size,
            request_seconds=timeout,
            report=report,
        )
        try:
            asyncio.run(benchmark.run())
        except KeyboardInterrupt:
            is_interrupted = True
    figures = summary(benchmark)
    if not json:
        _print_table(figures)
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": benchmark.url,
        "interrupted": is_interrupted,
        **asdict(workload),
        **figures,
    }
    if math.isinf(workload.request_rate):
        document["request_rate"] = "inf"  # JSON has no infinity
    typer.echo(json_format.dumps(document, ensure_ascii=False))
    if is_interrupted:
        raise typer.Exit(130)
    if not figures["completed"] and figures["errors"]:
        raise ServerError(f"no request was answered: {next(iter(figures['errors']))}")


def _print_table(f: dict[str, Any]) -> None:
    console = Console(highlight=False)
    short, long = _number(f["p90_ttft_short_ms"]), _number(f["p90_ttft_long_ms"])
    counts = {
        "requests": f"{f['completed']} completed, {f['cancelled']} cancelled, {f['failed']} failed",
        "time": f"{f['duration']:.1f} s, {f['request_throughput']:.2f} requests/s",
        "input tokens": f"{f['total_input_tokens']:,}, {f['input_throughput']:,.1f}/s",
        "output tokens": f"{f['total_output_tokens']:,}, {f['output_throughput']:,.1f}/s",
        "input from cache": "not told by the server" if f["cached_share"] is None else f"{f['cached_share']:.1%}",
        "p90 TTFT": f"{short} ms for the shorter half of the prompts, {long} ms for the longer half",
    }
    counted = table(f["model_id"], [{"what": what, "is": words} for what, words in counts.items()])
    counted.show_header = False
    console.print(counted)
    names = {
        "ttft": "to the first token (TTFT)",
        "tpot": "per output token (TPOT)",
        "itl": "between chunks (ITL)",
        "e2el": "whole request (E2EL)",
    }
    kinds = ("mean", "median", "p90", "p99")
    times = [{"": words} | {kind: _number(f[f"{kind}_{name}_ms"]) for kind in kinds} for name, words in names.items()]
    console.print(table("Milliseconds", times, right=kinds))
    for error, count in f["errors"].items():
        console.print(f"{count} failed: {error}", style="red", markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
