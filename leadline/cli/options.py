"""Options that several commands share, and what they do with them. Defaults come from the fields they set."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from leadline.config.sampling import SamplingParams

if TYPE_CHECKING:
    from leadline.llm import LLM

Report = Callable[[int, int], None]

DEFAULTS = SamplingParams()
RANDOM_MODEL = "no {} given: using the small model with random weights, its text has no meaning"
LONG_PROMPT = 1024  # tokens; shorter prompts need no progress bar
ONE_THREAD_WIDTH = 1024  # up to this hidden size a token's products are too short to be worth waiting for a thread

Model = Annotated[
    str, typer.Option("--model", "-m", help="Checkpoint folder or hub id; empty: the small random model.")
]
Weights = Annotated[Literal["auto", "dense", "packed"], typer.Option(help="Weights in memory: bf16 or as stored.")]
Prefill = Annotated[
    Literal["halo", "replay", "full"],
    typer.Option(help="halo: exact; replay: cheaper, approximate; full: every layer on every prompt token."),
]
Speculate = Annotated[
    bool, typer.Option("--speculate/--no-speculate", help="Draft with the model's own draft stages (lossless).")
]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer.", show_default="the context")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: always the most likely token.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this share.")]
TopK = Annotated[int, typer.Option(help="Keep so many tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default="random")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate; 0: up to the context.")]
Url = Annotated[str, typer.Option(help="Address of a running server, such as http://127.0.0.1:8000.")]
ApiKey = Annotated[
    str, typer.Option(help="Key of the server.", envvar="LEADLINE_API_KEY", show_envvar=True, show_default="none")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")]


def open_llm(model: str, weights: Weights, prefill: Prefill, speculate: bool, max_model_len: int | None) -> LLM:
    """Load the model with a progress bar on stderr. The default model is announced as what it is."""
    from leadline.llm import LLM  # here: commands that talk to a server start without torch

    if not model:
        Console(stderr=True).print(RANDOM_MODEL.format("--model"), style="dim")
    with progress_bar("loading", DownloadColumn()) as report:
        llm = LLM(
            model or None,
            weights=weights,
            prefill=prefill,
            speculate=speculate,
            max_model_len=max_model_len,
            progress=report,
        )
    choose_threads(llm)
    return llm


def choose_threads(llm: LLM) -> None:
    """A small model computes with one thread, unless OMP_NUM_THREADS says how many.

    Two gain a tenth on an idle machine, and lose a factor of ten or more on a busy one (docs/log.md).
    """
    import torch  # here: see open_llm

    if llm.config.hidden_size <= ONE_THREAD_WIDTH and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def progress_bar(what: str, column: ProgressColumn | None = None, least: int = 0) -> Iterator[Report]:
    """A function of (done, total) that shows a bar on stderr, if that is a terminal and total is above `least`.

    The bar is gone once done reaches total: it must not redraw under text that streams to the same terminal.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), column or MofNCompleteColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task(what)

    def report(done: int, total: int) -> None:
        if total > least and done < total:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield report
    finally:
        bar.stop()


def for_terminal(text: str) -> str:
    """The text; for a terminal without control characters that could steer it (newline and tab stay)."""
    if not sys.stdout.isatty():
        return text
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def statistics_line(statistics: dict[str, Any]) -> str:
    """One line for people: tokens, seconds, tokens per second, accepted drafts."""
    s = statistics
    line = f"{s['prompt_tokens']} prompt tokens in {s['prefill_s']:.2f} s, {s['completion_tokens']} tokens"
    if s["tokens_per_s"] is not None:
        line += f" in {s['decode_s']:.2f} s, {s['tokens_per_s']:.1f} tokens/s"
    if s["drafts"]:
        line += f", {s['drafts_accepted']} of {s['drafts']} drafts accepted"
    return line
