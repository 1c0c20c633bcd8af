"""Feeds token sequences to a model in pieces, for tests that compare one way of cutting with another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.model.model import Model
from leadline.model.step import TEXT, Run
from leadline.model.vision import span_rows

MODELS = Path(__file__).parent.parent / "golden" / "models"
NAMES = ("swa", "shared_index", "candidates", "engram", "vision", "draft", "released_head_sizes", "everything")


@lru_cache
def load(name: str) -> Model:
    return Model.load(MODELS / name)


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence. types: token types, or None = all text; rows: embeddings of the image tokens."""

    ids: Tensor
    types: Tensor | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def part(self, start: int, end: int) -> Tokens:
        if self.types is None or self.rows is None:
            return Tokens(self.ids[start:end])
        is_image = self.types != TEXT
        rows = self.rows[int(is_image[:start].sum()) : int(is_image[:end].sum())]
        return Tokens(self.ids[start:end], self.types[start:end], rows)


def text(model: Model, length: int, seed: int = 0) -> Tokens:
    """Random text with repeats, so that n-grams and selections have something to find."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(model.config.vocab_size, 290), (length,), generator=generator)
    ids[length // 2 : length // 2 + length // 4] = ids[: length // 4]
    return Tokens(ids)


def with_image(name: str, tail: int = 20) -> Tokens:
    """The recorded prompt with an image, and `tail` tokens of text behind it."""
    model, golden = load(name), load_file(MODELS / name / "golden.safetensors")
    assert model.vision is not None
    types = golden["token_types"].long()
    height, width = golden["image_grid"].tolist()
    with torch.inference_mode():
        aligned = model.vision.encode(golden["image_patches"].flatten(1), height, width)
        rows = span_rows(aligned, types, *model.image_marks)
    ids = torch.cat((golden["input_ids"].long(), text(model, tail).ids))
    return Tokens(ids, torch.cat((types, torch.full((tail,), TEXT))), rows)


def new_cache(model: Model, max_sequences: int = 1, max_tokens: int = 1024) -> KVCache:
    """Every byte that was never written reads as NaN."""
    return model.new_cache(max_tokens=max_tokens, max_sequences=max_sequences, poison=True)


def run_of(
    seq: Sequence, tokens: Tokens, *, logits_from: int = 0, prompt_length: int | None = None, prefill: str = "full"
) -> Run:
    """A run of all of `tokens`. prompt_length None: they end the prompt."""
    length = seq.length + len(tokens) if prompt_length is None else prompt_length
    return Run(
        sequence=seq,
        token_ids=tokens.ids,
        logits_from=logits_from,
        prompt_length=length,
        prefill=prefill,
        image_rows=tokens.rows,
        token_types=tokens.types,
    )


def feed(
    model: Model,
    cache: KVCache,
    seq: Sequence,
    tokens: Tokens,
    sizes: Iterable[int],
    *,
    prompt_length: int = 0,
    prefill: str = "full",
    logits_from: int = 0,
) -> Tensor:
    """Runs the next `sum(sizes)` of `tokens` in chunks of these sizes; the wanted logits, one after the other."""
    logits = []
    for size in sizes:
        part = tokens.part(seq.length, seq.length + size)
        assert len(part) == size
        run = run_of(seq, part, logits_from=logits_from, prompt_length=prompt_length, prefill=prefill)
        logits += model.step([run], cache).logits
    return torch.cat(logits)


def one_shot(model: Model, tokens: Tokens) -> Tensor:
    """Logits of every position from a single full prefill in a cache of its own: what all else is compared with."""
    cache = new_cache(model)
    return feed(model, cache, cache.open(), tokens, [len(tokens)], prompt_length=len(tokens))
