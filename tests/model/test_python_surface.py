"""The Python surface on small real models."""

from __future__ import annotations

import io
import random

import pytest
from PIL import Image

from leadline import LLM, SamplingParams
from tests.model.driver import MODELS

pytestmark = pytest.mark.tiny

LOGPROB_TOLERANCE = 1e-4  # sums in fp32 in another order, on the torch path


def some_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 380), k=count)


def test_score_finds_room_where_past_sequences_fill_the_cache() -> None:
    llm = LLM(MODELS / "everything", max_num_seqs=2, max_cache_tokens=512)
    for seed in range(4):
        llm.generate(some_ids(seed, 150), SamplingParams(max_tokens=1))
    assert llm.cache.pages.num_free < 3
    (scored,) = llm.score(some_ids(9, 300))
    assert len(scored.prompt_logprobs) == 300
    assert llm.engine.stats().kv_pages_used == 0


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_those_of_score(speculate: bool, temperature: float) -> None:
    """Before temperature and filters, whichever way a token came about."""
    llm = LLM(MODELS / "everything", speculate=speculate, max_cache_tokens=1024, max_snapshots=0)
    params = SamplingParams(max_tokens=20, temperature=temperature, top_k=50, seed=5, logprobs=3, ignore_eos=True)
    prompt = some_ids(1, 20)
    (answer,) = llm.generate(prompt, params)[0].outputs
    (scored,) = llm.score([*prompt, *answer.token_ids], top=3)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 20
    for token_id, got, want in zip(answer.token_ids, answer.logprobs, scored.prompt_logprobs[20:], strict=True):
        assert want is not None
        assert next(iter(got)) == token_id
        assert got[token_id].logprob == pytest.approx(want[token_id].logprob, abs=LOGPROB_TOLERANCE)
        assert got[token_id].rank == want[token_id].rank


def test_images_of_one_size_are_told_apart_in_the_prefix_cache() -> None:
    def picture(level: int) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (60, 60), (level, 30, 255 - level)).save(buffer, "PNG")
        return buffer.getvalue()

    def ask(llm: LLM, level: int) -> tuple[float, int]:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=0)
        (delta,) = llm.stream([some_ids(1, 140)], params, images=[[picture(level)]])
        assert delta.logprobs is not None
        return delta.logprobs[0][0].logprob, delta.cached_tokens

    warm = LLM(MODELS / "vision", max_cache_tokens=2048)
    cold = [ask(LLM(MODELS / "vision", max_cache_tokens=2048, max_snapshots=0), level)[0] for level in (10, 200)]
    assert abs(cold[0] - cold[1]) > 100 * LOGPROB_TOLERANCE
    for cached in (0, 128):
        for level, logprob in zip((10, 200), cold, strict=True):
            assert ask(warm, level) == (pytest.approx(logprob, abs=LOGPROB_TOLERANCE), cached)


def test_an_image_without_a_place_goes_behind_bos() -> None:
    llm = LLM(MODELS / "vision", max_cache_tokens=2048)
    bos, image = llm.config.bos_token_id, llm.config.image_token_id
    buffer = io.BytesIO()
    Image.new("RGB", (60, 60)).save(buffer, "PNG")
    for prompt, start in (([bos, 9], [bos, image]), ([9, 10], [image, image])):
        (request,) = llm.prepare([prompt], images=[[buffer.getvalue()]])
        assert list(request.token_ids[:2]) == start
        assert list(request.token_ids[-1:]) == prompt[-1:]
