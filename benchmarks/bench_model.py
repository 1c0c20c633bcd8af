"""Speed of the whole model on this machine: one-stream decode, prefill, growth with context.

The small default model (12 layers, width 384, 16 experts). The rival is the straight form of the same model: module by
module, a loop over the experts, nothing carried, a full forward of every layer over the whole text for each new token.
Before any figure is printed both forms must choose the same tokens with the same logits.

    python -m benchmarks.bench_model [--threads N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.checkpoint.random_model import default_model_folder
from leadline.model.model import Model
from leadline.model.step import Run

CONTEXTS = (512, 2048, 8192)
PREFILL_CHUNK = 512


def prefill(model: Model, cache: KVCache, sequence: Sequence, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last position, [V]."""
    n = ids.shape[0]
    for start in range(0, n, PREFILL_CHUNK):
        run = Run(sequence, ids[start : start + PREFILL_CHUNK], n - 1, n)
        logits = model.step([run], cache).logits[0]
    return logits[-1]


def decode(model: Model, cache: KVCache, sequence: Sequence, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Greedy continuation without an end; logits of every step."""
    prompt_length = sequence.length
    while True:
        token = logits.argmax().view(1)
        logits = model.step([Run(sequence, token, sequence.length, prompt_length)], cache).logits[0][-1]
        yield logits


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """p20, p50, p80 seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else times * 9
    return cuts[1], statistics.median(times), cuts[7]


def straight(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """The last position's logits by a full forward without any carried state."""
    cache = model.new_cache(max_tokens=ids.shape[0], max_step_tokens=ids.shape[0])
    n = ids.shape[0]
    return model.step([Run(cache.open(), ids, n - 1, n, "full")], cache).logits[0][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=64, help="decode steps per figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Model.load(default_model_folder())
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 250, (max(CONTEXTS),), generator=generator)
    result: dict[str, object] = {
        "bench": "model",
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": args.threads,
    }
    table = Table("what", "p50", "p20 - p80", "per second")

    # Correct first: cached decode against the straight form.
    cache = model.new_cache(max_tokens=1024)
    sequence = cache.open()
    logits = [prefill(model, cache, sequence, text[:300])]
    logits += itertools.islice(decode(model, cache, sequence, logits[0]), 8)
    ids = text[:300]
    for step, cached in enumerate(logits):
        if not torch.equal(straight(model, ids), cached):
            raise SystemExit(f"step {step}: cached decode differs from a full forward; no speed is reported")
        ids = torch.cat((ids, cached.argmax().view(1)))

    for context in CONTEXTS:
        cache = model.new_cache(max_tokens=context + 256)
        sequence = cache.open()
        start = time.perf_counter()
        last = prefill(model, cache, sequence, text[:context])
        seconds = time.perf_counter() - start
        table.add_row(f"prefill {context}", f"{seconds:.3f} s", "one run", f"{context / seconds:,.0f} tokens")
        result[f"prefill_{context}_tok_s"] = round(context / seconds, 1)
        one_step = partial(next, decode(model, cache, sequence, last))
        timed(one_step, 8)
        p20, p50, p80 = timed(one_step, args.steps)
        table.add_row(
            f"decode at {context}", f"{p50 * 1e3:.1f} ms", f"{p20 * 1e3:.1f} - {p80 * 1e3:.1f}", f"{1 / p50:.1f} tokens"
        )
        result[f"decode_{context}_tok_s"] = round(1 / p50, 1)
        if context == CONTEXTS[0]:
            _, full, _ = timed(lambda: straight(model, text[: CONTEXTS[0]]), 5)
            table.add_row("straight form at 512", f"{full * 1e3:.0f} ms", "", f"{1 / full:.1f} tokens")
            result["straight_over_cached_512"] = round(full / p50, 1)
    Console().print(table)
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
