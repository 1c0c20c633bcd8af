"""What a benchmark asks a server: sessions of several turns over a shared prefix, drawn from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from leadline.errors import LeadlineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are in tokens, ranges have both ends included.

    sessions: conversations; each goes through its turns one after the other.
    turns: requests of a session. The prompt of a turn is the prompt of the turn before and new tokens; what the server
        answered is not part of it, as its token ids are no standard field.
    shared_prefix: tokens that all sessions begin with.
    input_len, output_len: range of the new tokens of a turn, and of `max_tokens`.
    rate: sessions that start in a second, as a Poisson process; infinite: all at once.
    concurrency: most requests in flight; None: no limit.
    cancel: share of requests that the client drops, at an even chance before each of its output tokens.
    temperature: None leaves it to the server. ignore_eos: ask for full-length answers (a field of vLLM's).
    """

    sessions: int = 16
    turns: int = 1
    shared_prefix: int = 0
    input_len: tuple[int, int] = (128, 512)
    output_len: tuple[int, int] = (16, 64)
    rate: float = math.inf
    concurrency: int | None = None
    cancel: float = 0.0
    temperature: float | None = None
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns"):
            _check(name, getattr(self, name) >= 1, "at least 1", getattr(self, name))
        for name in ("input_len", "output_len"):
            low, high = getattr(self, name)
            _check(name, 1 <= low <= high, "a range LOW:HIGH with 1 <= LOW <= HIGH", f"{low}:{high}")
        _check("shared_prefix", self.shared_prefix >= 0, "at least 0", self.shared_prefix)
        _check("rate", self.rate > 0, "sessions per second above 0", self.rate)
        _check("concurrency", self.concurrency is None or self.concurrency >= 1, "at least 1", self.concurrency)
        _check("cancel", 0 <= self.cancel <= 1, "a share from 0 to 1", self.cancel)


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
        start += random_.expovariate(workload.rate) if math.isfinite(workload.rate) else 0.0
    return sessions


def sample_text(seed: int = 0, words: int = 2000) -> str:
    """Text of random words, for its token ids: plain ones alone, without control or image tokens."""
    random_ = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(random_.choices(letters, k=random_.randint(1, 7))) for _ in range(words))


def _check(name: str, is_good: bool, expected: str, got: object) -> None:
    if not is_good:
        raise LeadlineError(f"{name.replace('_', '-')}: expected {expected}, got {got}")
