"""What the engine adds to a step of the model: 64 sequences decode on a model whose steps cost next to nothing.

The model looks the next token of every row up in a table. All threads but one are off. Before any figure is printed
every token and every character of the text must be right.

    python -m benchmarks.bench_engine [--tokens 200] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Request
from leadline.engine.sampler import Sampler, Want, draw
from leadline.engine.speculate import Speculation
from leadline.model.step import Run
from tests.support.fake_model import FakeCache, FakeConfig, FakeDraftOutput, FakeModel, FakeStepOutput
from tests.support.fake_text import byte_tokenizer

BATCH = 64
LETTERS = range(70, 90)  # ids of some bytes; the model goes round them
MIN_TOKENS_PER_SECOND = 20_000
MAX_ADDED_MS = 2.0


class FreeModel(FakeModel):
    """Rows of a table for the last token of each run, and nothing checked. `seconds`: what the steps took."""

    seconds = 0.0

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config, draft_noise=0.0, confidence=(9.0,) * 5)
        for last, following in zip(LETTERS, [*LETTERS[1:], LETTERS[0]], strict=True):
            self.table[last] = 0.0
            self.table[last, following] = 50.0
        self.draft_table = self.table

    def step(self, runs: list[Run], cache: FakeCache) -> FakeStepOutput:
        start = time.perf_counter()
        wanted: list[int] = []
        counts = []
        for run in runs:
            sequence: Any = run.sequence
            ids = run.token_ids.tolist()
            rows = ids[max(0, run.logits_from - sequence.length) :]
            sequence.token_ids += ids
            wanted += rows
            counts.append(len(rows))
        rows_NV = self.table[torch.tensor(wanted, dtype=torch.int64)]
        output = _Output(list(rows_NV.split(counts)), rows_NV)
        self.seconds += time.perf_counter() - start
        return output

    def draft(self, *args: Any) -> FakeDraftOutput:
        """Counts as a whole as the model's time but for what the engine does in between."""
        cache, sequences, anchor_ids, choose = args
        inside = 0.0

        def timed(i: int, logits_BV: torch.Tensor) -> torch.Tensor:
            nonlocal inside
            start = time.perf_counter()
            token_ids = choose(i, logits_BV)
            inside += time.perf_counter() - start
            return token_ids

        start = time.perf_counter()
        output = super().draft(cache, sequences, anchor_ids, timed)
        self.seconds += time.perf_counter() - start - inside
        return output


class _Output(FakeStepOutput):
    def __init__(self, logits: list[torch.Tensor], rows_NV: torch.Tensor) -> None:
        super().__init__(logits)
        self._rows_NV = rows_NV

    @property
    def rows(self) -> torch.Tensor:
        return self._rows_NV


@dataclass(frozen=True)
class Figures:
    """tokens_per_second: processed by the model, drafts included. added_ms: of a step, the model's time taken off."""

    tokens_per_second: float
    added_ms: float
    added_ms_p80: float


def measure(
    params: SamplingParams, *, with_text: bool, speculation: Speculation | None = None, profile: bool = False
) -> Figures:
    """Decode steps of a full batch. Raises ValueError if an answer is not what the table says."""
    tokenizer, config = byte_tokenizer()
    model = FreeModel(config)
    assert params.max_tokens is not None
    count = params.max_tokens
    cache = model.new_cache(max_tokens=BATCH * (count + 256), max_sequences=BATCH, max_step_tokens=1024)
    core = EngineCore(model, cache, tokenizer=tokenizer if with_text else None, speculation=speculation)
    firsts = [LETTERS[i % len(LETTERS)] for i in range(BATCH)]
    tickets = [core.add(Request(token_ids=[5, 6, 7, first], params=params)) for first in firsts]
    tokens: dict[int, list[int]] = {ticket: [] for ticket in tickets}
    text = dict.fromkeys(tickets, "")
    added, wall, processed = [], 0.0, 0
    profiler = cProfile.Profile()
    while core.has_work:
        model.seconds, before = 0.0, sum(cache_length(core))
        if profile:
            profiler.enable()
        start = time.perf_counter()
        deltas = core.step()
        seconds = time.perf_counter() - start
        profiler.disable()
        if len(deltas) == BATCH and deltas[0].finish_reason is None and tokens[tickets[0]]:
            added.append(1e3 * (seconds - model.seconds))
            wall += seconds
            processed += sum(cache_length(core)) - before
        for delta in deltas:
            tokens[delta.request] += delta.token_ids
            text[delta.request] += delta.text
    for ticket, first in zip(tickets, firsts, strict=True):
        at = LETTERS.index(first) + 1
        expected = [LETTERS[(at + i) % len(LETTERS)] for i in range(count)]
        if tokens[ticket] != expected or (with_text and text[ticket] != tokenizer.decode(expected)):
            raise ValueError(f"request {ticket}: its answer is wrong; no speed is reported")
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
    cuts = statistics.quantiles(added, n=10)
    return Figures(processed / wall, statistics.median(added), cuts[7])


def sampling_ms(num_ids: int, params: SamplingParams) -> float:
    """Milliseconds to draw one token, in a step of a full batch; a few tokens of each row stand out."""
    generator = torch.Generator().manual_seed(1)
    logits_NV = 2 * torch.randn(BATCH, num_ids, generator=generator)
    likely_NK = torch.randint(0, num_ids, (BATCH, 20), generator=generator)
    logits_NV.scatter_add_(1, likely_NK, torch.linspace(18, 8, 20).expand(BATCH, 20))
    wants = [Want(row, Sampler(params, row), 9) for row in range(BATCH)]
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in draw(logits_NV, wants):
            pass  # the weights are dropped as in a step
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds) / BATCH


def cache_length(core: EngineCore) -> list[int]:
    """Tokens that the running sequences have processed."""
    return [job.computed for job in core._scheduler.running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="length of each answer")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=args.tokens, ignore_eos=True)
    stops = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, stop=("never", "at all"))
    ways: dict[str, dict[str, Any]] = {
        "greedy, text": {"params": greedy, "with_text": True},
        "greedy, token ids only": {"params": greedy, "with_text": False},
        "greedy, text, two stop strings": {"params": stops, "with_text": True},
        "greedy, text, five drafts": {"params": greedy, "with_text": True, "speculation": Speculation()},
        "sampled with top_p, text": {"params": sampled, "with_text": True},
        "sampled with top_p, text, five drafts": {"params": sampled, "with_text": True, "speculation": Speculation()},
    }
    result: dict[str, object] = {
        "bench": "engine",
        "batch": BATCH,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    table = Table(f"batch {BATCH}", "tokens per second", "added per step, p50", "p80")
    for name, way in ways.items():
        measure(**way, profile=args.profile)  # also warms up
        figures = measure(**way)
        table.add_row(
            name, f"{figures.tokens_per_second:,.0f}", f"{figures.added_ms:.2f} ms", f"{figures.added_ms_p80:.2f} ms"
        )
        result[name] = {
            "tokens_per_second": round(figures.tokens_per_second),
            "added_ms": round(figures.added_ms, 3),
            "holds": figures.tokens_per_second >= MIN_TOKENS_PER_SECOND and figures.added_ms < MAX_ADDED_MS,
        }
    Console().print(table)
    filters: dict[str, dict[str, Any]] = {
        "none": {},
        "top_p 0.9": {"top_p": 0.9},
        "top_k 50": {"top_k": 50},
        "min_p 0.05": {"min_p": 0.05},
    }
    table = Table("one token, ms", *filters)
    for num_ids in (260, 129_280):
        times = {name: sampling_ms(num_ids, SamplingParams(**fields)) for name, fields in filters.items()}
        table.add_row(f"{num_ids:,} ids", *(f"{ms:.3f}" for ms in times.values()))
        result[f"sampling_ms, {num_ids} ids"] = times
    Console().print(table)
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
