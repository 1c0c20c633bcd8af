"""Faults of other engines as tests of small complete models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leadline.cache.pages import PAGE_TOKENS
from leadline.config.sampling import SamplingParams
from leadline.engine.speculate import Speculation
from leadline.llm import LLM
from leadline.ops import dispatch
from leadline.outputs import CompletionOutput
from leadline.text.tokenizer import Tokenizer
from tests.model.driver import MODELS, feed, load, new_cache, one_shot, run_of, text
from tests.model.random_models import Shape, model_of

pytestmark = pytest.mark.tiny

# One owner of rows; of four tokens to choose from, drafts hit the right one by chance.
TINIEST = Shape(
    "2", has_candidates=False, engram=(), targets=(0,), window=16, topk=12, experts=1, seed=1, loud_tokens=4
)
LONG = 1000
LONGEST = 1 << 16
ACCEPTANCE_LOSS = 0.05  # of the drafts that are verified, when doubtful ones are left out


@pytest.mark.parametrize(("name", "count"), [("shared_index", 7), ("candidates", 64), ("everything", 1)])
def test_f1_steps_whose_queries_see_no_compressed_row(name: str, count: int) -> None:
    """First tokens: with a ratio of two there is no row yet."""
    model = load(name)
    cache = new_cache(model, max_sequences=count, max_tokens=count * PAGE_TOKENS)
    assert model.step([], cache).logits == []
    tokens = [text(model, 3, seed) for seed in range(count)]
    sequences = [cache.open() for _ in range(count)]
    for start in range(3):
        runs = [run_of(seq, each.part(start, start + 1)) for seq, each in zip(sequences, tokens, strict=True)]
        for each, logits in zip(tokens, model.step(runs, cache).logits, strict=True):
            assert bool(logits.isfinite().all())
            assert torch.equal(logits, one_shot(model, each)[start : start + 1])


def greedy(
    speculate: bool | Speculation, prompts: list[list[int]], lengths: list[int], shape: Shape = TINIEST
) -> list[CompletionOutput]:
    model = model_of(shape)
    tokenizer = Tokenizer.load(MODELS / "everything", model.config)
    llm = LLM.from_parts(model, tokenizer, speculate=speculate, max_cache_tokens=2 * shape.context, max_num_seqs=4)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    return [output.outputs[0] for output in llm.generate(prompts, params)]


def test_f19_adaptive_verification_changes_no_token() -> None:
    prompts = [[0, 40, 41, 42], [0], [0, *range(60, 100)], [0, 9, 9]]
    lengths = [LONG, 30, 200, 90]
    plain = greedy(False, prompts[:1], lengths[:1])[0]
    assert len(plain.token_ids) == LONG
    assert len(set(plain.token_ids)) > 2
    whole = greedy(True, prompts[:1], lengths[:1])[0]
    adaptive = Speculation(min_confidence=0.5)
    alone = greedy(adaptive, prompts[:1], lengths[:1])[0]
    mixed = greedy(adaptive, prompts, lengths)
    for output in (whole, alone, mixed[0]):
        assert output.token_ids == plain.token_ids
        assert output.num_accepted > 100
    for output, fixed in zip(mixed[1:], greedy(False, prompts[1:], lengths[1:]), strict=True):
        assert output.token_ids == fixed.token_ids
    assert 0 < alone.num_drafted < 0.95 * whole.num_drafted  # some were left out
    share = [output.num_accepted / output.num_drafted for output in (whole, alone)]
    assert share[1] > (1 - ACCEPTANCE_LOSS) * share[0]


@pytest.mark.full
def test_f20_long_generation_with_drafts() -> None:
    prompt, shape = [0, 40, 41, 42], replace(TINIEST, context=LONGEST + 4)
    (drafted,), (plain,) = (greedy(speculate, [prompt], [LONGEST], shape) for speculate in (True, False))
    assert len(drafted.token_ids) == LONGEST
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_accepted > LONGEST // 4


@pytest.mark.parametrize("left_out", ["act_quant", "index_quant"])
def test_f33_quantisation_is_part_of_the_model(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("everything")
    tokens = text(model, 60)
    expected = one_shot(model, tokens)
    cache = new_cache(model)
    monkeypatch.setitem(dispatch._chosen, (left_out, None, model.device), lambda x: x)
    without = feed(model, cache, cache.open(), tokens, [60], prompt_length=60)
    assert not torch.equal(without, expected)
