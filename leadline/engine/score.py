"""How likely a model finds given texts: the log-probability of every prompt token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.prefix import PrefixCache
from leadline.config.checks import check_integer
from leadline.engine.model_api import Model
from leadline.engine.request import Progress, check_prompt
from leadline.engine.sampler import Logprob, check_finite, logprobs_of
from leadline.errors import CapacityError, PromptError
from leadline.model.step import Run

SCORED_ROWS = 256  # per step: logits of the released vocabulary take half a MB a row


def score(
    model: Model,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    *,
    top: int = 0,
    max_length: int | None = None,
    prefix: PrefixCache | None = None,
    progress: Progress | None = None,
) -> list[list[list[Logprob] | None]]:
    """For every prompt token: its entry and the `top` most likely ones, given the tokens before it; None for the first.

    Every layer runs on every token (`prefill="full"`), one prompt after the other. prefix: what holds past sequences in
    `cache` gives them up where the room is needed.
    Raises: RequestError, PromptError, CapacityError before any work; CapacityError where running sequences fill the
    cache; NumericsError at NaN or infinite logits.
    """
    check_integer("top", top, 0)
    context = min(model.config.max_position_embeddings, max_length or model.config.max_position_embeddings)
    for prompt in prompts:
        check_prompt(prompt, model.config.vocab_size, context)
        if model.config.image_token_id in prompt:
            raise PromptError(f"prompt: expected text, got the image token {model.config.image_token_id}; no images "
                              "are read here")  # fmt: skip
        if len(prompt) > (room := cache.pages.num_pages * PAGE_TOKENS):
            raise CapacityError(f"prompt: {len(prompt)} tokens, {room} fit in the cache; raise max_cache_tokens")
    total, done = sum(len(prompt) for prompt in prompts), 0
    results: list[list[list[Logprob] | None]] = []
    for prompt in prompts:
        ids_T = torch.tensor(prompt, dtype=torch.int64)
        if prefix is not None:
            prefix.make_room(-(-len(prompt) // PAGE_TOKENS), 0)
        sequence = cache.open()
        entries: list[list[Logprob] | None] = [None]
        try:
            for start in range(0, len(ids_T), min(SCORED_ROWS, cache.max_step_tokens)):
                chunk_T = ids_T[start : start + min(SCORED_ROWS, cache.max_step_tokens)]
                output = model.step([Run(sequence, chunk_T, start, len(ids_T), "full")], cache)
                following = ids_T[start + 1 : start + 1 + len(chunk_T)].tolist()
                logits_NV = output.logits[0][: len(following)]
                check_finite(logits_NV, start + 1)
                entries += logprobs_of(logits_NV, following, top)
                done += len(chunk_T)
                if progress is not None:
                    progress(done, total)
        finally:
            sequence.close()
        results.append(entries)
    return results
