"""Logits to tokens: filters against a plain Python twin, random numbers, broken logits, log-probabilities."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from leadline.config.sampling import SamplingParams
from leadline.engine.sampler import UNIT, Draw, Logprob, Sampler, Want, check_finite, draw, logprobs_of, pick, weights
from leadline.errors import NumericsError
from tests.support.statistics import chi_square_p_value

pytestmark = pytest.mark.unit

# Fixed seeds: a test either always passes or always fails. Correct code fails one such choice of seed in a thousand.
MIN_P_VALUE = 1e-3
PROB_TOLERANCE = 1e-12  # 40 weights, each rounded by at most 2^-46 of the largest
LOGPROB_TOLERANCE = 1e-5  # fp32 log_softmax of values up to 30


def sampler(seed=1, sample=0, banned=(), banned_before=0, **params):
    return Sampler(SamplingParams(**params), seed, sample, banned, banned_before)


def probs(rules, logits_V, position, mask_V=None):
    weights_V = weights(logits_V[None], [Want(0, rules, position, mask_V)])[0]
    return weights_V / weights_V.sum().double()


def token(rules, logits_V, position):
    ((token_id, _),) = draw(logits_V[None], [Want(0, rules, position)])
    return token_id


def twin_probs(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The filters in plain Python, one token at a time."""
    top = max(logits)
    weights = [math.exp((value - top) / temperature) for value in logits]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = [i for i in order if probs[i] >= min_p * max(probs)]
    if top_k > 0:
        order = order[:top_k]
    kept, mass, total = [], 0.0, sum(probs[i] for i in order)
    for i in order:
        if top_p < 1 and kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += probs[i]
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(probs))]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0, "min_p": 0.2},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"temperature": 0.7, "min_p": 0.01, "top_k": 11, "top_p": 0.8},
    ],
    ids=str,
)
def test_filters_equal_the_twin(params):
    logits_V = 3 * torch.randn(37, generator=torch.Generator().manual_seed(0))
    got_V = probs(sampler(**params), logits_V, 5)
    want_V = torch.tensor(twin_probs(logits_V.double().tolist(), **params), dtype=torch.float64)
    assert got_V.dtype == torch.float64
    assert torch.equal(got_V == 0, want_V < 2**-46 * want_V.max())
    torch.testing.assert_close(got_V, want_V, rtol=0, atol=PROB_TOLERANCE)


def test_filter_order_is_min_p_then_top_k_then_top_p():
    # After top_k 2 the first token has 4/7 > 0.57 of what is left and stays alone; of all four it has 0.4.
    logits_V = torch.tensor([0.4, 0.2, 0.1, 0.3]).log()
    assert probs(sampler(top_k=2, top_p=0.57), logits_V, 0).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert probs(sampler(top_p=0.57), logits_V, 0).count_nonzero() == 2


def test_ties_at_a_border_keep_the_lowest_ids():
    logits_V = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    assert probs(sampler(top_k=2), logits_V, 0).nonzero().flatten().tolist() == [1, 2]
    assert probs(sampler(top_p=0.5), logits_V, 0).nonzero().flatten().tolist() == [1, 2]
    assert token(sampler(temperature=0), logits_V, 0) == 1


def test_borders_of_filters_are_exact():
    equal_V = torch.zeros(3)
    assert probs(sampler(top_p=2 / 3), equal_V, 0).count_nonzero() == 2
    assert probs(sampler(top_p=math.nextafter(2 / 3, 1)), equal_V, 0).count_nonzero() == 3
    assert probs(sampler(top_p=0.25), torch.zeros(1000), 0).nonzero().flatten().tolist() == list(range(250))
    assert probs(sampler(min_p=1), torch.tensor([2.0, 1.0, 2.0]), 0).tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures(temperature):
    probs_V = probs(sampler(temperature=temperature), torch.tensor([1.0, 3.0, -1e30, 2.0]), 0)
    assert probs_V.isfinite().all()
    if temperature < 1:
        assert probs_V.tolist() == [0.0, 1.0, 0.0, 0.0]
    else:
        assert probs_V.count_nonzero() == 4


def test_logits_are_not_changed():
    logits_V = torch.randn(11)
    before = logits_V.clone()
    probs(sampler(top_k=3, top_p=0.5, min_p=0.1, banned=[2], banned_before=9), logits_V, 0, torch.arange(11) > 3)
    assert torch.equal(logits_V, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits(bad):
    logits_V = torch.zeros(9)
    logits_V[4] = bad
    with pytest.raises(NumericsError, match=r"position 12.* 1 of 9"):
        check_finite(logits_V, 12)


def test_banned_ids_until_min_tokens():
    logits_V = torch.tensor([9.0, 1.0, 0.0])
    for temperature in (0.0, 0.01):
        rules = sampler(temperature=temperature, banned=[0], banned_before=5)
        assert token(rules, logits_V, 4) == 1
        assert token(rules, logits_V, 5) == 0


def test_random_numbers_depend_on_seed_sample_purpose_and_position():
    numbers = {
        sampler(seed=seed, sample=sample).uniform(draw, position)
        for seed in (0, 1, -1, 2**63)
        for sample in (0, 1)
        for draw in Draw
        for position in (0, 1, 2**33)
    }
    assert len(numbers) == 4 * 2 * 3 * 3
    assert all(0 <= number < 2**52 for number in numbers)
    assert sampler(seed=7).uniform(Draw.TOKEN, 3) == sampler(seed=7).uniform(Draw.TOKEN, 3)
    # Recorded: seeds keep their meaning from release to release.
    assert sampler(seed=1).uniform(Draw.TOKEN, 0) == int(0.08867124762411072 * 2**52)


def test_random_numbers_are_uniform():
    rules = sampler(seed=3)
    counts = [0] * 16
    for position in range(4000):
        counts[16 * rules.uniform(Draw.TOKEN, position) >> 52] += 1
    assert chi_square_p_value(counts, [1 / 16] * 16) > MIN_P_VALUE


def test_pick_at_the_borders():
    weights_SV = torch.tensor([[0, 1, 0, 3, 0]] * 4)
    assert pick(weights_SV, [0, 2**50 - 1, 2**50, 2**52 - 1]) == [1, 1, 3, 3]
    assert pick(UNIT * torch.ones(1, 2**17, dtype=torch.int64), [2**52 - 1]) == [2**17 - 1]  # no overflow


RULES = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 20},
    {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 2.0, "min_p": 0.2},
    {"banned": [3, 5], "banned_before": 99, "top_p": 0.7},
]


@pytest.mark.parametrize("num_ids", [13, 260, 1001, 129_280])
def test_a_row_is_the_same_alone_and_among_others(num_ids):
    """Weights, not tokens alone: bit by bit, whatever the neighbours ask for and wherever the row is in a chunk."""
    generator = torch.Generator().manual_seed(num_ids)
    count = 64 if num_ids < 10_000 else 9
    logits_NV = 3 * torch.randn(count, num_ids, generator=generator)
    logits_NV[: count // 2] = logits_NV[: count // 2].round()  # many equal logits
    wants = []
    for row in range(count):
        mask_V = torch.rand(num_ids, generator=generator) < 0.5 if row % 5 == 0 else None
        if mask_V is not None:
            mask_V[0] = True
        drafts = {}
        if row % 3 == 0 and RULES[row % 8].get("temperature") != 0:
            weights_V = weights(logits_NV.flip(0), [Want(row, sampler(**RULES[row % 8]), 7)])[0]
            drafts = {"draft": int(weights_V.argmax()), "draft_weights_V": weights_V}
        wants.append(Want(row, sampler(seed=row, **RULES[row % 8]), 7, mask_V, **drafts))
    together = list(draw(logits_NV, wants))
    assert len({token_id for token_id, _ in together}) > count // 4 or num_ids == 13
    for want, (token_id, weights_V) in zip(wants, together, strict=True):
        ((alone, alone_V),) = draw(logits_NV[want.row : want.row + 1].clone(), [replace(want, row=0)])
        assert token_id == alone, want.row
        assert torch.equal(weights_V, alone_V), want.row


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 40}, {"top_k": 300, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_filters_of_the_released_vocabulary_equal_a_full_sort(params, rounded):
    logits_V = 2 * torch.randn(129_280, generator=torch.Generator().manual_seed(3))
    logits_V = logits_V.round() if rounded else logits_V
    plain_V = weights(logits_V[None], [Want(0, sampler(), 0)])[0]
    sorted_V, order_V = plain_V.sort(descending=True, stable=True)
    sorted_V[params.get("top_k", 129_280) :] = 0
    bound = math.ceil(Fraction(params.get("top_p", 1)) * int(sorted_V.sum()))
    sorted_V[sorted_V.cumsum(0) - sorted_V >= bound] = 0
    want_V = torch.zeros_like(plain_V).scatter_(0, order_V, sorted_V)
    assert torch.equal(weights(logits_V[None], [Want(0, sampler(**params), 0)])[0], want_V)


def test_sampled_distribution():
    logits_V = 2 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    rules = sampler(seed=11, temperature=0.8, top_p=0.95)
    counts = [0] * 12
    for position in range(3000):
        counts[token(rules, logits_V, position)] += 1
    assert chi_square_p_value(counts, probs(rules, logits_V, 0).tolist()) > MIN_P_VALUE
    # The test must be able to fail: the same counts do not fit another temperature.
    assert chi_square_p_value(counts, probs(sampler(temperature=1.1), logits_V, 0).tolist()) < MIN_P_VALUE


def test_logprobs_of_hand_made_rows():
    logits_NV = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 1.0, 1.0, 1.0]]).log() + 7
    rows = logprobs_of(logits_NV, [3, 2], 2)
    assert [[(entry.token_id, entry.rank) for entry in row] for row in rows] == [
        [(3, 4), (0, 1), (1, 2)],
        [(2, 3), (0, 1), (1, 2)],
    ]
    want = [math.log(0.125), math.log(0.5), math.log(0.25), *[math.log(0.25)] * 3]
    got = [entry.logprob for row in rows for entry in row]
    assert got == pytest.approx(want, abs=LOGPROB_TOLERANCE)


def test_logprobs_edges():
    logits_NV = torch.randn(1, 3)
    assert logprobs_of(logits_NV[:0], [], 5) == []
    assert len(logprobs_of(logits_NV, [1], 0)[0]) == 1
    row = logprobs_of(logits_NV, [1], 99)[0]
    assert sorted(entry.token_id for entry in row) == [0, 1, 2]
    assert isinstance(row[0], Logprob)
    assert sum(math.exp(entry.logprob) for entry in row) == pytest.approx(1, abs=LOGPROB_TOLERANCE)
