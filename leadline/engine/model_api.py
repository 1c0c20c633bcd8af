"""What the engine needs of a model and its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

Prefill = Literal["halo", "replay", "full"]


@dataclass(slots=True)
class Run:
    sequence: Any
    token_ids: Tensor
    logits_from: int
    prompt_length: int
    prefill: Prefill = "halo"
    image_rows: Tensor | None = None
    token_types: Tensor | None = None


class StepOutput(Protocol):
    logits: list[Tensor]


class DraftOutput(Protocol):
    token_ids: Tensor
    logits: Tensor
    confidence: Tensor


class Model(Protocol):
    config: Any
    has_draft: bool

    def step(self, runs: list[Run], cache: Any) -> StepOutput: ...

    def draft(
        self, cache: Any, sequences: list[Any], anchor_ids: Tensor, choose: Callable[[int, Tensor], Tensor]
    ) -> DraftOutput: ...
