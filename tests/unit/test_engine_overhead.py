"""What the engine adds to a step stays small. The exact figures come from benchmarks/bench_engine.py."""

import pytest
import torch

from benchmarks.bench_engine import measure
from leadline.config.sampling import SamplingParams

pytestmark = pytest.mark.unit

TOKENS_PER_SECOND = 8_000  # a fraction of what an idle machine reaches: others may use the cores
GOOD_ENOUGH = 20_000
TRIES = 5


@pytest.mark.parametrize("with_text", [True, False])
def test_scheduled_tokens_per_second(with_text: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
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
