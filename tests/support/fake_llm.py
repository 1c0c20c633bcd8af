"""An LLM around the fake model over bytes, for tests of commands and servers without weights."""

from __future__ import annotations

import time
from typing import Any

from leadline.llm import LLM
from leadline.model.step import Run
from tests.support.fake_model import FakeCache, FakeModel, FakeStepOutput
from tests.support.fake_text import byte_tokenizer


class _ScriptedModel(FakeModel):
    step_seconds: float = 0.0

    def step(self, runs: list[Run], cache: FakeCache) -> FakeStepOutput:
        time.sleep(self.step_seconds)
        return FakeModel.step(self, runs, cache)


def fake_llm(ring: str = "", step_seconds: float = 0.0, **options: Any) -> LLM:
    """A model that goes round the distinct characters of `ring` for ever; after any other byte it starts the ring.

    An empty ring answers with EOS at once. step_seconds: how long each step takes.
    """
    tokenizer, config = byte_tokenizer()
    model = _ScriptedModel(config, draft_noise=0.0)
    model.step_seconds = step_seconds
    ids = tokenizer.encode(ring) or [config.eos_token_id]
    model.table[:, ids[0]] = 50.0
    for last, following in zip(ids, [*ids[1:], ids[0]], strict=True):
        model.table[last] = 0.0
        model.table[last, following] = 50.0
    model.draft_table = model.table.clone()
    return LLM.from_parts(model, tokenizer, max_snapshots=0, **options)
