"""Random small configurations and random cuts against one full prefill."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.checkpoint.random_model import random_tensors
from leadline.checkpoint.source import WeightSource
from leadline.config.model import ModelConfig
from leadline.model.model import Model
from tests.model.driver import MODELS, feed, new_cache, one_shot, run_of, text

pytestmark = pytest.mark.tiny


@lru_cache
def random_model(window: int, topk: int, ratios: tuple[int, ...], experts: int, seed: int) -> Model:
    data = json.loads((MODELS / "candidates" / "config.json").read_text())
    data["text_config"] |= {
        "sliding_window": window,
        "index_topk": topk,
        "compress_ratios": list(ratios),
        "num_experts_per_tok": experts,
    }
    config = ModelConfig.from_dict(data)
    with torch.inference_mode():
        return Model(config, WeightSource.from_tensors(config, random_tensors(config, seed)), None)


@settings(max_examples=12, deadline=None)
@given(
    window=st.sampled_from([8, 16, 24]),
    topk=st.sampled_from([4, 12]),
    ratios=st.sampled_from([(0, 2, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1), (0, 2, 2, 2, 2, 2)]),
    experts=st.integers(1, 3),
    seed=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_any_cut_equals_one_prefill(
    window: int, topk: int, ratios: tuple[int, ...], experts: int, seed: int, sizes: list[int]
) -> None:
    model = random_model(window, topk, ratios, experts, seed)
    prompt = sum(sizes)
    tokens = text(model, prompt + 6, seed)
    expected = one_shot(model, tokens)
    cache = new_cache(model, max_sequences=2)
    seq, other = cache.open(), cache.open()
    last = feed(model, cache, seq, tokens, sizes, prompt_length=prompt, prefill="halo", logits_from=prompt - 1)
    assert torch.equal(last, expected[prompt - 1 : prompt])
    for i in range(6):
        at = seq.length
        runs = [run_of(other, tokens.part(i, i + 1)), run_of(seq, tokens.part(at, at + 1), prompt_length=prompt)]
        first, second = model.step(runs, cache).logits
        assert torch.equal(first, expected[i : i + 1])
        assert torch.equal(second, expected[at : at + 1])
