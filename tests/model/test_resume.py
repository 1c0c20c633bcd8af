"""A sequence resumed at a page border from another one's pages goes on with the same logits, bit for bit."""

from __future__ import annotations

import pytest
import torch

from leadline.cache.pages import PAGE_TOKENS
from leadline.errors import RequestError
from tests.model.driver import NAMES, feed, load, new_cache, one_shot, run_of, text

pytestmark = pytest.mark.tiny


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("border", [PAGE_TOKENS, 2 * PAGE_TOKENS])
def test_resumed_equals_cold(name: str, border: int) -> None:
    model = load(name)
    tokens = text(model, border + 71)
    cache = new_cache(model)
    donor = cache.open()
    feed(model, cache, donor, tokens, [border + 3], prefill="full")
    donor.truncate(border + 1)
    kept = donor.snapshot_window(border)
    assert kept is not None
    pages = [donor.share_page(i) for i in range(border // PAGE_TOKENS)]
    with pytest.raises(RequestError, match="shared"):
        donor.truncate(border - 1)
    donor.close()
    sequence = cache.resume(tokens.ids.tolist(), border, pages, kept.window_page, kept.window_from)
    rest = [1, 2, 33, 35]
    logits = feed(model, cache, sequence, tokens, rest, prefill="full")
    assert torch.equal(logits, one_shot(model, tokens)[border:])
    sequence.close()
    for page in pages:
        cache.pages.release(page)
    cache.window_pages.release(kept.window_page)
    assert cache.pages.num_free == cache.pages.num_pages
    assert cache.window_pages.num_free == cache.window_pages.num_pages


@pytest.mark.parametrize("name", ["shared_index", "everything"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_trimmed_prompt_keeps_the_window_of_its_last_border(name: str, is_kept: bool) -> None:
    """Named by `keep_from`; without it the upper layers lack rows, and going on there is refused."""
    model = load(name)
    tokens = text(model, PAGE_TOKENS + 60)
    cache = new_cache(model, max_sequences=2)
    donor = cache.open()
    run = run_of(donor, tokens, logits_from=len(tokens) - 1, prefill="halo")
    run.keep_from = PAGE_TOKENS - model.config.sliding_window + 1 if is_kept else None
    model.step([run], cache)
    kept = donor.snapshot_window(PAGE_TOKENS)
    assert kept is not None
    sequence = cache.resume(tokens.ids.tolist(), PAGE_TOKENS, donor.pages[:1], kept.window_page, kept.window_from)
    if not is_kept:
        with pytest.raises(RequestError, match="window rows"):
            feed(model, cache, sequence, tokens, [60])
        return
    assert torch.equal(feed(model, cache, sequence, tokens, [1, 59]), one_shot(model, tokens)[PAGE_TOKENS:])
