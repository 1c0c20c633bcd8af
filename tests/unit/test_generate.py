"""The generation loop on the fake model: chunks, packing, limits, stops, failures, release."""

import json
import math
import re
from dataclasses import fields

import pytest
import torch

from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Request
from leadline.engine.score import score
from leadline.engine.speculate import Speculation
from leadline.errors import CapacityError, LeadlineError, NumericsError, PromptError, RequestError, SamplingError
from leadline.text.grammar import Grammar, Matcher
from tests.support.fake_model import FakeConfig, FakeModel, FakeSequence
from tests.support.fake_text import byte_tokenizer
from tests.unit.engine_driver import generate

pytestmark = pytest.mark.unit

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LOGPROB_TOLERANCE = 1e-5  # fp32 log_softmax against float64


def greedy_chain(model, last, count):
    tokens = []
    for _ in range(count):
        last = int(model.table[last].argmax())
        tokens.append(last)
    return tokens


class Collected:
    def __init__(self, deltas):
        self.tokens, self.text, self.final, self.logprobs = {}, {}, {}, {}
        for delta in deltas:
            key = (delta.request, delta.sample)
            assert key not in self.final, "a delta after the last one"
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            self.text[key] = self.text.get(key, "") + delta.text
            self.logprobs.setdefault(key, []).extend(delta.logprobs or [])
            if delta.finish_reason is not None:
                self.final[key] = delta


def run(model, requests, *, max_tokens=4096, max_sequences=8, max_step_tokens=64, **options):
    """Everything that comes out; checks that nothing stays behind."""
    cache = model.new_cache(max_tokens=max_tokens, max_sequences=max_sequences, max_step_tokens=max_step_tokens)
    collected = Collected(generate(model, cache, requests, **options))
    assert_released(cache)
    return collected


def assert_released(cache):
    assert cache.num_free_slots == cache.max_sequences
    assert cache.pages.num_free == cache.pages.num_pages


def test_no_requests():
    assert run(FakeModel(), []).final == {}


def test_greedy_chain_and_chunked_prefill():
    model = FakeModel()
    out = run(model, [Request(token_ids=[4] * 150 + [9], params=GREEDY)], max_step_tokens=64)
    assert model.steps == [[64], [64], [23]] + [[1]] * 11
    assert [run.logits_from for run in model.runs[:4]] == [150, 150, 150, 151]
    assert out.tokens[0, 0] == greedy_chain(model, 9, 12)
    assert out.final[0, 0].finish_reason == "length"


def test_decode_goes_first_and_prompts_fill_the_rest():
    model = FakeModel()
    prompts = [[4], [5] * 40, [6] * 30]
    run(model, [Request(token_ids=prompt, params=GREEDY) for prompt in prompts], max_step_tokens=32)
    # Half of the rest goes down the line, half to the prompts with the fewest tokens left.
    assert model.steps[:4] == [[1, 15, 16], [1, 17, 14], [1, 1, 8], [1, 1, 1]]


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 64])
@pytest.mark.parametrize("max_sequences", [1, 3])
def test_results_do_not_depend_on_packing(speculation, max_step_tokens, max_sequences):
    model = FakeModel()
    params = [SamplingParams(seed=i, max_tokens=3 + 4 * i, top_p=0.9) for i in range(5)]
    requests = [Request(token_ids=[4 + i] * (1 + 7 * i), params=params[i]) for i in range(5)]
    packed = run(model, requests, speculation=speculation, max_step_tokens=64, max_sequences=8)
    other = run(model, requests, speculation=speculation, max_step_tokens=max_step_tokens, max_sequences=max_sequences)
    if speculation is None or max_step_tokens == 64:
        assert other.tokens == packed.tokens
    else:  # fewer drafts fit the step: other random numbers are used, the lengths still hold
        assert other.final.keys() == packed.final.keys()


def test_n_samples_differ_and_are_reproducible():
    model = FakeModel()
    params = SamplingParams(n=3, seed=4, max_tokens=20, ignore_eos=True)
    out = run(model, [Request(token_ids=[5], params=params)])
    assert len({tuple(tokens) for tokens in out.tokens.values()}) == 3
    assert run(model, [Request(token_ids=[5], params=params)], max_sequences=2).tokens == out.tokens
    unseeded = SamplingParams(max_tokens=40, ignore_eos=True)
    twice = run(model, [Request(token_ids=[5], params=unseeded)] * 2)
    assert twice.tokens[0, 0] != twice.tokens[1, 0]


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
def test_eos_and_stop_ids(speculation):
    model = FakeModel(draft_noise=0.0)
    chain = greedy_chain(model, 9, 12)
    stop = chain[4]
    first = chain.index(stop)
    config = FakeConfig(eos_token_id=stop)
    by_eos = run(FakeModel(config, draft_noise=0.0), [Request(token_ids=[9], params=SamplingParams(temperature=0))],
                 speculation=speculation)  # fmt: skip
    assert by_eos.tokens[0, 0] == chain[: first + 1]
    assert (by_eos.final[0, 0].finish_reason, by_eos.final[0, 0].stop_reason) == ("stop", None)
    params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[stop])
    by_id = run(model, [Request(token_ids=[9], params=params)], speculation=speculation)
    assert by_id.tokens[0, 0] == chain[: first + 1]
    assert (by_id.final[0, 0].finish_reason, by_id.final[0, 0].stop_reason) == ("stop", stop)


def test_min_tokens_keeps_going():
    model = FakeModel(draft_noise=0.0)
    stop = greedy_chain(model, 9, 1)[0]
    params = SamplingParams(temperature=0, stop_token_ids=[stop], ignore_eos=True, min_tokens=6, max_tokens=30)
    for speculation in (None, Speculation()):
        tokens = run(model, [Request(token_ids=[9], params=params)], speculation=speculation).tokens[0, 0]
        assert stop not in tokens[:6]


def test_context_limit():
    model = FakeModel(FakeConfig(max_position_embeddings=20))
    out = run(model, [Request(token_ids=[5] * 15, params=SamplingParams(temperature=0, max_tokens=None,
                                                                        ignore_eos=True))])  # fmt: skip
    assert len(out.tokens[0, 0]) == 5
    assert out.final[0, 0].finish_reason == "length"
    assert len(run(model, [Request(token_ids=[5] * 19, params=GREEDY)]).tokens[0, 0]) == 1
    assert len(run(model, [Request(token_ids=[5] * 7, params=GREEDY)], max_length=10).tokens[0, 0]) == 3


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "at least one token"),
        ([4, 13], "got 13 at position 1"),
        ([-1], "got -1 at position 0"),
        ([4, "a"], "got 'a'"),
        ([True], "got True"),
        ([4] * 4096, "at most 4095 tokens .* got 4096"),
    ],
    ids=["empty", "beyond", "negative", "text", "bool", "long"],
)
def test_bad_prompts_are_refused_before_any_work(prompt, match):
    model = FakeModel()
    cache = model.new_cache(max_tokens=8192, max_sequences=2)
    with pytest.raises(PromptError, match=match):
        generate(model, cache, [Request(token_ids=[4]), Request(token_ids=prompt)])
    assert model.steps == []
    assert_released(cache)


def test_other_refusals():
    model = FakeModel(has_draft=False)
    cache = model.new_cache(max_tokens=256, max_sequences=2)
    with pytest.raises(CapacityError, match=r"301 tokens needed .* 256 fit"):
        generate(model, cache, [Request(token_ids=[4] * 300)])
    with pytest.raises(RequestError, match="draft stages"):
        generate(model, cache, [Request(token_ids=[4])], speculation=Speculation())
    with pytest.raises(RequestError, match="prefill"):
        generate(model, cache, [Request(token_ids=[4])], prefill="fast")
    with pytest.raises(SamplingError, match=r"stop_token_ids.* got 13"):
        generate(model, cache, [Request(token_ids=[4], params=SamplingParams(stop_token_ids=[13]))])
    with pytest.raises(SamplingError, match="without a tokenizer"):
        generate(model, cache, [Request(token_ids=[4], params=SamplingParams(stop="x"))])


JUNK = [
    None, True, 1, -1, 3.5, math.nan, math.inf, "x", b"x", [], [5], [1.5], ["a"], [True], [2**70], [5, 6], (5,), {},
    range(3), object(), GREEDY, Grammar, torch.zeros(()), torch.zeros(3),
    torch.full((3,), -1), torch.tensor([0, -1, 1]),
    torch.tensor([0, -7, 1]), torch.zeros(2, 1).bfloat16(), torch.zeros(2, 1), torch.zeros(2, 7).bfloat16(),
]  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(Request)])
def test_whatever_a_field_holds_is_refused_or_served(name):
    """No value may fail a step, which would end the others in it."""
    good = {"token_ids": [5, 6, 7], "params": GREEDY}
    images = {"token_types": torch.tensor([0, -1, 1]), "image_rows": torch.zeros(2, 1).bfloat16()}
    refused = 0
    for base in (good, good | images, good | images | {"cache_ids": [-5, 6, -7]}):
        for value in JUNK:
            model = FakeModel()
            core = EngineCore(model, model.new_cache(max_tokens=512, max_sequences=2))
            error = None
            try:
                core.add(Request(**(base | {name: value})))
            except LeadlineError as refusal:
                error = refusal
            if error is not None:
                refused += 1
                assert re.match(rf"(prompt|{name}|token_types|image_rows|cache_ids): .*expected", str(error))
                continue
            core.add(Request(**good))
            deltas = []
            while core.has_work:
                deltas += core.step()
            reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
            assert reasons in (["length", "length"], ["timeout", "length"]), (name, value)
    assert refused > len(JUNK)


def test_admission_by_pages():
    """Two pages hold one sequence of up to 256 tokens at a time, though slots are free. The last in line gives way."""
    model = FakeModel()
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    out = run(model, [Request(token_ids=[5] * 100, params=params)] * 3, max_tokens=256, max_step_tokens=128)
    assert {len(tokens) for tokens in out.tokens.values()} == {100}
    assert max(len(step) for step in model.steps) == 2
    assert sum(len(step) == 2 for step in model.steps) < 60


def test_closing_releases_everything():
    model = FakeModel()
    cache = model.new_cache(max_tokens=4096, max_sequences=4)
    deltas = generate(model, cache, [Request(token_ids=[5], params=GREEDY)] * 6, speculation=Speculation())
    for _ in range(5):
        next(deltas)
    assert cache.num_free_slots == 0
    deltas.close()
    assert_released(cache)


def test_a_failing_step_releases_everything():
    model = FakeModel()
    cache = model.new_cache(max_tokens=4096, max_sequences=4)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate(model, cache, [Request(token_ids=[5], params=GREEDY)] * 2, progress=interrupt))
    assert_released(cache)


def test_a_second_generation_finds_the_cache_taken():
    model = FakeModel()
    cache = model.new_cache(max_tokens=4096, max_sequences=1)
    first = generate(model, cache, [Request(token_ids=[5], params=GREEDY)])
    next(first)
    second = Collected(generate(model, cache, [Request(token_ids=[5], params=GREEDY)]))
    assert isinstance(second.final[0, 0].error, CapacityError)
    assert "0 of 1 slots can be had" in str(second.final[0, 0].error)
    first.close()
    assert_released(cache)


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
def test_broken_logits_end_only_their_request(speculation):
    """Two disjoint rings of tokens; a NaN follows token 7 of the first."""
    model = FakeModel(nan_after=7, draft_noise=0.0)
    for last, following in [(4, 5), (5, 6), (6, 7), (7, 8), (9, 10), (10, 11), (11, 9)]:
        model.table[last, following] = model.draft_table[last, following] = 50.0
    requests = [Request(token_ids=[token], params=GREEDY) for token in (9, 4, 10)]
    out = run(model, requests, speculation=speculation)
    assert out.tokens[1, 0] == [5, 6, 7][: len(out.tokens[1, 0])]
    assert out.final[1, 0].finish_reason == "error"
    assert isinstance(out.final[1, 0].error, NumericsError)
    for index, last in ((0, 9), (2, 10)):
        assert out.final[index, 0].finish_reason == "length"
        assert out.tokens[index, 0] == greedy_chain(model, last, 12)


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
def test_logprobs_are_those_of_the_raw_distribution(speculation):
    model = FakeModel()
    params = SamplingParams(seed=1, temperature=0.5, top_k=3, max_tokens=9, logprobs=2, ignore_eos=True)
    out = run(model, [Request(token_ids=[5], params=params)], speculation=speculation)
    raw_VV = model.table.double().log_softmax(dim=-1)
    previous = 5
    assert len(out.logprobs[0, 0]) == len(out.tokens[0, 0]) == 9
    for token, entries in zip(out.tokens[0, 0], out.logprobs[0, 0], strict=True):
        assert entries[0].token_id == token
        assert len(entries) in (2, 3)
        for entry in entries:
            assert entry.logprob == pytest.approx(float(raw_VV[previous, entry.token_id]), abs=LOGPROB_TOLERANCE)
        previous = token


def test_progress_counts_prompt_tokens():
    seen = []
    model = FakeModel()
    run(model, [Request(token_ids=[5] * 100, params=GREEDY), Request(token_ids=[5] * 50, params=GREEDY)],
        max_sequences=1, progress=lambda done, total: seen.append((done, total)))  # fmt: skip
    assert list(dict.fromkeys(seen)) == [(64, 150), (100, 150), (150, 150)]


def test_image_rows_go_with_their_chunk():
    types_T = torch.tensor([-1] * 3 + [0, 1, 1, 2, 3] + [-1] * 4 + [0, 1, 2, 3] + [-1])
    rows_ND = torch.arange(9).bfloat16()[:, None]
    request = Request(token_ids=[5] * 17, params=GREEDY, image_rows=rows_ND, token_types=types_T)
    model = FakeModel()
    run(model, [request], max_step_tokens=6)
    chunks = model.runs[:3]
    assert torch.equal(torch.cat([run.image_rows for run in chunks]), rows_ND)
    assert torch.equal(torch.cat([run.token_types for run in chunks]), types_T)
    assert all(len(run.image_rows) == int((run.token_types >= 0).sum()) for run in chunks)
    assert model.runs[3].image_rows is None


def text_model(answer, prompt="A"):
    """A model over bytes that answers `prompt` with `answer`, whose bytes must all differ."""
    tokenizer, config = byte_tokenizer()
    model = FakeModel(config, draft_noise=0.0)
    ids = tokenizer.encode(prompt + answer)
    assert len(set(ids)) == len(ids)
    for last, following in zip(ids, [*ids[1:], config.eos_token_id], strict=True):
        model.table[last, following] = 50.0
    model.draft_table = model.table.clone()
    return model, tokenizer, ids[: len(prompt)]


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, "bcdefgh\u20ac!", ("stop", None)),
        ({"stop": "ef"}, "bcd", ("stop", "ef")),
        ({"stop": ["ef", "cd"]}, "b", ("stop", "cd")),
        ({"stop": "ef", "include_stop_str_in_output": True}, "bcdef", ("stop", "ef")),
        ({"stop": "efx"}, "bcdefgh\u20ac!", ("stop", None)),
        ({"stop": "de", "min_tokens": 3}, "bcdefgh\u20ac!", ("stop", None)),
        ({"stop": "ef", "min_tokens": 3}, "bcd", ("stop", "ef")),
        ({"stop": "gh", "max_tokens": 6}, "bcdefg", ("length", None)),
        ({"max_tokens": 9}, "bcdefgh\ufffd", ("length", None)),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_text_and_stop_strings(speculation, options, text, reason):
    model, tokenizer, prompt = text_model("bcdefgh\u20ac!")
    params = SamplingParams(temperature=0, **options)
    out = run(model, [Request(token_ids=prompt, params=params)], tokenizer=tokenizer, speculation=speculation)
    assert out.text[0, 0] == text
    assert (out.final[0, 0].finish_reason, out.final[0, 0].stop_reason) == reason


def test_score():
    model = FakeModel()
    cache = model.new_cache(max_tokens=512, max_sequences=2, max_step_tokens=16)
    prompt = [int(i) for i in torch.randint(4, 13, (50,), generator=torch.Generator().manual_seed(0))]
    whole, single = score(model, cache, [prompt, [2]], top=1)
    raw_VV = model.table.double().log_softmax(dim=-1)
    assert whole[0] is None
    assert single == [None]
    for previous, token, entries in zip(prompt[:-1], prompt[1:], whole[1:], strict=True):
        assert entries[0].token_id == token
        assert entries[0].logprob == pytest.approx(float(raw_VV[previous, token]), abs=LOGPROB_TOLERANCE)
        assert entries[-1].rank == 1
    assert all(run.prefill == "full" for run in model.runs)
    assert_released(cache)
    with pytest.raises(PromptError):
        score(model, cache, [[]])
    with pytest.raises(NumericsError, match="position"):
        score(FakeModel(nan_after=prompt[20]), cache, [prompt])
    assert_released(cache)
    assert math.isfinite(whole[1][0].logprob)


class _Hostile(Matcher):
    """A grammar that gives up after some tokens, as a schema does that needs more work than is allowed."""

    is_free = False

    def __init__(self, vocab_size, left, error):
        self.vocab_size, self.left, self.error = vocab_size, left, error

    def mask(self):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return torch.ones(self.vocab_size, dtype=torch.bool)

    def advance(self, token_id):
        pass


class _Grammar(Grammar):
    def __init__(self, *of_matcher):
        self.of_matcher = of_matcher

    def matcher(self, in_reasoning):
        return _Hostile(*self.of_matcher)


@pytest.mark.parametrize("speculation", [None, Speculation()], ids=["plain", "drafts"])
@pytest.mark.parametrize("error", [RequestError("response_format: too much work"), ValueError("a bug")], ids=repr)
def test_whatever_fails_for_one_request_ends_that_one_alone(speculation, error):
    model = FakeModel()
    broken = Request(token_ids=[9], params=GREEDY, grammar=_Grammar(model.config.vocab_size, 3, error))
    out = run(model, [broken, Request(token_ids=[9], params=GREEDY)], speculation=speculation)
    assert out.tokens[0, 0] == greedy_chain(model, 9, 3)
    assert out.final[0, 0].finish_reason == "error"
    assert str(error) in str(out.final[0, 0].error)
    assert out.tokens[1, 0] == greedy_chain(model, 9, 12)


def test_drafts_behind_the_end_are_not_part_of_the_sequence():
    """The last token is not processed; accepted drafts behind a stop must not reach the prefix cache either."""
    model = FakeModel(draft_noise=0.0)
    chain = greedy_chain(model, 9, 12)
    stop = next(token for i, token in enumerate(chain) if i > 1 and token not in chain[:i])
    cache = model.new_cache(max_tokens=4096, max_sequences=1)
    core = EngineCore(model, cache, speculation=Speculation())
    core.add(Request(token_ids=[9], params=SamplingParams(temperature=0, max_tokens=99, stop_token_ids=(stop,))))
    lengths = []
    close = FakeSequence.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSequence, "close", lambda self: (lengths.append(self.length), close(self)))
        while core.has_work:
            core.step()
    assert lengths == [chain.index(stop) + 1]


def test_types_below_text_are_refused():
    rows = torch.zeros(2, 1, dtype=torch.bfloat16)
    with pytest.raises(RequestError, match="types from -1 on"):
        Request(token_ids=[4, 5], image_rows=rows, token_types=torch.tensor([-2, 0]))
