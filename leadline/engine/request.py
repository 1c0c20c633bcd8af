"""One request to the engine, and what comes back."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leadline.config.sampling import SamplingParams
from leadline.engine.sampler import Logprob
from leadline.errors import LeadlineError, PromptError, RequestError
from leadline.model.step import TEXT
from leadline.text.grammar import Grammar

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
Progress = Callable[[int, int], None]  # prompt tokens processed so far, prompt tokens of all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. Checked on creation, as far as it can be without a model: by whoever asks, not where others wait.

    token_ids: kept as an array of 64-bit integers, as are cache_ids: what the prefix cache compares, token_ids with
    negative numbers made of the image's content inside images; None = token_ids. image_rows [positions inside images,
    D] bf16 and token_types [prompt] int64, -1 for text, come together. priority: lower numbers run first. timeout:
    seconds from arrival. grammar: what the answer after its reasoning has to follow. use_cache: start from what the
    prefix cache has.

    Raises: PromptError for token_ids, RequestError for any other field of another type or length.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", _ids("prompt", self.token_ids, PromptError))
        if self.cache_ids is not None:
            object.__setattr__(self, "cache_ids", _ids("cache_ids", self.cache_ids, RequestError))
        length, rows, types = len(self.token_ids), self.image_rows, self.token_types
        is_late = self.timeout is not None and (type(self.timeout) not in (int, float) or not self.timeout >= 0)
        has_images = isinstance(rows, Tensor) and rows.ndim == 2 and rows.dtype == torch.bfloat16
        has_types = isinstance(types, Tensor) and types.dtype == torch.int64 and types.shape == (length,)
        for name, is_good, expected in (
            ("params", isinstance(self.params, SamplingParams), "SamplingParams"),
            ("cache_ids", self.cache_ids is None or len(self.cache_ids) == length, f"{length}, like token_ids"),
            ("priority", type(self.priority) is int, "an integer"),
            ("timeout", not is_late, "a number of seconds from 0 on"),
            ("grammar", self.grammar is None or isinstance(self.grammar, Grammar), "a Grammar"),
            ("use_cache", type(self.use_cache) is bool, "true or false"),
            ("image_rows", has_images or (rows is None and types is None), "bf16 [n, D], together with token_types"),
            ("token_types", has_types or (rows is None and types is None), f"int64 [{length}], with image_rows"),
        ):
            if not is_good:
                raise RequestError(f"{name}: expected {expected}, got {_shown(getattr(self, name))}")
        if rows is not None and types is not None:
            inside, low = int((types != TEXT).sum()), int(types.min()) if length else TEXT
            if inside != len(rows) or low < TEXT:
                raise RequestError(
                    f"image_rows: {len(rows)} for {inside} positions inside images, whose token_types go from {low}; "
                    "expected as many, and types from -1 on"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence.

    request, sample: which sequence. token_ids include the id that ended it; text does not. logprobs: per token if asked
    for. finish_reason and stop_reason (stop string or id): set in the last delta of a sequence. drafted: drafts that
    were verified for these tokens; accepted: how many of them are among these. cached_tokens: prompt tokens that were
    not processed again, the same in all deltas of a sequence. error: why the sequence ended with finish_reason "error"
    or "timeout".
    """

    request: int
    sample: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[list[Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    error: LeadlineError | None = None


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_tokens: int) -> None:
    """Raises PromptError if the prompt is empty, too long or holds an unknown id."""
    ids = np.frombuffer(_ids("prompt", token_ids, PromptError), dtype=np.int64)
    if not len(ids):
        raise PromptError("prompt: expected at least one token, got none")
    if len(ids) > max_tokens:
        raise PromptError(f"prompt: expected at most {max_tokens} tokens (the context less one), got {len(ids)}; "
                          "shorten it or raise max_model_len")  # fmt: skip
    if ids.min() < 0 or ids.max() >= vocab_size:
        position = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise PromptError(f"prompt: expected ids 0 to {vocab_size - 1}, got {ids[position]} at position {position}")


def _ids(name: str, values: object, error: type[LeadlineError]) -> array[int]:
    """As an array of 64-bit integers, which takes a millisecond per 100,000 to make and next to nothing to slice."""
    if isinstance(values, array) and values.typecode == "q":
        return values
    if not isinstance(values, list | tuple):
        raise error(f"{name}: expected a list of token ids, got {_shown(values)}")
    if set(map(type, values)) <= {int}:
        with contextlib.suppress(OverflowError):
            return array("q", values)
    position = next(i for i, value in enumerate(values) if type(value) is not int or not -(2**63) <= value < 2**63)
    raise error(f"{name}: expected 64-bit integers, got {_shown(values[position])} at position {position}")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{len(value)}" if isinstance(value, array) else f"{value!r:.100}"
