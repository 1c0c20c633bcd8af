"""Random small models and random mixes of steps against one full prefill.

A model has any layer plan that the configuration allows: window-only layers anywhere, owners of rows of either ratio,
layers that select for themselves and layers that reuse, candidates or none, Engram at any layers or none, draft stages
or none. Its sequences run together: prompts in random chunks, with images or without, single tokens, verified blocks
with random numbers of rejected tokens, pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS
from leadline.cache.sequence import Sequence
from leadline.config.token_types import TokenType
from leadline.model.model import Model
from tests.model.driver import Tokens, new_cache, one_shot, run_of, text
from tests.model.random_models import Shape, model_of

pytestmark = pytest.mark.tiny


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kinds = ""
    for _ in range(draw(st.integers(1, 5))):
        kinds += draw(st.sampled_from("-12iiir" if "1" in kinds or "2" in kinds else "-12"))
    some_layers = st.sets(st.integers(0, len(kinds) - 1), max_size=2).map(lambda layers: tuple(sorted(layers)))
    return Shape(
        kinds=kinds,
        has_candidates=draw(st.booleans()),
        engram=draw(some_layers),
        targets=draw(some_layers),
        window=draw(st.sampled_from([8, 16, 24])),
        topk=draw(st.sampled_from([4, 12])),
        experts=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
        ngram=draw(st.sampled_from([2, 4, 13])),
        stages=draw(st.integers(1, 3)),
    )


@dataclass(frozen=True)
class Job:
    """One sequence.

    chunks: of its prompt, 0 = not part of this step. image: its position and its rows and columns, or None. blocks:
    after the prompt, tokens that are kept (0 = pause) and tokens behind them that are rejected.
    """

    chunks: tuple[int, ...]
    image: tuple[int, int, int] | None
    prefill: str
    blocks: tuple[tuple[int, int], ...]

    @property
    def prompt_length(self) -> int:
        return sum(self.chunks)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    some_chunks = st.lists(
        st.one_of(st.integers(0, 4), st.integers(1, 60), st.just(PAGE_TOKENS)), min_size=1, max_size=5
    )
    chunks = draw(some_chunks.filter(any))
    blocks = st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, MAX_ROLLBACK - 1, MAX_ROLLBACK]))
    image = st.none() | st.tuples(st.integers(0, sum(chunks) - 1), st.integers(1, 3), st.integers(1, 4))
    return Job(
        chunks=tuple(chunks),
        image=draw(image),
        prefill=draw(st.sampled_from(["halo", "full"])),
        blocks=tuple(draw(st.lists(blocks, max_size=6))),
    )


def tokens_of(model: Model, job: Job, seed: int) -> Tokens:
    """The prompt, with a span of random rows where an image is, and all that its blocks keep."""
    plain = text(model, job.prompt_length + sum(kept for kept, _ in job.blocks), seed)
    if job.image is None:
        return plain
    start, rows, columns = job.image
    line = [TokenType.IMAGE] * columns + [TokenType.NEWLINE]
    span = [TokenType.START, *(line * rows), TokenType.END][: job.prompt_length - start]
    types = torch.full((len(plain),), TokenType.TEXT)
    types[start : start + len(span)] = torch.tensor(span)
    ids = plain.ids.clone()
    ids[types != TokenType.TEXT] = model.config.image_token_id
    generator = torch.Generator().manual_seed(seed)
    return Tokens(ids, types, torch.randn(len(span), model.config.hidden_size, generator=generator).bfloat16())


def drafts(model: Model, sequences: list[Sequence], anchors: Tensor) -> list[Tensor]:
    """Logits and confidence of each sequence's drafts, as one tensor."""
    cache = sequences[0]._cache
    out = model.draft(cache, sequences, anchors, lambda _, logits_BV: logits_BV.argmax(dim=-1))
    return list(torch.cat((out.logits, out.confidence[..., None]), dim=-1))


@settings(max_examples=45, deadline=None)
@given(shape=shapes(), work=st.lists(jobs(), min_size=1, max_size=3))
def test_any_mix_of_steps_equals_one_prefill(shape: Shape, work: list[Job]) -> None:
    model = model_of(shape)
    cache = new_cache(model, max_sequences=len(work), max_tokens=len(work) * 1024)
    sequences = [cache.open() for _ in work]
    tokens = [tokens_of(model, job, seed) for seed, job in enumerate(work)]
    expected = [one_shot(model, each) for each in tokens]
    moves = [[*((size, 0) for size in job.chunks), *job.blocks] for job in work]
    for turn in range(max(len(each) for each in moves)):
        active = [i for i, each in enumerate(moves) if turn < len(each) and each[turn][0]]
        decoding = [i for i in active if turn >= len(work[i].chunks)]
        if shape.targets and decoding:  # reads caches, and must leave them as they are
            anchors = torch.stack([tokens[i].ids[sequences[i].length] for i in decoding])
            drafts(model, [sequences[i] for i in decoding], anchors)
        runs = []
        for i in active:
            seq, (kept, wrong), prompt = sequences[i], moves[i][turn], work[i].prompt_length
            part = tokens[i].part(seq.length, seq.length + kept)
            if wrong:
                part = Tokens(torch.cat((part.ids, text(model, wrong, seed=100 + turn).ids)))
            first_wanted = 0 if work[i].prefill == "full" else prompt - 1
            runs.append(run_of(seq, part, logits_from=first_wanted, prompt_length=prompt, prefill=work[i].prefill))
        for i, run, logits in zip(active, runs, model.step(runs, cache).logits if runs else [], strict=True):
            seq, (kept, wrong) = sequences[i], moves[i][turn]
            seq.truncate(seq.length - wrong)
            wanted = expected[i][max(seq.length - kept, run.logits_from) : seq.length]
            assert torch.equal(logits[: len(wanted)], wanted)
            assert len(logits) == len(wanted) + wrong
    assert [seq.length for seq in sequences] == [len(each) for each in tokens]
    if shape.targets:
        together = drafts(model, sequences, torch.full((len(work),), 7))
        for each, drafted in zip(tokens, together, strict=True):
            fresh = new_cache(model)
            seq = fresh.open()
            model.step([run_of(seq, each, logits_from=len(each))], fresh)
            assert torch.equal(drafted, drafts(model, [seq], torch.tensor([7]))[0])
