"""What the engine adds to a step stays small. The exact figures come from benchmarks/bench_engine.py."""

import pytest
import torch

from benchmarks.bench_engine import measure
from leadline.config.sampling import SamplingParams

pytestmark = pytest.mark.unit

TOKENS_PER_SECOND = 8_000  # a fraction of what an idle machine reaches: others may use the cores
GOOD_ENOUGH = 20_000
TRIES = 5


@pytest.mark.parametrize(("temperature", "with_text"), [(0, True), (0, False), (1, True)])
def test_scheduled_tokens_per_second(temperature: float, with_text: bool) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True)
    threads, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    try:
        for _ in range(TRIES):
            best = max(best, measure(params, with_text=with_text).tokens_per_second)
            if best > GOOD_ENOUGH:
                break
    finally:
        torch.set_num_threads(threads)
    assert best > TOKENS_PER_SECOND
