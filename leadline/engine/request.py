"""One request to the engine, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from leadline.config.sampling import SamplingParams
from leadline.engine.sampler import Logprob
from leadline.errors import LeadlineError, PromptError
from leadline.text.grammar import Grammar

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
Progress = Callable[[int, int], None]  # prompt tokens processed so far, prompt tokens of all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt.

    image_rows [positions inside images, D] bf16 and token_types [prompt] int64 come together. cache_ids: what the
    prefix cache compares, token_ids with negative numbers made of the image's content inside images; None = token_ids.
    priority: lower numbers run first. timeout: seconds from arrival. grammar: what the answer after its reasoning has
    to follow. use_cache: start from what the prefix cache has.
    """

    token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    image_rows: Tensor | None = None
    token_types: Tensor | None = None
    cache_ids: Sequence[int] | None = None
    priority: int = 0
    timeout: float | None = None
    grammar: Grammar | None = None
    use_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence.

    request, sample: which sequence. token_ids include the id that ended it; text does not. logprobs: per token if asked
    for. finish_reason and stop_reason (stop string or id): set in the last delta of a sequence. drafted: drafts that
    were verified for these tokens. cached_tokens: prompt tokens that were not processed again, the same in all deltas
    of a sequence. error: why the sequence ended with finish_reason "error" or "timeout".
    """

    request: int
    sample: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[list[Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    cached_tokens: int = 0
    error: LeadlineError | None = None


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_tokens: int) -> None:
    """Raises PromptError if the prompt is empty, too long or holds an unknown id."""
    if not token_ids:
        raise PromptError("prompt: expected at least one token, got none")
    if len(token_ids) > max_tokens:
        raise PromptError(f"prompt: expected at most {max_tokens} tokens (the context less one), got {len(token_ids)}; "
                          "shorten it or raise max_model_len")  # fmt: skip
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return  # the loop below takes three times as long, which counts where others wait for the next step
    for position, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise PromptError(f"prompt: expected ids 0 to {vocab_size - 1}, got {token_id!r} at position {position}")
