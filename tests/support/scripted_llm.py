"""An LLM over the released vocabulary that answers word for word what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.llm import LLM
from leadline.model.step import Run
from tests.support.fake_model import FakeCache, FakeDraftOutput, FakeModel, FakeSequence, FakeStepOutput
from tests.support.released_tokenizer import released_tokenizer

_GENERATION_HEADER = 2  # <｜Assistant｜> and <think> or </think>


class _ScriptedModel(FakeModel):
    """The next token depends on how many tokens follow the last generation header, so neither on chunks nor on drafts.
    Every third draft is wrong."""

    script: list[int]
    assistant_id: int

    def __post_init__(self) -> None:  # instead of tables of V x V
        self.table = self.draft_table = torch.zeros(0)

    def step(self, runs: list[Run], cache: FakeCache) -> FakeStepOutput:
        output = FakeModel.step(self, runs, cache)
        for run, logits_NV in zip(runs, output.logits, strict=True):
            length = run.sequence.length
            for row, position in enumerate(range(length - len(logits_NV), length)):
                logits_NV[row, self._token(run.sequence, position + 1)] = 50.0
        return output

    def draft(
        self,
        cache: FakeCache,
        sequences: list[FakeSequence],
        anchor_ids: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> FakeDraftOutput:
        logits, chosen = [], []
        for i in range(self.config.dspark_block_size):
            logits_BV = torch.zeros(len(sequences), self.config.vocab_size)
            for b, sequence in enumerate(sequences):
                position = sequence.length + 1 + i
                logits_BV[b, self._token(sequence, position) if position % 3 else 7] = 50.0
            logits.append(logits_BV)
            chosen.append(choose(i, logits_BV))
        confidence_BL = torch.zeros(len(sequences), self.config.dspark_block_size)
        return FakeDraftOutput(torch.stack(chosen, dim=1), torch.stack(logits, dim=1), confidence_BL)

    def _token(self, sequence: Any, position: int) -> int:
        """The token that belongs at `position`."""
        ids = sequence.token_ids
        if self.assistant_id not in ids:
            return self.config.eos_token_id
        header = len(ids) - 1 - ids[::-1].index(self.assistant_id)
        answered = position - header - _GENERATION_HEADER
        return self.script[answered] if 0 <= answered < len(self.script) else self.config.eos_token_id

    def _rows(self, table_VV: Tensor, ids: list[int]) -> Tensor:
        return torch.zeros(len(ids), self.config.vocab_size)


def scripted_llm(config: ModelConfig, answer: str, **options: Any) -> LLM:
    """A chat model that answers every conversation with `answer` and the end token.

    config: the released configuration. answer: control tokens are read as such. options: as for `LLM.from_parts`.
    """
    tokenizer = released_tokenizer(config)
    assistant_id = tokenizer.id_of("<｜Assistant｜>")
    assert assistant_id is not None
    model = _ScriptedModel(config)  # type: ignore[arg-type]
    model.script = tokenizer.encode(answer)
    model.assistant_id = assistant_id
    return LLM.from_parts(model, tokenizer, max_snapshots=0, **options)
