"""What the engine needs of a model and its cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from leadline.model.step import Run


class StepOutput(Protocol):
    logits: list[Tensor]

    @property
    def rows(self) -> Tensor: ...


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
