"""A prompt that starts from the prefix cache gives the logits of a cold run, bit for bit. All caches are poisoned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.pool import KVCache
from leadline.cache.prefix import PrefixCache
from leadline.cache.sequence import Sequence
from leadline.model.model import Model
from leadline.model.step import PREFILL_MODES, TEXT, Prefill
from tests.model.driver import NAMES, Tokens, feed, load, run_of, text, with_image

pytestmark = pytest.mark.tiny

ANSWER = 5


def cache_ids(tokens: Tokens, content: int = 1) -> list[int]:
    """Token ids with negative numbers inside images, which name their content."""
    if tokens.types is None:
        return tokens.ids.tolist()
    place = torch.arange(len(tokens))
    return torch.where(tokens.types == TEXT, tokens.ids, -(place + content * 10_000)).tolist()


def join(tokens: Tokens, more: Tensor) -> Tokens:
    ids = torch.cat((tokens.ids, more))
    if tokens.types is None:
        return Tokens(ids)
    return Tokens(ids, torch.cat((tokens.types, torch.full((len(more),), TEXT))), tokens.rows)


class Engine:
    """Runs one request after the other through one cache, with or without looking into it."""

    def __init__(
        self,
        name: str,
        mode: Prefill = "halo",
        *,
        chunk: int = 100,
        max_snapshots: int = 8,
        host_bytes: int = 0,
        max_tokens: int = 4096,
    ) -> None:
        self.model: Model = load(name)
        self.mode = mode
        self.chunk = chunk
        self.cache = KVCache(
            self.model.config,
            self.model.plan,
            max_tokens=max_tokens,
            max_sequences=2,
            max_step_tokens=512,
            max_snapshots=max_snapshots,
            poison=True,
        )
        self.prefix = PrefixCache(self.cache, max_snapshots=max_snapshots, host_bytes=host_bytes, mode=mode)
        self.hits: list[int] = []

    def run(
        self, tokens: Tokens, *, keep_window: bool = True, content: int = 1, answer: list[int] | None = None
    ) -> Tensor:
        """Logits of the last prompt position and of ANSWER tokens after it: greedy ones, or `answer` in one block."""
        n = len(tokens)
        border = self.prefix.last_border(n)
        keep_from = max(0, border - self.cache.window + 1) if keep_window else None
        ids = cache_ids(tokens, content)
        sequence, hit = self.prefix.open(ids, limit=n - 1, keep_from=keep_from)
        assert sequence.length == hit.length
        self.hits.append(hit.length)
        while sequence.length < n:
            end = min(n, sequence.length + self.chunk)
            for cut in (hit.branch, border if self.mode == "replay" else 0):
                if sequence.length < cut < end:
                    end = cut
            run = run_of(
                sequence, tokens.part(sequence.length, end), logits_from=n - 1, prompt_length=n, prefill=self.mode
            )
            run.keep_from = keep_from
            logits = self.model.step([run], self.cache).logits
            self.prefix.insert(sequence, ids)
            if sequence.length in (hit.branch, border):
                self.prefix.snapshot(sequence, ids, sequence.length)
        if border:
            self.prefix.snapshot(sequence, ids, border)
        if answer is not None:
            return torch.cat((logits[0], self.decode(sequence, answer, n)))
        result = [logits[0]]
        for _ in range(ANSWER):
            token = int(result[-1][-1].argmax())
            ids.append(token)
            result.append(self.decode(sequence, [token], n)[:1])
        self.finish(sequence, ids)
        return torch.cat(result)

    def decode(self, sequence: Sequence, ids: list[int], prompt_length: int) -> Tensor:
        run = run_of(sequence, Tokens(torch.tensor(ids)), prompt_length=prompt_length, prefill=self.mode)
        return self.model.step([run], self.cache).logits[0]

    def finish(self, sequence: Sequence, ids: list[int]) -> None:
        self.prefix.insert(sequence, ids)
        border = sequence.length // PAGE_TOKENS * PAGE_TOKENS
        if border:
            self.prefix.snapshot(sequence, ids, border)
        sequence.close()

    def check_empty(self) -> None:
        self.prefix.clear()
        assert self.cache.pages.num_free == self.cache.pages.num_pages
        assert self.cache.window_pages.num_free == self.cache.window_pages.num_pages
        assert self.cache.num_free_slots == 2


def cold(name: str, mode: Prefill, tokens: Tokens, found: Tensor, content: int = 1) -> Tensor:
    """What `Engine.run` gave in `found`, from an engine that holds nothing, in as few steps as it takes.

    The tokens that `found` chose come in one block, which as such changes no logits: with the first rows that differ
    the test ends, so both answers are the same.
    """
    engine = Engine(name, mode, chunk=512, max_tokens=1024)
    return engine.run(tokens, content=content, answer=found[:-1].argmax(dim=-1).tolist())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", PREFILL_MODES)
def test_a_prompt_sent_again(name: str, mode: Prefill) -> None:
    engine = Engine(name, mode)
    for length in (127, 128, 129, 257, 301):
        tokens = text(engine.model, length, seed=length)
        first, second = engine.run(tokens), engine.run(tokens)
        assert torch.equal(first, cold(name, mode, tokens, first)), length
        assert torch.equal(second, first), length
        assert engine.hits[-1] == engine.prefix.last_border(length)
    engine.check_empty()


@pytest.mark.parametrize(
    ("name", "mode", "keep_window"),
    [("everything", mode, True) for mode in PREFILL_MODES]
    + [("everything", "halo", False), ("candidates", "halo", True)],
)
def test_prompts_of_any_length_with_a_common_start(name: str, mode: Prefill, keep_window: bool) -> None:
    engine = Engine(name, mode)
    long = text(engine.model, 420, seed=1)
    lengths = [400, 127, 128, 129, 255, 256, 257, 271, 272, 273, 300, 399, 400, 401, 420]
    for length in lengths:
        tokens = long.part(0, length)
        found = engine.run(tokens, keep_window=keep_window)
        assert torch.equal(found, cold(name, mode, tokens, found)), length
    assert sum(engine.hits) > 1500
    engine.check_empty()


@pytest.mark.parametrize("name", ["swa", "everything"])
@pytest.mark.parametrize("branch", [129, 191, 200, 255, 256])
def test_siblings_that_part_inside_a_page(name: str, branch: int) -> None:
    engine = Engine(name)
    first = text(engine.model, 290, seed=2)
    second = Tokens(torch.cat((first.ids[:branch], (first.ids[branch:] + 5) % 290)))
    expected = [engine.run(first), engine.run(second)]
    assert torch.equal(expected[0], cold(name, "halo", first, expected[0]))
    assert torch.equal(expected[1], cold(name, "halo", second, expected[1]))
    for _ in range(2):
        assert torch.equal(engine.run(first), expected[0])
        assert torch.equal(engine.run(second), expected[1])
    assert engine.hits[-2:] == [256, 256]
    engine.check_empty()


@pytest.mark.parametrize("name", ["engram", "everything"])
def test_conversation_continues_where_the_answer_ended(name: str) -> None:
    engine = Engine(name)
    tokens = text(engine.model, 150)
    for turn in range(6):
        logits = engine.run(tokens)
        assert torch.equal(logits, cold(name, "halo", tokens, logits)), turn
        tokens = join(tokens, logits[:-1].argmax(dim=-1))
        tokens = join(tokens, text(engine.model, 61 + turn, seed=20 + turn).ids)
    assert engine.hits == [0, 128, 128, 256, 256, 384]


@pytest.mark.parametrize("name", ["shared_index", "everything"])
def test_others_overwrote_everything_that_was_not_kept(name: str) -> None:
    engine = Engine(name, max_tokens=8 * PAGE_TOKENS)
    a, b = text(engine.model, 301, seed=3), text(engine.model, 620, seed=4)
    expected = engine.run(a)
    assert engine.prefix.make_room(5, 0)
    engine.run(b)
    assert torch.equal(engine.run(a), expected)
    assert engine.hits == [0, 0, 256]
    assert torch.equal(expected, cold(name, "halo", a, expected))


@pytest.mark.parametrize("mode", PREFILL_MODES)
@pytest.mark.parametrize("length", [257, 300, 301])
def test_through_host_memory_and_a_file(tmp_path: Path, mode: Prefill, length: int) -> None:
    engine = Engine("everything", mode, host_bytes=1 << 30)
    tokens = text(engine.model, length, seed=5)
    expected = engine.run(tokens)
    assert torch.equal(expected, cold("everything", mode, tokens, expected))
    assert engine.prefix.make_room(engine.cache.pages.num_pages, engine.cache.window_pages.num_pages)
    engine.run(text(engine.model, 511, seed=6))  # into the pages that were given up
    assert torch.equal(engine.run(tokens), expected)
    assert engine.hits[-1] > 0
    engine.prefix.save(tmp_path / "tree", "model")
    engine.check_empty()
    other = Engine("everything", mode)
    other.prefix.load(tmp_path / "tree", "model")
    assert torch.equal(other.run(tokens), expected)
    assert other.hits == engine.hits[-1:]
    other.check_empty()


def held_bytes(engine: Engine, tokens: Tokens) -> dict[str, Tensor]:
    """Plane name -> the bytes that a hit of a prompt starts from: all its pages, and its last window page."""
    sequence, hit = engine.prefix.open(cache_ids(tokens), limit=len(tokens) - 1)
    assert hit.length == (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS > 0
    found = {}
    for planes, pages in (
        (engine.cache.page_planes(), sequence.pages),
        (engine.cache.window_planes(), sequence.window_pages[-1:]),
    ):
        for plane in planes:
            rows = plane.tensor.view(-1, plane.rows_per_page, *plane.tensor.shape[1:])
            found[plane.name] = rows[torch.tensor(pages)].clone()
    sequence.close()
    return found


@pytest.mark.parametrize("length", [129, 257, 300, 301])
def test_f22_bytes_of_every_kind_of_page_are_those_before_they_left(tmp_path: Path, length: int) -> None:
    """Window rows of layers and draft stages, compressed rows and index keys of both ratios: unlike rows in a page."""
    engine = Engine("everything", host_bytes=1 << 30)
    assert set(engine.cache.ratios.values()) == {1, 2}
    assert engine.model.config.num_nextn_predict_layers > 0
    tokens = text(engine.model, length, seed=7)
    engine.run(tokens)
    before = held_bytes(engine, tokens)
    assert len(before) >= 2 * len(engine.cache.ratios) + len(engine.cache.windows)
    assert engine.prefix.make_room(engine.cache.pages.num_pages, engine.cache.window_pages.num_pages)
    engine.run(text(engine.model, 511, seed=6))  # into the pages that were given up
    engine.prefix.save(tmp_path / "tree", "model")
    other = Engine("everything")
    other.prefix.load(tmp_path / "tree", "model")
    for after in (held_bytes(engine, tokens), held_bytes(other, tokens)):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["vision", "everything"])
def test_images_are_told_apart_by_their_content(name: str) -> None:
    engine = Engine(name)
    tokens = join(with_image(name), text(engine.model, 150, seed=7).ids)
    assert tokens.rows is not None
    other = Tokens(tokens.ids, tokens.types, tokens.rows.flip(0))
    for _ in range(2):
        found, found_other = engine.run(tokens), engine.run(other, content=2)
        assert torch.equal(found, cold(name, "halo", tokens, found))
        assert torch.equal(found_other, cold(name, "halo", other, found_other, content=2))
        assert not torch.equal(found, found_other)
    assert engine.hits[:2] == [0, 0]
    assert min(engine.hits[2:]) >= PAGE_TOKENS


@pytest.mark.parametrize("name", ["draft", "everything"])
@pytest.mark.parametrize("mode", PREFILL_MODES)
def test_drafts_after_a_hit(name: str, mode: Prefill) -> None:
    model = load(name)
    tokens = text(model, 275, seed=8)

    def greedy(_: int, logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(dim=-1)

    def outputs(engine: Engine, limit: int) -> list[Tensor]:
        ids = cache_ids(tokens)
        sequence, hit = engine.prefix.open(ids, limit=limit)
        engine.hits.append(hit.length)
        rest = [len(tokens) - hit.length]
        logits = feed(
            model, engine.cache, sequence, tokens, rest, prompt_length=275, prefill=mode, logits_from=len(tokens) - 1
        )
        seen = [logits]
        anchor = int(logits[-1].argmax())
        for _ in range(4):
            drafts = model.draft(engine.cache, [sequence], torch.tensor([anchor]), greedy)
            seen += [drafts.logits, drafts.confidence]
            start = sequence.length
            block = [anchor, *drafts.token_ids[0].tolist()]
            logits = engine.decode(sequence, block, 275)
            sequence.truncate(start + 2)  # as if one draft were right
            ids += block[:2]
            seen.append(logits[:2])
            anchor = int(logits[1].argmax())
        engine.finish(sequence, ids)
        return seen

    engine = Engine(name, mode)
    expected = outputs(engine, 0)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(outputs(engine, len(tokens) - 1), expected, strict=True))
    assert engine.hits == [0, 256, 256]
    engine.check_empty()


def test_equal_prompts_at_the_same_time_share_their_pages() -> None:
    engine = Engine("everything")
    tokens = text(engine.model, 300, seed=9)
    ids, model, cache = cache_ids(tokens), engine.model, engine.cache
    expected = Engine("everything").run(tokens)
    sequences = [engine.prefix.open(ids, limit=299)[0] for _ in range(2)]
    for end in (130, 260, 299):
        runs = [
            run_of(s, tokens.part(s.length, end), logits_from=299, prompt_length=300, prefill="halo") for s in sequences
        ]
        model.step(runs, cache)
        for sequence in sequences:
            engine.prefix.insert(sequence, ids)
    assert sequences[0].pages[:2] == sequences[1].pages[:2]
    runs = [run_of(s, tokens.part(299, 300), logits_from=299, prompt_length=300, prefill="halo") for s in sequences]
    for logits in model.step(runs, cache).logits:
        assert torch.equal(logits, expected[:1])
    for sequence in sequences:
        engine.finish(sequence, ids)
    engine.check_empty()


@pytest.mark.parametrize("step", [1, 3])
def test_prompt_borders_of_another_length_are_refused_by_nothing(step: int) -> None:
    """Whatever a lookup offers, the model's own check of the windows accepts."""
    engine = Engine("everything", chunk=57)
    long = text(engine.model, 560, seed=10)
    for length in (520, *range(385, 460, 8 * step), *range(513, 530, 2 * step)):
        for keep_window in (False, True):
            engine.run(long.part(0, length), keep_window=keep_window)
    assert engine.hits.count(0) == 2  # the very first, and the first of 385 tokens: no snapshot at 384 yet
