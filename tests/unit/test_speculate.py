"""Speculation: the output distribution is the model's own, whatever the drafter proposes."""

import itertools
from pathlib import Path

import pytest
import torch

from leadline.config.model import read_config
from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Request
from leadline.engine.sampler import Sampler, Want, draw
from leadline.engine.speculate import Proposal, Speculation, StepRows, accept, accept_all, propose
from leadline.errors import NumericsError, RequestError
from leadline.model.step import Run
from leadline.text.grammar import Grammar
from leadline.text.tool_grammar import Tool
from tests.support.fake_llm import fake_llm
from tests.support.fake_model import FakeConfig, FakeModel
from tests.support.fake_text import byte_tokenizer
from tests.support.scripted_llm import scripted_llm
from tests.support.statistics import chi_square_p_value
from tests.unit.engine_driver import generate

pytestmark = pytest.mark.unit

RELEASED = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
MIN_P_VALUE = 1e-3  # fixed seeds; see test_sampler.py
TRIALS = 3000


def tokens_of(model, params, speculation, prompts=([5],)):
    cache = model.new_cache(max_tokens=4096, max_sequences=4)
    requests = [Request(token_ids=prompt, params=params) for prompt in prompts]
    outputs = {}
    for delta in generate(model, cache, requests, speculation=speculation):
        outputs.setdefault((delta.request, delta.sample), []).extend(delta.token_ids)
    assert cache.num_free_slots == 4
    assert cache.pages.num_free == cache.pages.num_pages
    return outputs


def accepted(rules, logits_LV, proposal, position):
    (result,) = accept_all(rows := StepRows(logits_LV), [accept(rules, rows, 0, proposal, position)])
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_one_draft_gives_the_models_distribution(temperature, filters):
    """First token after one draft from a wrong q; the exact answer is p."""
    generator = torch.Generator().manual_seed(4)
    p_logits_V, q_logits_V = 0.8 * torch.randn(2, 9, generator=generator)
    params = SamplingParams(temperature=temperature, **filters)
    counts = [0] * 9
    num_accepted = 0
    rules = Sampler(params, 0)
    (_, p_V), (_, q_V) = draw(torch.stack([p_logits_V, q_logits_V]), [Want(0, rules, 7), Want(1, rules, 7)])
    for seed in range(TRIALS):
        rules = Sampler(params, seed)
        draft = int(torch.multinomial(q_V.double(), 1, generator=generator))
        tokens = accepted(rules, torch.stack([p_logits_V, p_logits_V]), Proposal([draft], [q_V]), 7)
        counts[tokens[0]] += 1
        num_accepted += len(tokens) - 1
    p_V, q_V = (weights_V.double() / weights_V.sum() for weights_V in (p_V, q_V))
    assert chi_square_p_value(counts, p_V.tolist()) > MIN_P_VALUE
    assert chi_square_p_value(counts, q_V.tolist()) < MIN_P_VALUE  # so the drafts were really corrected
    overlap = float(torch.minimum(p_V, q_V).sum())
    assert chi_square_p_value([num_accepted, TRIALS - num_accepted], [overlap, 1 - overlap]) > MIN_P_VALUE


@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_generated_triples_have_the_markov_distribution(drafts):
    """Three tokens generated with drafts, over all triples, against the product of the model's own probabilities."""
    config = FakeConfig(vocab_size=4)
    model = FakeModel(config, seed=2, draft_noise=1.5)
    params = [SamplingParams(seed=seed, max_tokens=3, ignore_eos=True) for seed in range(TRIALS)]
    counts = dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    cache = model.new_cache(max_tokens=8192, max_sequences=64, max_step_tokens=512)
    requests = [Request(token_ids=[2], params=entry) for entry in params]
    outputs = {}
    for delta in generate(model, cache, requests, speculation=Speculation(max_drafts=drafts)):
        outputs.setdefault(delta.request, []).extend(delta.token_ids)
    for tokens in outputs.values():
        counts[tuple(tokens)] += 1
    p_VV = model.table.double().softmax(dim=-1)
    exact = [float(p_VV[2, a] * p_VV[a, b] * p_VV[b, c]) for a, b, c in counts]
    assert chi_square_p_value(list(counts.values()), exact) > MIN_P_VALUE


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
def test_f18_greedy_equals_plain_greedy(drafts, noise):
    model = FakeModel(draft_noise=noise)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [[5], [7, 8, 9], [4] * 70]
    plain = tokens_of(model, params, None, prompts)
    steps = len(model.steps)
    assert tokens_of(model, params, Speculation(max_drafts=drafts), prompts) == plain
    assert all(len(tokens) == 50 for tokens in plain.values())
    if noise == 0.0:
        assert len(model.steps) - steps < steps / (drafts + 1) + 3  # perfect drafts: far fewer steps


def test_perfect_drafts_are_all_accepted():
    model = FakeModel(draft_noise=0.0)
    cache = model.new_cache(max_tokens=512, max_sequences=1)
    params = SamplingParams(seed=1, max_tokens=37, ignore_eos=True)
    deltas = list(generate(model, cache, [Request(token_ids=[5], params=params)], speculation=Speculation()))
    assert [len(delta.token_ids) for delta in deltas] == [1, 6, 6, 6, 6, 6, 6]
    assert [delta.drafted for delta in deltas] == [0, 5, 5, 5, 5, 5, 5]


def test_never_processes_beyond_the_last_token():
    model = FakeModel(draft_noise=0.0)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    tokens_of(model, params, Speculation())
    assert model.steps == [[1], [2]]  # anchor and one draft: the third token is not processed


def test_low_confidence_cuts():
    model = FakeModel(confidence=(-1.0,) * 5)  # sigmoid 0.27
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    tokens_of(model, params, Speculation(min_confidence=0.5))
    assert all(step == [1] for step in model.steps)
    model.steps.clear()
    tokens_of(model, params, Speculation(min_confidence=0.2))
    assert [6] in model.steps


def test_the_cut_is_before_the_first_doubtful_draft():
    model = FakeModel(confidence=(3.0, 3.0, -9.0, 3.0, 3.0))
    cache = model.new_cache(max_tokens=512, max_sequences=1)
    sequence = cache.open()
    model.step([Run(sequence, torch.tensor([5]), 0, 1)], cache)
    rules = Sampler(SamplingParams(), 0)
    (whole,) = propose(model, cache, [sequence], [rules], [6], [5])
    (cut,) = propose(model, cache, [sequence], [rules], [6], [5], min_confidence=0.5)
    assert len(whole.token_ids) == len(whole.weights) == 5
    model.confidence = (0.0,) * 4 + (-200.0,)  # chances of 0.5 and, rounded, 0: the least that is allowed is not lower
    for least, kept in ((0.5, 4), (0.0, 5)):
        (proposal,) = propose(model, cache, [sequence], [rules], [6], [5], min_confidence=least)
        assert len(proposal.token_ids) == kept
    assert cut.token_ids == whole.token_ids[:2]
    assert [torch.equal(a, b) for a, b in zip(cut.weights, whole.weights[:2], strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_drafts", value) for value in (0, -1, 6, 7, "2", 2.0, True)],
        *[("min_confidence", value) for value in (-0.1, 1.1, None, "0", True, float("nan"))],
        *[("adaptive", value) for value in (1, None)],
    ],
)
def test_f18_illegal_speculation_is_refused_at_the_start(field, value):
    model = FakeModel()
    cache = model.new_cache(max_tokens=512, max_sequences=1)
    with pytest.raises(RequestError, match=f"^{field}: expected "):
        generate(model, cache, [Request(token_ids=[5])], speculation=Speculation(**{field: value}))
    assert model.steps == []


def test_accepted_drafts_are_counted_up_to_the_end_of_the_answer():
    """A stop string inside the drafts cuts those behind it; the draft that completed it did become a token."""
    llm = fake_llm("abcdefgh", speculate=True)
    (output,) = llm.generate("h", SamplingParams(stop="d", max_tokens=20))
    answer = output.outputs[0]
    assert (answer.text, len(answer.token_ids)) == ("abc", 4)  # a from the prompt, then three drafts
    assert (answer.num_drafted, answer.num_accepted) == (5, 3)
    (output,) = llm.generate("h", SamplingParams(max_tokens=7))
    assert (output.outputs[0].num_drafted, output.outputs[0].num_accepted) == (5, 5)


def test_rows_after_a_rejection_do_not_matter():
    logits_LV = torch.zeros(3, 4)
    logits_LV[0, 2] = 9.0
    logits_LV[1:] = float("nan")
    greedy = Sampler(SamplingParams(temperature=0), 0)
    assert accepted(greedy, logits_LV, Proposal([1, 1], []), 0) == [2]
    with pytest.raises(NumericsError, match="position 1"):
        raise accepted(greedy, logits_LV, Proposal([2, 1], []), 0)


def test_same_seed_same_tokens_with_any_neighbours():
    model = FakeModel()
    alone = SamplingParams(seed=9, max_tokens=30, ignore_eos=True)
    (want,) = tokens_of(model, alone, Speculation()).values()
    got = tokens_of(model, alone, Speculation(), [[7, 7], [5], [6] * 50])
    assert got[1, 0] == want


# Under a grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_holds_at_every_draft(temperature):
    """Model and drafter agree on a token that the grammar forbids: it falls wherever it stands, all before it stay."""
    tokenizer, config = byte_tokenizer()
    grammar = Grammar.json_schema(tokenizer, {"type": "array", "items": {"enum": [1, 23]}})
    right = [*tokenizer.encode("[1,23,1]"), tokenizer.eos_token_id]
    (forbidden,) = tokenizer.encode("x")
    rules = Sampler(SamplingParams(temperature=temperature, seed=3), 3)
    for wrong in range(len(right)):
        logits_LV = torch.zeros(len(right), config.vocab_size)
        logits_LV[torch.arange(len(right)), torch.tensor(right)] = 400.0
        logits_LV[wrong, forbidden] = 800.0
        drafts = [*right[:wrong], forbidden, *right[wrong + 1 :]][:-1]
        drawn = draw(logits_LV, [Want(row, rules, row) for row in range(len(drafts))])
        proposal = Proposal(drafts, [weights_V for _, weights_V in drawn] if temperature else [])
        matcher, fresh = grammar.matcher(False), grammar.matcher(False)
        (tokens,) = accept_all(rows := StepRows(logits_LV), [accept(rules, rows, 0, proposal, 0, matcher)])
        assert tokens == right[: wrong + 1]
        for token in tokens:  # where the grammar stands does not tell of the rejected draft
            fresh.advance(token)
        assert torch.equal(matcher.mask(), fresh.mask())
        assert matcher.is_done == fresh.is_done == (wrong >= len(right) - 2)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALL = """

<｜DSML｜ calls>
<｜DSML｜ invoke name="f">
<｜DSML｜ parameter name="a" string="false">{}</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


@pytest.fixture(scope="module")
def reciter():
    return scripted_llm(RELEASED, "")


@pytest.mark.parametrize("kind", ["json", "calls", "either"])
def test_drafts_across_the_end_of_the_reasoning(reciter, kind):
    """Drafts are made in the reasoning, and their last ones may already stand in the part that the grammar rules."""
    tokenizer, model = reciter.tokenizer, reciter.model
    if kind == "json":
        grammar = Grammar.json_schema(tokenizer, SCHEMA)
        right, *wrong = '{"a": -4}', '{"a": true}', "so"
    else:
        grammar = Grammar.tool_calls(tokenizer, [Tool("f", SCHEMA)], document=SCHEMA if kind == "either" else None)
        right, *wrong = (CALL.replace("{}", "-4"), CALL.replace('"f"', '"g"'), "so")
    think, end, eos = tokenizer.id_of("<think>"), tokenizer.id_of("</think>"), tokenizer.eos_token_id
    prompt = [tokenizer.bos_token_id, model.assistant_id, think]

    def tokens(most, speculation=None):
        params = SamplingParams(temperature=0, max_tokens=most)
        cache = model.new_cache(max_tokens=512, max_sequences=1)
        core = EngineCore(model, cache, tokenizer=tokenizer, speculation=speculation)
        core.add(Request(token_ids=prompt, params=params, grammar=grammar))
        deltas = []
        while core.has_work:
            deltas += core.step()
        stats = core.stats()
        counted[0] += stats.drafted
        counted[1] += stats.accepted
        assert cache.num_free_slots == 1
        return [delta.token_ids for delta in deltas]

    counted, ruled = [0, 0], 0
    for length, answer in itertools.product(range(1, 4), (right, *wrong)):  # every third draft is wrong
        model.script = tokenizer.encode(" hm" * length + "</think>" + answer)
        most = len(model.script) + 1 if answer == right else 16
        plain = list(itertools.chain(*tokens(most)))
        matcher = grammar.matcher(True)
        for token in plain:
            assert matcher.mask() is None or matcher.mask()[token]
            matcher.advance(token)
        assert (plain == [*model.script, eos]) == (answer == right)
        steps = tokens(most, Speculation())
        assert list(itertools.chain(*steps)) == plain
        ruled = max(ruled, *(len(step) - 1 - step.index(end) for step in steps if end in step))
    assert 0 < counted[1] < counted[0]
    assert ruled == 2  # tokens behind the border that came with it: an accepted draft, and the model's own
