"""Options that several commands share, each in one place, and what commands do with them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from leadline.config.sampling import SamplingParams
from leadline.errors import LeadlineError

if TYPE_CHECKING:
    import torch

    from leadline.config.model import ModelConfig
    from leadline.llm import LLM

Report = Callable[..., None]

RANDOM_MODEL = "no {} given: using the small model with random weights, its text has no meaning"
LONG_PROMPT = 1024  # tokens; shorter prompts need no progress bar
ONE_THREAD_WIDTH = 1024  # up to this hidden size a token's products are too short to be worth waiting for a thread
MAX_SECONDS = 1e6  # of any time limit; more is a mistake, and infinity is no number of seconds
DEFAULTS = SamplingParams()

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", min=0, help="Most tokens to generate; 0: up to the context.")
]
Url = Annotated[str, typer.Option(help="Address of a running server, such as http://127.0.0.1:8000.")]
ApiKey = Annotated[
    str, typer.Option(help="Key of the server.", envvar="LEADLINE_API_KEY", show_envvar=True, show_default="none")
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model runs in this process; names and meanings are those of `LLM`."""

    weights: Annotated[
        Literal["auto", "dense", "packed"], typer.Option(help="Weights in memory: bf16 or as stored.")
    ] = "auto"
    prefill: Annotated[
        Literal["halo", "replay", "full"],
        typer.Option(help="halo: exact; replay: cheaper, approximate; full: every layer on every prompt token."),
    ] = "halo"
    speculate: Annotated[
        bool, typer.Option("--speculate/--no-speculate", help="Draft with the model's own draft stages (lossless).")
    ] = False
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer.", show_default="the context")
    ] = None
    max_cache_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the cache holds.")] = 1 << 18


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn; names and meanings are those of `SamplingParams`."""

    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: always the most likely token.")] = (
        DEFAULTS.temperature
    )
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this share.")] = DEFAULTS.top_p
    top_k: Annotated[int, typer.Option(help="Keep so many tokens; 0: all.")] = DEFAULTS.top_k
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")] = DEFAULTS.min_p
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", show_default="random")] = DEFAULTS.seed
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")] = None

    def params(self, max_tokens: int, **others: Any) -> SamplingParams:
        """With the options that a command has for itself."""
        return SamplingParams(**asdict(self) | {"stop": self.stop or ()}, max_tokens=max_tokens or None, **others)


def flat(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it: a parameter that is a dataclass becomes an option for each of its fields.

    Its keyword-only parameters are options; an error of ours about the value of one is led by the option as typed.
    """
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters[name] = parameter
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for field, option in inspect.signature(groups[name]).parameters.items():
            parameters[field] = option.replace(annotation=types[field])

    @functools.wraps(function)
    def run(**values: Any) -> None:
        try:
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            function(**values)
        except LeadlineError as error:
            name, _, words = str(error).partition(":")
            if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
                error.args = (f"--{name.replace('_', '-')}:{words}",)
            raise

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def note(text: str, style: str = "dim") -> None:
    """A line on stderr, as it is."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def open_llm(model: str, options: ModelOptions) -> LLM:
    """Load the model with a progress bar on stderr. The default model is announced as what it is."""
    from leadline.llm import LLM  # here: commands that talk to a server start without torch

    if not model:
        note(RANDOM_MODEL.format("--model"))
    with progress_bar("loading", DownloadColumn()) as report:
        llm = LLM(model or None, **asdict(options), progress=report)
    choose_threads(llm.config)
    return llm


def device_of(name: str) -> torch.device:
    """The device of an option --device. Raises: BadParameter if torch knows no such word, or finds none of them."""
    import torch

    try:
        probe = torch.zeros(1, device=name)
        probe.tolist()  # "meta" is a word of torch's, but holds no values
        return probe.device
    except (RuntimeError, AssertionError):
        words = f"expected a device that torch finds on this machine, such as cpu, got {name!r}"
        raise typer.BadParameter(words, param_hint="'--device'") from None


def choose_threads(config: ModelConfig) -> None:
    """A small model computes with one thread, unless OMP_NUM_THREADS says how many.

    Two gain a tenth on an idle machine, and lose a factor of ten or more on a busy one (docs/log.md).
    """
    import torch  # here: see open_llm

    if config.hidden_size <= ONE_THREAD_WIDTH and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextmanager
def progress_bar(what: str, *columns: ProgressColumn, least: int = 0) -> Iterator[Report]:
    """A function of (done, total, what) that shows a bar on stderr, if that is a terminal and total is above `least`.

    The bar is gone once done reaches total: it must not redraw under text that streams to the same terminal.
    """
    shown = (TextColumn("{task.description}"), BarColumn(), *(columns or (MofNCompleteColumn(),)))
    bar = Progress(*shown, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task(what)

    def report(done: int, total: int, what: str = what) -> None:
        if total > least and done < total:
            bar.start()
        bar.update(task, completed=done, total=total, description=what)
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


def table(
    title: str, rows: Sequence[Mapping[str, Any]], totals: Sequence[Mapping[str, Any]] = (), right: Collection[str] = ()
) -> Table:
    """Rows of cells by heading, and a section of totals below. Columns of integers and those named `right` are flush
    right."""
    shown = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        justify: Literal["left", "right"] = "right" if isinstance(value, int) or name in right else "left"
        shown.add_column(name, justify=justify, overflow="fold")
    for section in (rows, totals):
        for row in section:
            shown.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else cell for cell in row.values()))
        shown.add_section()
    return shown
