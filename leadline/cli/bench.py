"""`leadline bench serve`: what the clients of a running server see, under a load that can be repeated."""

from __future__ import annotations

import asyncio
import json as json_format
import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from leadline.bench.serve import Benchmark, Outcome, settings, summary
from leadline.bench.workload import Workload
from leadline.cli import options
from leadline.errors import ServerError

bench = typer.Typer(
    help="Measure a running server.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
_DEFAULTS = Workload()


@bench.callback()
def _group() -> None:
    """Measure a running server."""


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise typer.BadParameter(f"expected a length like 128 or a range like 128:512, got {text!r}") from None


def _as_range(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


@bench.command("serve")
def serve(
    url: options.Url = "http://127.0.0.1:8000",
    api_key: options.ApiKey = "",
    model: Annotated[str, typer.Option("--model", "-m", help="Name at the server; empty: its first.")] = "",
    sessions: Annotated[int, typer.Option(help="Conversations.")] = _DEFAULTS.sessions,
    turns: Annotated[int, typer.Option(help="Requests of each, one after the other.")] = _DEFAULTS.turns,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all begin with.")] = _DEFAULTS.shared_prefix,
    input_len: Annotated[str, typer.Option(metavar="LOW:HIGH", help="New prompt tokens of a turn.")] = _as_range(
        _DEFAULTS.input_len
    ),
    output_len: Annotated[str, typer.Option(metavar="LOW:HIGH", help="Most tokens of an answer.")] = _as_range(
        _DEFAULTS.output_len
    ),
    request_rate: Annotated[
        float, typer.Option(help="Sessions that start in a second (Poisson); inf: all at once.")
    ] = _DEFAULTS.rate,
    concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", "-c", help="Most requests in flight.", show_default="no limit")
    ] = None,
    cancel: Annotated[float, typer.Option(help="Share of requests dropped on the way.")] = _DEFAULTS.cancel,
    temperature: Annotated[float | None, typer.Option(show_default="the server's")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Full-length answers; vLLM and leadline know it.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = _DEFAULTS.seed,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    vocab_size: Annotated[
        int | None, typer.Option(help="Prompts of ids below it.", show_default="plain ids from /tokenize")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Drive a server with random prompts and print times, throughput and cache hits.

    A table, and as the last line of stdout one JSON document with names as in `vllm bench serve`. Ctrl-C ends it early
    and prints what was measured. Works with any server that has /v1/completions, and /tokenize or --vocab-size.
    """
    workload = Workload(
        sessions=sessions,
        turns=turns,
        shared_prefix=shared_prefix,
        input_len=_range(input_len),
        output_len=_range(output_len),
        rate=request_rate,
        concurrency=concurrency,
        cancel=cancel,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("requests", total=sessions * turns, note="")
    num_failed = 0

    def on_outcome(outcome: Outcome) -> None:
        nonlocal num_failed
        num_failed += outcome.state == "failed"
        bar.update(task, advance=1, note=f"{num_failed} failed" if num_failed else "")

    benchmark = Benchmark(
        url,
        workload,
        model=model,
        api_key=api_key,
        vocab_size=vocab_size,
        request_seconds=timeout,
        on_outcome=on_outcome,
    )
    is_interrupted = False
    try:
        with bar:
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
        **settings(workload),
        **figures,
    }
    typer.echo(json_format.dumps(document, ensure_ascii=False))
    if is_interrupted:
        raise typer.Exit(130)
    if not figures["completed"] and figures["errors"]:
        raise ServerError(f"no request was answered: {next(iter(figures['errors']))}")


def _print_table(figures: dict[str, Any]) -> None:
    f = figures
    is_told = f["cached_share"] is not None
    console = Console(highlight=False)
    counts = Table(title=f["model_id"], title_justify="left", show_header=False)
    counts.add_row("requests", f"{f['completed']} completed, {f['cancelled']} cancelled, {f['failed']} failed")
    counts.add_row("time", f"{f['duration']:.1f} s, {f['request_throughput']:.2f} requests/s")
    for kind in ("input", "output"):
        total, rate = f[f"total_{kind}_tokens"], f[f"{kind}_throughput"]
        counts.add_row(f"{kind} tokens", f"{total:,}, {rate:,.1f}/s")
    counts.add_row("input from cache", f"{f['cached_share']:.1%}" if is_told else "not told by the server")
    short, long = _number(f["p90_ttft_short_ms"]), _number(f["p90_ttft_long_ms"])
    counts.add_row("p90 TTFT", f"{short} ms for the shorter half of the prompts, {long} ms for the longer half")
    console.print(counts)
    times = Table(title="Milliseconds", title_justify="left")
    times.add_column("")
    for heading in ("mean", "median", "p90", "p99"):
        times.add_column(heading, justify="right")
    for name, words in (
        ("ttft", "to the first token (TTFT)"),
        ("tpot", "per output token (TPOT)"),
        ("itl", "between chunks (ITL)"),
        ("e2el", "whole request (E2EL)"),
    ):
        times.add_row(words, *(_number(figures[f"{kind}_{name}_ms"]) for kind in ("mean", "median", "p90", "p99")))
    console.print(times)
    for error, count in figures["errors"].items():
        console.print(f"{count} failed: {error}", style="red", markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
