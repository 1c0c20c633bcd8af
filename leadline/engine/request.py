"""One request to the engine and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from leadline.config.sampling import SamplingParams
from leadline.engine.sampler import Logprob
from leadline.errors import LeadlineError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. image_rows [positions inside images, D] bf16 and token_types [prompt] int64 come together."""

    token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    image_rows: Tensor | None = None
    token_types: Tensor | None = None
    cache_ids: Sequence[int] | None = None
    priority: int = 0
    timeout: float | None = None
    grammar: Any = None
    use_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one sequence."""

    request: int
    sample: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[list[Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    error: LeadlineError | None = None
    cached_tokens: int = 0
