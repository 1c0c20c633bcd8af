"""How many drafts a step verifies: as many as raise tokens per second, by what earlier steps took."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.engine.speculate import DraftBudget

pytestmark = pytest.mark.unit

LINES = st.lists(st.lists(st.sampled_from([0.05, 0.2, 0.5, 0.8, 0.95, 1.0]), max_size=5), min_size=1, max_size=6)
SLOPES = st.sampled_from([0.0, 0.01, 0.1, 0.5, 3.0])


def budget_of(base, slope, sizes=(1, 8, 64)):
    budget = DraftBudget()
    for _ in range(10):
        for size in sizes:
            budget.observe(size, base + slope * size)
    return budget


def reaches(lines):
    return [math.prod(line[: j + 1]) for line in lines for j in range(len(line))]


@pytest.mark.parametrize("sizes", [(), (1,), (7,)])
def test_steps_of_one_size_tell_nothing_so_all_are_verified(sizes):
    lines = [[0.9, 0.01, 0.01], [], [0.001]]
    assert budget_of(1.0, 5.0, sizes).lengths(lines, 3) == [3, 0, 1]


@given(LINES, SLOPES, st.integers(0, 50))
def test_it_is_the_best_number_of_drafts(lines, slope, prompt_tokens):
    """Of all numbers of drafts, taken by falling chance, none gives more tokens per second."""
    num_tokens = len(lines) + prompt_tokens
    kept = budget_of(1.0, slope).lengths(lines, num_tokens)
    assert all(0 <= count <= len(line) for count, line in zip(kept, lines, strict=True))
    order = sorted(reaches(lines), reverse=True)
    rates = [
        (len(lines) + sum(order[:count])) / (1.0 + slope * (num_tokens + count)) for count in range(len(order) + 1)
    ]
    chosen = sum(reaches([line[:count] for line, count in zip(lines, kept, strict=True)]))
    rate = (len(lines) + chosen) / (1.0 + slope * (num_tokens + sum(kept)))
    assert rate >= max(rates) * (1 - 1e-6)


@given(LINES, st.integers(0, 50))
def test_dearer_tokens_never_mean_more_drafts(lines, prompt_tokens):
    kept = [budget_of(1.0, slope).lengths(lines, len(lines) + prompt_tokens) for slope in (0.0, 0.02, 0.2, 2.0)]
    for cheap, dear in itertools.pairwise(kept):
        assert all(a >= b for a, b in zip(cheap, dear, strict=True))
    assert kept[0] == [len(line) for line in lines]


@given(LINES, SLOPES, st.data())
def test_a_surer_draft_never_costs_its_own_sequence_one(lines, slope, data):
    budget = budget_of(1.0, slope)
    before = budget.lengths(lines, len(lines))
    r = data.draw(st.integers(0, len(lines) - 1))
    if lines[r]:
        j = data.draw(st.integers(0, len(lines[r]) - 1))
        surer = [list(line) for line in lines]
        surer[r][j] = 1.0
        assert budget.lengths(surer, len(lines))[r] >= before[r]


@given(LINES, SLOPES, st.data())
def test_what_is_verified_does_not_look_ahead(lines, slope, data):
    """A chance is known before its draft is drawn, the chances behind it are not: they must not decide about it, or
    the drafts that are verified would not be a fair sample."""
    budget = budget_of(1.0, slope)
    r = data.draw(st.integers(0, len(lines) - 1))
    j = data.draw(st.integers(0, len(lines[r])))
    other = [list(line) for line in lines]
    other[r] = lines[r][:j] + data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0]), max_size=5 - j))
    before, after = (budget.lengths(each, len(lines))[r] for each in (lines, other))
    assert min(before, j) == min(after, j)


def test_estimates_follow_the_context():
    budget = budget_of(1.0, 0.0)
    assert budget.lengths([[0.3] * 5], 1) == [5]
    for _ in range(200):
        for size in (1, 8, 64):
            budget.observe(size, 1.0 + 2.0 * size)
    assert budget.lengths([[0.3] * 5], 1) == [0]
    assert budget.lengths([[0.99] * 5], 1) == [5]


def test_steps_that_grow_faster_with_fewer_tokens_are_noise():
    budget = DraftBudget()
    for size, seconds in ((1, 5.0), (8, 3.0), (64, 1.0)):
        budget.observe(size, seconds)
    assert budget.lengths([[0.2, 0.1]], 1) == [2]
