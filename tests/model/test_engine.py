"""The engine on small complete models: what a request becomes does not depend on how it is served. Caches are poisoned.

"Alone" is a request in an engine of its own: nothing cached, no drafts, one chunk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from leadline.cache.pages import PAGE_TOKENS
from leadline.cache.pool import KVCache
from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Delta, Request
from leadline.engine.speculate import Speculation
from leadline.errors import CapacityError, EngineError, NumericsError
from leadline.model.model import Model
from leadline.model.step import TEXT, Prefill, Run
from leadline.text.grammar import Grammar, Matcher
from tests.model.driver import Tokens as Prompt
from tests.model.driver import load, one_shot, text, with_image
from tests.model.random_models import Shape, model_of

pytestmark = pytest.mark.tiny

ADAPTIVE = Speculation(adaptive=True)
MANY = 10**9  # bytes: more than any test fills


class Server:
    """An engine and its cache. Keyword arguments beyond these are the engine's."""

    def __init__(
        self,
        model: str | Model = "everything",
        *,
        pages: int = 64,
        sequences: int = 8,
        chunk: int = 256,
        max_snapshots: int = 8,
        **options: Any,
    ) -> None:
        self.model = load(model) if isinstance(model, str) else model
        self.cache = KVCache(
            self.model.config,
            self.model.plan,
            max_tokens=pages * PAGE_TOKENS,
            max_sequences=sequences,
            max_step_tokens=chunk,
            max_snapshots=max_snapshots,
            poison=True,
        )
        self.core = EngineCore(self.model, self.cache, max_snapshots=max_snapshots, **options)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.final: dict[tuple[int, int], Delta] = {}

    def add(self, request: Request) -> int:
        ticket = self.core.add(request)
        for sample in range(request.params.n):
            self.tokens[ticket, sample] = []
        return ticket

    def step(self) -> None:
        with torch.inference_mode():
            deltas = self.core.step()
        for delta in deltas:
            key = (delta.request, delta.sample)
            assert key not in self.final, "a delta after the last one"
            self.tokens[key] += delta.token_ids
            if delta.finish_reason is not None:
                self.final[key] = delta

    def finish(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def serve(self, *requests: Request, stagger: int = 0) -> list[list[int]]:
        """The tokens of the first sample of each; `stagger` steps between two arrivals."""
        tickets = []
        for request in requests:
            tickets.append(self.add(request))
            for _ in range(stagger):
                self.step()
        self.finish()
        return [self.tokens[ticket, 0] for ticket in tickets]

    def cached(self) -> int:
        """Cached tokens of the request that ended last."""
        return list(self.final.values())[-1].cached_tokens

    def assert_nothing_is_left(self) -> None:
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.slots_used, stats.kv_pages_used, stats.window_pages_used) == (
            0,
        ) * 5
        if self.core.prefix is not None:
            self.core.prefix.clear()
        assert self.cache.num_free_slots == self.cache.max_sequences
        for pages in (self.cache.pages, self.cache.window_pages):
            assert pages.num_free == pages.num_pages
            assert pages.num_idle == 0


def ids_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = text(load("everything"), length, seed).ids.tolist()
    return ids


def greedy(ids: Sequence[int], count: int = 6, **fields: Any) -> Request:
    return Request(token_ids=ids, params=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), **fields)


def seeded(ids: Sequence[int], seed: int, count: int = 12) -> Request:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=count, ignore_eos=True)
    return Request(token_ids=ids, params=params)


def alone(request: Request, name: str = "everything", prefill: Prefill = "halo") -> list[int]:
    return list(_alone(tuple(request.token_ids), request.params, name, prefill))


@lru_cache(maxsize=256)
def _alone(ids: tuple[int, ...], params: SamplingParams, name: str, prefill: Prefill) -> list[int]:
    server = Server(name, pages=8, sequences=1, chunk=1024, max_snapshots=0, prefill=prefill)
    return server.serve(Request(token_ids=list(ids), params=params))[0]


@pytest.mark.parametrize("prefill", ["halo", "full"])
def test_alone_is_what_whole_forwards_give(prefill: Prefill) -> None:
    model, ids = load("everything"), ids_of(150)
    for token in alone(greedy(ids, 4), prefill=prefill):
        assert token == int(one_shot(model, Prompt(torch.tensor(ids)))[-1].argmax())
        ids.append(token)


# One prompt, served in many ways --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "stagger"), [(21, 0), (140, 1)])
def test_f10_many_copies_of_one_prompt(length: int, stagger: int) -> None:
    """All at once nobody can use what another has computed; staggered most of them start from a hit."""
    request = greedy(ids_of(length), 6)
    server = Server("everything", pages=128, sequences=64, chunk=512)
    assert server.serve(*[request] * 64, stagger=stagger) == [alone(request)] * 64
    assert (server.core.stats().cached_tokens > 0) == (length > PAGE_TOKENS)
    server.assert_nothing_is_left()


WAYS: dict[str, dict[str, Any]] = {
    "chunks of 23": {"chunk": 23},
    "chunks of 100": {"chunk": 100},
    "no prefix cache": {"max_snapshots": 0},
    "drafts": {"speculation": Speculation()},
    "two drafts": {"speculation": Speculation(max_drafts=2)},
    "adaptive drafts": {"speculation": ADAPTIVE},
    "adaptive drafts, confidence": {"speculation": Speculation(adaptive=True, min_confidence=0.4)},
    "one snapshot": {"max_snapshots": 1},
    "host tier": {"pages": 8, "max_snapshots": 1, "host_bytes": MANY},
    "few slots": {"sequences": 2},
}


@pytest.mark.parametrize(
    ("way", "prefill"),
    [*((way, "halo") for way in WAYS), *((way, mode) for way in list(WAYS)[1:5:2] for mode in ("replay", "full"))],
)
def test_same_tokens_however_they_are_served(way: str, prefill: Prefill) -> None:
    """Cold with neighbours, then each again as a hit."""
    requests = [greedy(ids_of(length, seed), 7) for seed, length in enumerate([257, 60, 3, 150])]
    expected = [alone(request, prefill=prefill) for request in requests]
    server = Server(**WAYS[way], prefill=prefill)
    assert server.serve(*requests) == expected
    assert server.serve(*requests[::-1]) == expected[::-1]
    server.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("prefill", "speculation", "max_snapshots"),
    [
        ("halo", None, 0),
        ("halo", None, 8),
        ("halo", Speculation(), 8),
        ("halo", ADAPTIVE, 0),
        ("halo", ADAPTIVE, 8),
        ("replay", None, 8),
        ("replay", Speculation(), 8),
        ("full", ADAPTIVE, 8),
    ],
)
def test_same_tokens_after_preemption(prefill: Prefill, speculation: Speculation | None, max_snapshots: int) -> None:
    """Each prompt fills two pages, and each answer needs a third one."""
    requests = [greedy(ids_of(252 + seed, seed), 10) for seed in range(3)]
    server = Server(pages=7, max_snapshots=max_snapshots, prefill=prefill, speculation=speculation)
    assert server.serve(*requests) == [alone(request, prefill=prefill) for request in requests]
    assert server.core.stats().preemptions > 0
    server.assert_nothing_is_left()


def test_window_of_a_whole_page() -> None:
    """Here the window is as long as a page, as in the released model."""
    requests = [greedy(ids_of(length, seed) + [5] * 3, 9) for seed, length in enumerate([251, 252, 130])]
    expected = [alone(request, "released_head_sizes") for request in requests]
    server = Server("released_head_sizes", pages=6, chunk=50, host_bytes=MANY)
    assert server.serve(*requests) == expected
    assert server.serve(*requests) == expected
    assert server.core.stats().preemptions > 0
    server.assert_nothing_is_left()


class _InTurn(Matcher):
    """Allows these ids in turn, and drafts at any time."""

    is_free = True

    def __init__(self, vocab_size: int, turns: list[list[int]]) -> None:
        self.vocab_size, self.turns, self.count = vocab_size, turns, 0

    def mask(self) -> torch.Tensor:
        mask_V = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask_V[self.turns[self.count % len(self.turns)]] = True
        return mask_V

    def advance(self, token_id: int) -> None:
        assert token_id in self.turns[self.count % len(self.turns)]
        self.count += 1


class _TurnGrammar(Grammar):
    def __init__(self, *of_matcher: Any) -> None:
        self.of_matcher = of_matcher

    def matcher(self, in_reasoning: bool) -> Matcher:
        return _InTurn(*self.of_matcher)


def test_drafts_under_a_mask_change_no_token() -> None:
    """The drafter knows nothing of the mask: what it forbids is rejected, what stays is what comes without drafts."""
    loud = 6  # of so few tokens to choose from, drafts hit the right one by chance
    model = model_of(
        Shape("2", False, engram=(), targets=(0,), window=16, topk=12, experts=1, seed=1, loud_tokens=loud)
    )
    turns = [[0, 2, 3, 4], [1, 3, 5], [0, 1, 2, 4, 5]]
    request = greedy([0, 40, 41, 42], 150, grammar=_TurnGrammar(model.config.vocab_size, turns))
    plain = Server(model).serve(request)
    assert len(set(plain[0])) > 2
    assert plain != Server(model).serve(replace(request, grammar=None))
    server = Server(model, speculation=Speculation())
    assert server.serve(request, request) == plain * 2
    stats = server.core.stats()
    assert 20 < stats.accepted < stats.drafted
    server.assert_nothing_is_left()


@pytest.mark.parametrize("speculation", [None, ADAPTIVE], ids=["plain", "adaptive"])
def test_seeded_samples_depend_on_nothing_else(speculation: Speculation | None) -> None:
    """Alone, among others that come and go, as a hit, and after a preemption, with the same drafts on."""
    requests = [seeded(ids_of(252 + seed, seed), seed, 10) for seed in range(3)]
    options: dict[str, Any] = {"speculation": speculation, "sequences": 4, "chunk": 130}
    expected = [Server(**options).serve(request)[0] for request in requests]
    assert len({tuple(tokens) for tokens in expected}) == 3
    many = Server(**options)
    others = [greedy(ids_of(30 + i, 50 + i), 3 + 2 * i) for i in range(3)]
    assert many.serve(*others, *requests, stagger=2)[3:] == expected
    assert many.serve(*requests) == expected
    assert many.cached() > 0
    few = Server(pages=7, **options)
    assert few.serve(*requests) == expected
    assert few.core.stats().preemptions > 0
    for server in (many, few):
        server.assert_nothing_is_left()


@pytest.mark.parametrize("length", [60, 200])
@pytest.mark.parametrize("max_snapshots", [0, 8])
def test_samples_of_one_request(length: int, max_snapshots: int) -> None:
    """The others wait for the first one's prompt. Each sample is what it would be alone."""
    params = SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=10, ignore_eos=True)
    request = Request(token_ids=ids_of(length), params=params)
    server = Server(max_snapshots=max_snapshots)
    ticket = server.add(request)
    server.finish()
    samples = [server.tokens[ticket, sample] for sample in range(4)]
    assert samples[0] == alone(Request(token_ids=ids_of(length), params=replace(params, n=1)))
    assert len({tuple(tokens) for tokens in samples}) == 4
    crowded = Server(pages=4, sequences=2, chunk=50, max_snapshots=max_snapshots)
    ticket = crowded.add(request)
    crowded.finish()
    assert [crowded.tokens[ticket, sample] for sample in range(4)] == samples
    if max_snapshots and length > PAGE_TOKENS:
        assert [server.final[0, s].cached_tokens for s in range(4)] == [0] + [PAGE_TOKENS] * 3
    crowded.assert_nothing_is_left()


# Hits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "prefill"),
    [
        *((length, "halo") for length in (127, 128, 129, 255, 256, 257, 301)),
        *((length, "replay") for length in (143, 144, 256, 257)),
        (256, "full"),
    ],
)
def test_hits_at_borders_and_odd_lengths(length: int, prefill: Prefill) -> None:
    request = greedy(ids_of(length))
    server = Server(prefill=prefill)
    expected = [alone(request, prefill=prefill)]
    assert server.serve(request) == expected
    assert server.cached() == 0
    assert server.serve(request) == expected
    last = server.cache.window if prefill == "replay" else 1
    assert server.cached() == (length - last) // PAGE_TOKENS * PAGE_TOKENS
    assert server.serve(replace(request, use_cache=False)) == expected
    assert server.cached() == 0


def test_prompts_that_part_from_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter one, a second and a third branch, and one that leaves a long prompt where a chunk ended."""
    server = Server()
    long = ids_of(400)
    branches = [long[:300] + ids_of(100, seed) for seed in (1, 2)]
    for prompt, pages in ((long[:265], 0), (long[:258], 2), (long, 2)):
        assert server.serve(greedy(prompt)) == [alone(greedy(prompt))]
        assert server.cached() == pages * PAGE_TOKENS
    server.core.prefix.clear()  # type: ignore[union-attr]
    for prompt, pages in ((long, 0), (branches[0], 0), (branches[1], 2)):
        assert server.serve(greedy(prompt)) == [alone(greedy(prompt))]
        assert server.cached() == pages * PAGE_TOKENS
    server.core.prefix.clear()  # type: ignore[union-attr]
    monkeypatch.setattr("leadline.engine.room.SNAPSHOT_TOKENS", PAGE_TOKENS)
    for prompt, pages in ((long, 0), (branches[0], 2)):
        assert server.serve(greedy(prompt)) == [alone(greedy(prompt))]
        assert server.cached() == pages * PAGE_TOKENS
    server.assert_nothing_is_left()


@pytest.mark.parametrize("name", ["released_head_sizes", "everything"])
def test_f11_a_hit_after_others_used_every_page(name: str) -> None:
    first = greedy(ids_of(300, 1))
    server = Server(name, pages=9, chunk=100)
    expected = alone(first, name)
    assert server.serve(first) == [expected]
    server.serve(greedy(ids_of(900, 2), 2))
    assert server.serve(first) == [expected]
    assert server.serve(first) == [expected]
    assert server.cached() == 2 * PAGE_TOKENS


def test_f12_preempted_after_any_number_of_tokens() -> None:
    """Taken off its pages at some point of its answer, with an open group or without one, and resumed."""
    request = greedy(ids_of(131), 8)
    expected = alone(request)
    for after in (1, 2, 3, 6):
        server = Server()
        server.add(request)
        for _ in range(after):
            server.step()
        scheduler = server.core._scheduler
        (job,) = scheduler.running
        scheduler.running.clear()
        job.is_running = False
        server.core._room.evict(job)
        scheduler.waiting.append(job)
        server.finish()
        assert server.tokens[0, 0] == expected
        server.assert_nothing_is_left()


def test_f14_a_short_prompt_sent_twice() -> None:
    request = greedy(ids_of(1000))
    server = Server()
    first = server.serve(request)
    assert server.serve(request) == first == [alone(request)]
    assert server.cached() == 7 * PAGE_TOKENS


@pytest.mark.parametrize("host_bytes", [0, MANY])
def test_two_sessions_take_turns(host_bytes: int) -> None:
    """Two conversations that just fit, or do with host memory: each turn starts from all whole pages of the last."""
    server = Server("draft", pages=16 if not host_bytes else 9, max_snapshots=4, host_bytes=host_bytes)
    talks = [ids_of(200, 1), ids_of(330, 2)]
    known, possible, got = [0, 0], 0, 0
    for turn in range(16):
        who = turn % 2
        (answer,) = server.serve(greedy(talks[who], 7))
        got += server.cached()
        possible += known[who] // PAGE_TOKENS * PAGE_TOKENS
        known[who] = len(talks[who]) + len(answer) - 1  # the last token is not processed
        if turn > 13:
            assert answer == alone(greedy(talks[who], 7), "draft")
        talks[who] = talks[who] + answer + ids_of(40, 100 + turn)
    assert got >= 0.99 * possible > 0
    server.assert_nothing_is_left()


def test_f32_agents_with_a_long_shared_prefix_wait_for_their_own_tokens_only() -> None:
    """Eight at once, two turns, while another answer runs: their first tokens come after the steps that the tokens not
    shared need, and the running answer gets one in every step."""
    chunk, shared, own = 128, ids_of(6 * PAGE_TOKENS, 1), 50
    server = Server(pages=96, sequences=9, chunk=chunk, max_snapshots=24)
    runner = server.add(greedy(ids_of(20, 2), 200))
    server.step()

    def turn(prompts: list[list[int]]) -> list[list[int]]:
        """The answers of prompts that arrive together."""
        tickets, steps = [server.add(greedy(prompt, 4)) for prompt in prompts], 0
        before = len(server.tokens[runner, 0])
        while not all(server.tokens[ticket, 0] for ticket in tickets):
            server.step()
            steps += 1
        assert len(server.tokens[runner, 0]) - before == steps
        while not all((ticket, 0) in server.final for ticket in tickets):
            server.step()
        unshared = sum(len(p) - server.final[t, 0].cached_tokens for p, t in zip(prompts, tickets, strict=True))
        assert unshared < (own + 2 * PAGE_TOKENS) * len(prompts) or len(prompts) == 1
        assert steps <= -(-unshared // (chunk - len(prompts))) + 1  # less a token for each answer that runs
        return [server.tokens[ticket, 0] for ticket in tickets]

    turn([shared + ids_of(3, 3)])
    talks = [shared + ids_of(own, 10 + agent) for agent in range(8)]
    for number in range(2):
        answers = turn(talks)
        talks = [talk + answer + ids_of(own, 50 + number) for talk, answer in zip(talks, answers, strict=True)]
    server.finish()
    assert server.tokens[runner, 0] == alone(greedy(ids_of(20, 2), 200))
    server.assert_nothing_is_left()


def test_f17_host_memory_is_full_and_a_prompt_takes_several_chunks() -> None:
    probe = Server()
    assert probe.core.prefix is not None
    room = 3 * probe.core.prefix.pages.bytes.num_bytes + 2 * probe.core.prefix.windows.bytes.num_bytes
    server = Server(pages=8, chunk=100, max_snapshots=2, host_bytes=room)
    for seed in range(4):
        server.serve(greedy(ids_of(400, seed), 2))
    stats = server.core.stats()
    assert 0 < stats.host_bytes <= room
    for seed in (9, 0, 3, 9):
        request = greedy(ids_of(900, seed) if seed == 9 else ids_of(400, seed), 5)
        assert server.serve(request) == [alone(request)]
    server.assert_nothing_is_left()


def test_images_are_cached_by_content_and_survive_preemption() -> None:
    name = "everything"
    prompt = with_image(name, tail=253 - len(with_image(name, tail=0)))
    types, rows = prompt.types, prompt.rows
    assert types is not None
    assert rows is not None
    place = torch.arange(len(prompt))

    def request(content: int) -> Request:
        cache_ids = torch.where(types == TEXT, prompt.ids, -(place + 10_000 * content)).tolist()
        image = rows if content == 1 else rows.flip(0)
        return greedy(prompt.ids.tolist(), 8, image_rows=image, token_types=types, cache_ids=cache_ids)

    cold = {}
    for content in (1, 2):
        (cold[content],) = Server(name, chunk=1024, max_snapshots=0).serve(request(content))
    assert cold[1] != cold[2]
    server = Server(name, chunk=30)
    for content, cached in ((1, 0), (2, 0), (1, PAGE_TOKENS), (2, PAGE_TOKENS)):
        assert server.serve(request(content)) == [cold[content]]
        assert server.cached() == cached
    few = Server(name, pages=5)
    assert few.serve(request(1), request(2)) == [cold[1], cold[2]]
    assert few.core.stats().preemptions > 0
    for each in (server, few):
        each.assert_nothing_is_left()


# Failures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", [None, ADAPTIVE], ids=["plain", "adaptive"])
@pytest.mark.parametrize("when", [0, 3])
def test_f16_a_nan_row_ends_its_own_request(speculation: Speculation | None, when: int) -> None:
    """Rows of one sequence are overwritten with NaN, in its prompt or in its answer."""
    requests = [greedy(ids_of(150, seed), 10) for seed in range(3)]
    server = Server(speculation=speculation, chunk=300)
    for request in requests:
        server.add(request)
    while not server.tokens[1, 0] and when:
        server.step()
    for _ in range(max(1, when)):
        server.step()
    job = next(job for job in server.core._scheduler.running if job.ticket == 1)
    for plane, pages in (
        *((plane, job.sequence.pages) for plane in server.cache.page_planes()),
        *((plane, job.sequence.window_pages[-2:]) for plane in server.cache.window_planes()),
    ):
        for page in pages:
            if page >= 0:
                plane.tensor[page * plane.rows_per_page : (page + 1) * plane.rows_per_page] = 0xFF
    server.finish()
    assert server.final[1, 0].finish_reason == "error"
    assert isinstance(server.final[1, 0].error, NumericsError)
    assert server.core.stats().numerics_errors == 1
    for ticket in (0, 2):
        assert server.tokens[ticket, 0] == alone(requests[ticket])
    assert server.serve(*requests) == [alone(request) for request in requests]
    server.assert_nothing_is_left()


class Unsteady:
    """The model, whose steps fail now and then: before anything has happened, or when all of it has."""

    def __init__(self, model: Model, rng: random.Random, rate: float) -> None:
        self._model, self._rng, self._rate = model, rng, rate
        self.config, self.plan, self.has_draft, self.draft = model.config, model.plan, model.has_draft, model.draft

    def step(self, runs: list[Run], cache: KVCache) -> Any:
        fails = self._rng.random() < self._rate
        if fails and self._rng.random() < 0.5:
            raise RuntimeError("device lost")
        output = self._model.step(runs, cache)
        if fails:
            raise CapacityError("no room")
        return output


@pytest.mark.parametrize(
    ("name", "failures", "options"),
    [
        ("swa", 0.06, {"max_snapshots": 0}),
        ("draft", 0.0, {"speculation": ADAPTIVE, "max_snapshots": 2}),
        ("everything", 0.06, {"host_bytes": 300_000, "max_snapshots": 2, "speculation": Speculation()}),
    ],
)
def test_requests_come_and_go_at_any_moment(name: str, failures: float, options: dict[str, Any]) -> None:
    """Who is not cancelled, failed or late gives the tokens it gives alone, and nothing is left of anyone."""
    rng = random.Random(f"{name} {failures}")
    now = [0.0]
    model: Any = Unsteady(load(name), rng, failures)
    server = Server(model, pages=9, sequences=5, chunk=90, clock=lambda: now[0], **options)
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    for _ in range(120):
        action = rng.random()
        if action < 0.2:
            shared = ids_of(256, 1)[: rng.choice([0, 0, 128, 140, 256])]
            ids = shared + ids_of(rng.choice([1, 5, 60, 127]), 2)
            timeout = rng.choice([None, None, None, 5.0, 60.0])
            request = greedy(ids, rng.choice([1, 4, 8]), priority=rng.choice([0, 0, 1]), timeout=timeout)
            requests[server.add(replace(request, params=replace(request.params, n=rng.choice([1, 1, 1, 3]))))] = request
        elif action < 0.26 and requests:
            ticket = rng.choice(list(requests))
            server.core.cancel(ticket)
            if any((ticket, sample) in server.tokens and (ticket, sample) not in server.final for sample in range(3)):
                cancelled.add(ticket)
        else:
            now[0] += 1.0
            server.step()
    server.finish()
    reasons = {"length": 0, "timeout": 0, "error": 0}
    for (ticket, _), final in server.final.items():
        assert final.finish_reason is not None
        reasons[final.finish_reason] += 1
        if final.finish_reason == "length":
            assert server.tokens[final.request, final.sample] == alone(requests[ticket], name)
        else:
            assert isinstance(final.error, EngineError | CapacityError)
    assert reasons["length"] > 0
    assert (reasons["error"] > 0) == (failures > 0)
    ended = {ticket for ticket, _ in server.final}
    assert ended | cancelled == set(requests)
    server.assert_nothing_is_left()


def test_pages_of_a_cancelled_request_are_free_at_once() -> None:
    server = Server(max_snapshots=0)
    ticket = server.add(greedy(ids_of(300)))
    server.step()
    assert server.core.stats().kv_pages_used == 3
    server.core.cancel(ticket)
    server.core.cancel(ticket)
    server.core.cancel(77)
    server.assert_nothing_is_left()
    assert not server.core.has_work


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    now = [0.0]
    server = Server(sequences=1, clock=lambda: now[0])
    for timeout in (5.0, 6.0, None):
        server.add(greedy(ids_of(150), timeout=timeout))
    server.step()
    now[0] = 7.0
    server.step()
    for ticket in (0, 1):
        assert server.final[ticket, 0].finish_reason == "timeout"
        assert isinstance(server.final[ticket, 0].error, EngineError)
    server.finish()
    assert server.tokens[2, 0] == alone(greedy(ids_of(150)))
    assert server.cached() == PAGE_TOKENS
    server.assert_nothing_is_left()


def test_who_does_not_fit_comes_in_as_soon_as_the_pages_are_shared() -> None:
    """The second waits for pages; once the first has processed the same prompt it needs fewer than are left."""
    server = Server(pages=5, chunk=512)
    first, second = (server.add(greedy(ids_of(300), 60)) for _ in range(2))
    server.step()
    assert (server.core.stats().running, server.core.stats().waiting) == (1, 1)
    assert server.core.stats().kv_pages_used == 3  # of 5, as many as one of them needs
    server.step()
    assert server.core.stats().running == 2
    server.finish()
    assert server.cached() == 256
    assert server.tokens[first, 0] == server.tokens[second, 0] == alone(greedy(ids_of(300), 60))
    server.assert_nothing_is_left()


def test_someone_else_holds_the_cache() -> None:
    """Nobody will ever free what is needed: an error says so, where waiting would be for ever."""
    server = Server(pages=4, sequences=2)
    other = server.cache.open()
    other.reserve_pages(3 * PAGE_TOKENS)
    server.add(greedy(ids_of(140)))
    server.finish(max_steps=5)
    assert isinstance(server.final[0, 0].error, CapacityError)
    other.close()
    assert server.serve(greedy(ids_of(140))) == [alone(greedy(ids_of(140)))]
    server.assert_nothing_is_left()
