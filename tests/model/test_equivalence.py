"""However a sequence is cut, mixed, trimmed or rolled back, its logits are those of one full prefill, bit for bit.

All caches are poisoned: a read of a row that was never written shows as NaN, and NaN equals nothing.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from leadline.cache.pages import MAX_ROLLBACK, PAGE_TOKENS
from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.errors import CapacityError, PromptError, RequestError
from leadline.model import indexer
from leadline.model.draft import DraftOutput
from leadline.model.model import Model
from leadline.model.step import Run
from tests.model.driver import NAMES, Tokens, feed, load, new_cache, one_shot, run_of, text, with_image

pytestmark = pytest.mark.tiny

# With several layers above the last source; with one, replay is exact from the last position on.
TRIMMED = ("swa", "shared_index", "candidates", "everything")

# Replay is an approximation: upper layers see one window instead of a chain of them. Relative error of the logits of
# the last position on random text and random weights, twice the largest one measured (0.107, candidates).
REPLAY_ERROR = 0.2


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).square().mean().sqrt() / expected.std())


def greedy(_: int, logits_BV: Tensor) -> Tensor:
    return logits_BV.argmax(dim=-1)


def draft(model: Model, cache: KVCache, sequences: list[Sequence], anchor: int = 7) -> DraftOutput:
    return model.draft(cache, sequences, torch.tensor([anchor] * len(sequences)), greedy)


# One sequence, cut differently ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_prefill(name: str) -> None:
    model = load(name)
    prompt = model.config.sliding_window + 3
    tokens = text(model, prompt + 30)
    cache = new_cache(model)
    logits = feed(model, cache, cache.open(), tokens, [prompt] + [1] * 30, prompt_length=prompt)
    assert torch.equal(logits, one_shot(model, tokens))


@pytest.mark.parametrize("name", ["candidates", "engram", "everything"])
def test_decode_from_the_first_token(name: str) -> None:
    model = load(name)
    tokens = text(model, 40, seed=1)
    cache = new_cache(model)
    logits = feed(model, cache, cache.open(), tokens, [1] * 40, prompt_length=1)
    assert torch.equal(logits, one_shot(model, tokens))


def every_split(length: int) -> list[list[int]]:
    """All ways of cutting so many tokens into chunks."""
    return [[first, *rest] for first in range(1, length + 1) for rest in every_split(length - first)] or [[]]


def assert_splits_are_equal(model: Model, tokens: Tokens, splits: list[list[int]]) -> None:
    """One sequence for each split, side by side."""
    expected, n = one_shot(model, tokens), len(tokens)
    cache = new_cache(model, max_sequences=len(splits), max_tokens=len(splits) * PAGE_TOKENS)
    sequences = [cache.open() for _ in splits]
    for turn in range(max(len(split) for split in splits)):
        active = [(seq, split[turn]) for seq, split in zip(sequences, splits, strict=True) if turn < len(split)]
        starts = [seq.length for seq, _ in active]
        runs = [run_of(seq, tokens.part(seq.length, seq.length + size), prompt_length=n) for seq, size in active]
        for start, (seq, _), logits in zip(starts, active, model.step(runs, cache).logits, strict=True):
            assert torch.equal(logits, expected[start : seq.length]), splits[sequences.index(seq)]
    assert {seq.length for seq in sequences} == {n}


@pytest.mark.parametrize("name", ["shared_index", "candidates", "everything"])
def test_every_split_in_two(name: str) -> None:
    model = load(name)
    assert_splits_are_equal(model, text(model, 37), [[first, 37 - first] for first in range(1, 37)])


@pytest.mark.parametrize(
    ("name", "has_image"),
    [("shared_index", False), ("engram", False), ("everything", False), ("vision", True), ("everything", True)],
)
def test_every_split_of_a_short_prompt(name: str, has_image: bool) -> None:
    """All 64 splits of 7 tokens; an image lies across groups and n-grams."""
    model, n = load(name), 7
    tokens = text(model, n)
    if has_image:
        types = torch.tensor([-1, -1, 0, 1, 2, 3, -1])
        rows = torch.randn(4, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        tokens = Tokens(tokens.ids.masked_fill(types >= 0, model.config.image_token_id), types, rows)
    splits = every_split(n)
    assert len({tuple(split) for split in splits}) == 2 ** (n - 1)
    assert_splits_are_equal(model, tokens, splits)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefill", ["full", "halo"])
def test_chunks_of_odd_sizes(name: str, prefill: str) -> None:
    model = load(name)
    sizes = [1, 1, 3, 17, 1, 64, 2, 15, 31, 1, 19]  # 155 tokens, across a page border
    tokens = text(model, sum(sizes))
    cache = new_cache(model)
    logits = feed(model, cache, cache.open(), tokens, sizes, prompt_length=len(tokens), prefill=prefill)
    assert torch.equal(logits, one_shot(model, tokens))


@pytest.mark.parametrize("name", ["vision", "everything"])
def test_image_split_at_every_border(name: str) -> None:
    model, tokens = load(name), with_image(name)
    assert tokens.types is not None
    n = len(tokens)
    expected = one_shot(model, tokens)
    assert not torch.equal(expected, one_shot(model, Tokens(tokens.ids)))  # the image matters
    span = (tokens.types >= 0).nonzero().flatten().tolist()
    cache = new_cache(model)
    for border in range(span[0] - 1, span[-1] + 3):
        seq = cache.open()
        logits = feed(model, cache, seq, tokens, [border, n - border], prompt_length=n, prefill="halo")
        assert torch.equal(logits, expected), border
        seq.close()
    logits = feed(model, cache, cache.open(), tokens, [1] * n, prompt_length=n)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("most", [0, 40])
@pytest.mark.parametrize("name", ["shared_index", "everything"])
def test_rows_read_from_the_pool_equal_decoded_ones(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long contexts, where too many rows are visible, and with many queries too many are selected, to be kept."""
    model = load(name)
    tokens = text(model, 150)
    expected = one_shot(model, tokens)
    monkeypatch.setattr(indexer, "DENSE_ROWS", most)
    cache = new_cache(model, max_sequences=2)
    other, seq = cache.open(), cache.open()
    feed(model, cache, other, text(model, 60, seed=1), [60], prompt_length=60)
    both = [run_of(other, text(model, 3, seed=2)), run_of(seq, tokens.part(0, 140))]
    logits = [model.step(both, cache).logits[1], feed(model, cache, seq, tokens, [1] * 4 + [6], prompt_length=140)]
    assert torch.equal(torch.cat(logits), expected)


# Trimmed prefill -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[157], [80, 77], [1, 100, 1, 54, 1], [141, 16], [140, 17]])
def test_halo_equals_full(name: str, sizes: list[int]) -> None:
    model = load(name)
    prompt = sum(sizes)
    tokens = text(model, prompt + 25, seed=2)
    cache = new_cache(model)
    seq = cache.open()
    last = feed(model, cache, seq, tokens, sizes, prompt_length=prompt, prefill="halo", logits_from=prompt - 1)
    decoded = feed(model, cache, seq, tokens, [1, 1, 6, 1, 5, 6, 5], prompt_length=prompt, prefill="halo")
    assert last.shape[0] == 1
    assert torch.equal(torch.cat((last, decoded)), one_shot(model, tokens)[prompt - 1 :])


@pytest.mark.parametrize("logits_from", [0, 40, 141, 148, 157])
def test_halo_with_any_wanted_logits(logits_from: int) -> None:
    model = load("everything")
    tokens = text(model, 163)
    expected = one_shot(model, tokens)
    cache = new_cache(model)
    seq = cache.open()
    logits = feed(model, cache, seq, tokens, [90, 67], prompt_length=157, prefill="halo", logits_from=logits_from)
    assert torch.equal(logits, expected[logits_from:157])
    assert torch.equal(feed(model, cache, seq, tokens, [1] * 6, prompt_length=157), expected[157:])


@pytest.mark.parametrize("name", TRIMMED)
def test_replay_is_close_and_independent_of_chunking(name: str) -> None:
    model = load(name)
    tokens = text(model, 160)
    expected = one_shot(model, tokens)[149:]
    results = []
    for sizes in ([150], [60, 90], [1, 148, 1], [141, 9], [140] + [1] * 10):  # single rows see no further back
        cache = new_cache(model)
        seq = cache.open()
        last = feed(model, cache, seq, tokens, sizes, prompt_length=150, prefill="replay", logits_from=149)
        decoded = feed(model, cache, seq, tokens, [1] * 10, prompt_length=150, prefill="replay")
        results.append(torch.cat((last, decoded)))
    first = results[0]
    assert bool(first.isfinite().all())
    assert all(torch.equal(result, first) for result in results)
    assert not torch.equal(first, expected)
    assert relative_error(first[:1], expected[:1]) < REPLAY_ERROR


@pytest.mark.parametrize("name", TRIMMED)
def test_replay_of_a_prompt_within_the_window_is_exact(name: str) -> None:
    model = load(name)
    tokens = text(model, 24)
    cache = new_cache(model)
    seq = cache.open()
    logits = feed(model, cache, seq, tokens, [7, 9], prompt_length=16, prefill="replay")
    logits = torch.cat((logits, feed(model, cache, seq, tokens, [1] * 8, prompt_length=16)))
    assert torch.equal(logits, one_shot(model, tokens))


def test_replay_with_one_layer_above_the_last_source_is_exact_at_the_last_position() -> None:
    """The source itself sees whole windows: what is cut off begins one layer above it."""
    model = load("draft")
    assert model.plan.split_layer == model.config.num_hidden_layers - 2
    tokens = text(model, 150)
    cache = new_cache(model)
    last = feed(model, cache, cache.open(), tokens, [150], prompt_length=150, prefill="replay", logits_from=149)
    assert torch.equal(last, one_shot(model, tokens)[149:])


# Among others --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_f2_alone_equals_among_others(name: str, seed: int) -> None:
    model, rng = load(name), random.Random(seed)
    has_image = model.vision is not None
    plans = {  # chunks by step; 0 = not part of the step
        "prompt": [0, 61, 1, 3],
        "chunks": [33, 20, 12, 1],
        "decode": [19, 1, 1, 1],
        "verify": [30, 5, 6, 5],
        "image": [11, 4, 0, 30],
    }
    cache = new_cache(model, max_sequences=7, max_tokens=2048)
    cache.open()  # never used: slots differ from those of a cache with one sequence
    jobs = {}
    for i, (job, sizes) in enumerate(plans.items()):
        tokens = with_image(name) if has_image and job == "image" else text(model, sum(sizes), seed=i)
        jobs[job] = (cache.open(), tokens.part(0, sum(sizes)))
    got: dict[str, list[Tensor]] = {job: [] for job in plans}
    for turn in range(4):
        present = [job for job in plans if plans[job][turn]]
        rng.shuffle(present)
        runs = []
        for job in present:
            seq, tokens = jobs[job]
            part = tokens.part(seq.length, seq.length + plans[job][turn])
            runs.append(run_of(seq, part, prompt_length=65 if job == "chunks" else None, prefill="halo"))
        for job, logits in zip(present, model.step(runs, cache).logits, strict=True):
            got[job].append(logits)
    for job, (_, tokens) in jobs.items():
        assert torch.equal(torch.cat(got[job]), one_shot(model, tokens)), job


@pytest.mark.parametrize("name", ["candidates", "everything"])
def test_f10_copies_in_one_batch_are_equal(name: str) -> None:
    model = load(name)
    tokens = text(model, 23)
    expected = one_shot(model, tokens)
    cache = new_cache(model, max_sequences=64, max_tokens=64 * PAGE_TOKENS)
    sequences = [cache.open() for _ in range(64)]
    for start, end in ((0, 21), (21, 22), (22, 23)):
        out = model.step([run_of(seq, tokens.part(start, end)) for seq in sequences], cache)
        assert all(torch.equal(logits, expected[start:end]) for logits in out.logits)


@pytest.mark.parametrize("name", ["engram", "everything"])
def test_slot_and_pages_of_an_ended_sequence_are_used_again(name: str) -> None:
    model = load(name)
    old, tokens = text(model, 151, seed=3), text(model, 45, seed=4)
    cache = new_cache(model)
    seq = cache.open()
    feed(model, cache, seq, old, [150, 1], prompt_length=150)
    slot = seq.slot
    seq.close()
    seq = cache.open()
    assert seq.slot == slot
    logits = feed(model, cache, seq, tokens, [1, 1, 2, 30] + [1] * 11, prompt_length=34)
    assert torch.equal(logits, one_shot(model, tokens))


@pytest.mark.parametrize("name", ["shared_index", "engram", "everything"])
def test_open_group_waits_while_others_step(name: str) -> None:
    model = load(name)
    a, b = text(model, 40, seed=5), text(model, 40, seed=6)
    cache = new_cache(model, max_sequences=2)
    first, second = cache.open(), cache.open()
    logits = [feed(model, cache, first, a, [13], prompt_length=13)]  # odd: half a group of two
    feed(model, cache, second, b, [5, 1, 1, 1, 20], prompt_length=40)
    logits.append(feed(model, cache, first, a, [2], prompt_length=13))  # odd again
    feed(model, cache, second, b, [1, 3], prompt_length=40)
    logits.append(feed(model, cache, first, a, [1, 5, 19], prompt_length=13))
    assert torch.equal(torch.cat(logits), one_shot(model, a))


# Verified blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [24, 25])
def test_f18_rolled_back_blocks_leave_no_trace(name: str, prompt: int) -> None:
    model = load(name)
    block = MAX_ROLLBACK + 1
    tokens = text(model, prompt + 80, seed=7)
    expected = one_shot(model, tokens)
    cache = new_cache(model, max_tokens=4096)
    wrong = (tokens.ids + 11) % 290
    seq = cache.open()
    feed(model, cache, seq, tokens, [prompt], prompt_length=prompt, prefill="halo", logits_from=prompt - 1)
    order = [*range(1, block + 1), 1, 1, 2]  # tokens kept: the anchor and 0..k accepted drafts
    for kept in order:
        start = seq.length
        ids = torch.cat((tokens.ids[start : start + kept], wrong[start + kept : start + block]))
        (logits,) = model.step([run_of(seq, Tokens(ids), prompt_length=prompt)], cache).logits
        assert torch.equal(logits[:kept], expected[start : start + kept]), kept
        seq.truncate(start + kept)
    start = seq.length
    logits = feed(model, cache, seq, tokens, [1] * 9 + [3, 4], prompt_length=prompt)
    assert torch.equal(logits, expected[start : start + 16])


@pytest.mark.parametrize("name", ["draft", "everything"])
def test_drafts_do_not_see_rolled_back_tokens(name: str) -> None:
    model = load(name)
    # Among the lengths: rolled back just over a page border, where the oldest context row is the last of its page.
    lengths = range(PAGE_TOKENS + 14, PAGE_TOKENS + 19)
    tokens = text(model, 160, seed=8)
    cache = new_cache(model, max_sequences=2)
    plain, rolled = cache.open(), cache.open()
    feed(model, cache, plain, tokens, [130], prompt_length=130, prefill="halo", logits_from=129)
    feed(model, cache, rolled, tokens, [77, 53], prompt_length=130, prefill="halo", logits_from=129)
    for length in lengths:
        feed(model, cache, plain, tokens, [length - plain.length], prompt_length=130)
        ids = torch.cat((tokens.ids[rolled.length : length], tokens.ids[:MAX_ROLLBACK]))
        model.step([run_of(rolled, Tokens(ids), prompt_length=130)], cache)
        rolled.truncate(length)
        alone = draft(model, cache, [plain])
        assert bool(alone.logits.isfinite().all())
        assert bool(alone.confidence.isfinite().all())
        for seqs in ([rolled], [plain, rolled], [rolled, plain]):
            out = draft(model, cache, seqs)
            for i in range(len(seqs)):
                assert torch.equal(out.logits[i], alone.logits[0])
                assert torch.equal(out.token_ids[i], alone.token_ids[0])
                assert torch.equal(out.confidence[i], alone.confidence[0])


@pytest.mark.parametrize("name", ["draft", "everything"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 150])
def test_drafts_do_not_depend_on_chunking(name: str, length: int) -> None:
    model = load(name)
    tokens = text(model, length, seed=9)
    outs = []
    for sizes, prefill in (([length], "full"), ([length], "halo"), ([1] * min(length, 20), "halo")):
        rest = length - sum(sizes)
        cache = new_cache(model)
        seq = cache.open()
        chunks = sizes + [rest] * bool(rest)
        feed(model, cache, seq, tokens, chunks, prompt_length=length, prefill=prefill, logits_from=length - 1)
        outs.append(draft(model, cache, [seq]))
    for out in outs[1:]:
        assert torch.equal(out.logits, outs[0].logits)
        assert torch.equal(out.confidence, outs[0].confidence)


# Pages ---------------------------------------------------------------------------------------------------------------


def test_window_pages_stay_flat_over_a_long_decode() -> None:
    model = load("everything")
    tokens = text(model, 330, seed=10)
    cache = new_cache(model)
    seq = cache.open()
    feed(model, cache, seq, tokens, [30], prompt_length=30, prefill="halo", logits_from=29)
    logits = []
    for _ in range(300):
        logits.append(feed(model, cache, seq, tokens, [1], prompt_length=30))
        in_use = cache.window_pages.num_pages - cache.window_pages.num_free
        assert in_use <= 3  # the window, the page being written, and the one before the last border
        assert cache.pages.num_pages - cache.pages.num_free == -(-seq.length // PAGE_TOKENS)
    assert torch.equal(torch.cat(logits), one_shot(model, tokens)[30:])


def test_closing_returns_pages_and_slots() -> None:
    model = load("swa")
    cache = new_cache(model, max_sequences=3, max_tokens=9 * PAGE_TOKENS)
    before = (cache.pages.num_free, cache.window_pages.num_free, cache.num_free_slots)
    for length in (1, 128, 129, 300):
        sequences = [cache.open() for _ in range(3)]
        with pytest.raises(CapacityError, match="slots"):
            cache.open()
        for seq in sequences:
            feed(model, cache, seq, text(model, length), [length], prompt_length=length, logits_from=length)
        for seq in sequences:
            seq.close()
            seq.close()
        assert (cache.pages.num_free, cache.window_pages.num_free, cache.num_free_slots) == before


def test_lack_of_pages_changes_no_sequence() -> None:
    model = load("everything")
    tokens = text(model, 160)
    expected = one_shot(model, tokens)
    cache = new_cache(model, max_sequences=2, max_tokens=3 * PAGE_TOKENS)
    a, b = cache.open(), cache.open()
    for seq in (a, b):
        feed(model, cache, seq, tokens, [100], prompt_length=100)
    free = (cache.pages.num_free, cache.window_pages.num_free)
    with pytest.raises(CapacityError, match="KV pages"):  # one page is left for two
        model.step([run_of(seq, tokens.part(100, 140)) for seq in (a, b)], cache)
    assert (a.length, b.length) == (100, 100)
    assert (cache.pages.num_free, cache.window_pages.num_free) == free
    assert torch.equal(feed(model, cache, b, tokens, [40, 20], prompt_length=100), expected[100:])
    assert torch.equal(feed(model, cache, a, tokens, [28], prompt_length=100), expected[100:128])


# Misuse --------------------------------------------------------------------------------------------------------------


def bad_runs(model: Model, seq: Sequence) -> dict[str, tuple[Run, type[Exception], str]]:
    ids = text(model, 5).ids
    good = Tokens(ids)
    row = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)
    one_image = torch.tensor([-1, -1, 1, -1, -1])
    return {
        "mode": (run_of(seq, good, prefill="fast"), RequestError, "prefill"),
        "replay before its window": (run_of(seq, good, prefill="replay", prompt_length=90), RequestError, "replay"),
        "empty": (run_of(seq, Tokens(ids[:0])), PromptError, "token_ids"),
        "dtype": (run_of(seq, Tokens(ids.int())), PromptError, "token_ids"),
        "two dimensions": (run_of(seq, Tokens(ids[None])), PromptError, "token_ids"),
        "negative": (run_of(seq, Tokens(ids - 300)), PromptError, "vocabulary"),
        "too large": (run_of(seq, Tokens(ids + model.config.vocab_size)), PromptError, "vocabulary"),
        "too long": (run_of(seq, Tokens(ids[:1].expand(1025))), PromptError, "context"),
        "types of another length": (run_of(seq, Tokens(ids, one_image[:4], row)), PromptError, "token_types"),
        "rows without types": (run_of(seq, Tokens(ids, None, row)), PromptError, "image_rows"),
        "types without rows": (run_of(seq, Tokens(ids, one_image)), PromptError, "image_rows"),
    }


@pytest.mark.parametrize("case", list(bad_runs(load("everything"), new_cache(load("everything")).open())))
def test_refused_runs_change_nothing(case: str) -> None:
    model = load("everything")
    tokens = text(model, 50)
    cache = new_cache(model, max_sequences=2, max_tokens=2048)
    seq, other = cache.open(), cache.open()
    logits = [feed(model, cache, seq, tokens, [20], prompt_length=50)]
    free = (cache.pages.num_free, cache.window_pages.num_free)
    run, error, message = bad_runs(model, seq)[case]
    with pytest.raises(error, match=message):
        model.step([run_of(other, text(model, 200)), run], cache)
    assert (seq.length, other.length) == (20, 0)
    assert (cache.pages.num_free, cache.window_pages.num_free) == free
    logits.append(feed(model, cache, seq, tokens, [30], prompt_length=50))
    assert torch.equal(torch.cat(logits), one_shot(model, tokens))


def test_trimmed_prompt_cannot_go_on_as_a_full_one() -> None:
    model = load("everything")
    tokens = text(model, 120)
    cache = new_cache(model)
    seq = cache.open()
    feed(model, cache, seq, tokens, [60], prompt_length=120, prefill="halo", logits_from=119)
    for prompt_length, prefill, logits_from in ((120, "full", 0), (120, "halo", 60), (70, "halo", 119)):
        with pytest.raises(RequestError, match="window rows"):
            feed(
                model,
                cache,
                seq,
                tokens,
                [40],
                prompt_length=prompt_length,
                prefill=prefill,
                logits_from=logits_from,
            )
    last = feed(model, cache, seq, tokens, [60], prompt_length=120, prefill="halo", logits_from=119)
    assert torch.equal(last, one_shot(model, tokens)[119:])


def test_misuse_of_sequences_and_drafts() -> None:
    model = load("draft")
    cache = new_cache(model, max_sequences=2)
    seq = cache.open()
    with pytest.raises(RequestError, match="draft"):
        draft(model, cache, [seq])  # nothing processed
    with pytest.raises(RequestError, match="draft"):
        draft(model, cache, [])
    with pytest.raises(RequestError, match="two runs"):
        model.step([run_of(seq, text(model, 3)), run_of(seq, text(model, 3))], cache)
    feed(model, cache, seq, text(model, 20), [20], prompt_length=20)
    for length in (-1, 21, 20 - MAX_ROLLBACK - 1):
        with pytest.raises(RequestError, match="truncate"):
            seq.truncate(length)
    seq.close()
    with pytest.raises(RequestError, match="closed"):
        model.step([run_of(seq, text(model, 3))], cache)
    assert model.step([], cache).logits == []
    with pytest.raises(RequestError, match="no draft stages"):
        draft(load("swa"), cache, [cache.open()])
