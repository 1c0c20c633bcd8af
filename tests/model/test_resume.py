"""A sequence resumed at a page border from another one's pages goes on with the same logits, bit for bit."""

from __future__ import annotations

import pytest
import torch

from leadline.cache.pages import PAGE_TOKENS
from leadline.errors import RequestError
from tests.model.driver import NAMES, feed, load, new_cache, one_shot, text

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
