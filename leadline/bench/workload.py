"""What a benchmark asks a server: sessions of several turns over a shared prefix, drawn from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Annotated, NamedTuple

import typer

from leadline.config.checks import check_integer, check_number
from leadline.errors import RequestError


class Range(NamedTuple):
    """Of lengths, both ends included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


def _range(text: str | Range) -> Range:
    if isinstance(text, Range):  # a default
        return text
    low, colon, high = text.partition(":")
    try:
        return Range(int(low), int(high if colon else low))
    except ValueError:
        raise typer.BadParameter(f"expected a length like 128 or a range like 128:512, got {text!r}") from None


_PROMPT, _ANSWER = Range(128, 512), Range(16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked; each field is an option of the command. Lengths are in tokens.

    The prompt of a turn is the prompt of the turn before and new tokens; what the server answered is not part of it, as
    its token ids are no standard field. A request that is cancelled is dropped at an even chance before each of its
    output tokens. Raises: RequestError for a value out of range.
    """

    sessions: Annotated[int, typer.Option(help="Conversations.")] = 16
    turns: Annotated[int, typer.Option(help="Requests of each, one after the other.")] = 1
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all begin with.")] = 0
    input_len: Annotated[
        Range,
        typer.Option(parser=_range, metavar="LOW:HIGH", help="New prompt tokens of a turn.", show_default=str(_PROMPT)),
    ] = _PROMPT
    output_len: Annotated[
        Range,
        typer.Option(parser=_range, metavar="LOW:HIGH", help="Most tokens of an answer.", show_default=str(_ANSWER)),
    ] = _ANSWER
    request_rate: Annotated[
        float, typer.Option(help="Sessions that start in a second (Poisson); inf: all at once.")
    ] = math.inf
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", "-c", help="Most requests in flight.", show_default="no limit")
    ] = None
    cancel: Annotated[float, typer.Option(help="Share of requests dropped on the way.")] = 0.0
    temperature: Annotated[float | None, typer.Option(show_default="the server's")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Full-length answers; vLLM and leadline know it.")] = False
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0

    def __post_init__(self) -> None:
        check_integer("sessions", self.sessions, 1)
        check_integer("turns", self.turns, 1)
        check_integer("shared_prefix", self.shared_prefix, 0)
        for name in ("input_len", "output_len"):
            lengths = getattr(self, name)
            if not 1 <= lengths.low <= lengths.high:
                raise RequestError(f"{name}: expected a range LOW:HIGH with 1 <= LOW <= HIGH, got {lengths}")
        if not self.request_rate > 0:
            raise RequestError(f"request_rate: expected sessions per second above 0, got {self.request_rate}")
        if self.max_concurrency is not None:
            check_integer("max_concurrency", self.max_concurrency, 1)
        check_number("cancel", self.cancel, 0, 1)
        if self.temperature is not None:
            check_number("temperature", self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request. cancel_after: chunks of output after which the client drops it; None for never."""

    prompt: Sequence[int]
    max_tokens: int
    cancel_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """start: seconds after the start of the benchmark."""

    start: float
    turns: list[Turn]


def draw(workload: Workload, token_ids: Sequence[int]) -> list[Session]:
    """The sessions of a workload, in order of their start. The same workload and ids give the same sessions.

    token_ids: the ids that prompts are drawn from, at least one.
    """
    random_ = random.Random(workload.seed)
    prefix = random_.choices(token_ids, k=workload.shared_prefix)
    sessions, start = [], 0.0
    for _ in range(workload.sessions):
        prompt, turns = prefix, []
        for _ in range(workload.turns):
            prompt = prompt + random_.choices(token_ids, k=random_.randint(*workload.input_len))
            max_tokens = random_.randint(*workload.output_len)
            is_dropped = random_.random() < workload.cancel
            turns.append(
                Turn(
                    prompt=prompt,
                    max_tokens=max_tokens,
                    cancel_after=random_.randrange(max_tokens) if is_dropped else None,
                )
            )
        sessions.append(Session(start=start, turns=turns))
        start += random_.expovariate(workload.request_rate) if math.isfinite(workload.request_rate) else 0.0
    return sessions


def sample_text() -> str:
    """Text of random words, for its token ids: plain ones alone, without control or image tokens."""
    random_ = random.Random(0)
    return " ".join("".join(random_.choices(ascii_lowercase, k=random_.randint(1, 7))) for _ in range(2000))
