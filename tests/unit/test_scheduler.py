"""The scheduler against a naive twin and against what it promises, over many random histories."""

import random
from dataclasses import dataclass, field

import pytest

from leadline.engine.scheduler import Entry, Scheduler
from leadline.errors import QueueFullError

pytestmark = pytest.mark.unit

PAGE = 4  # tokens, so that pages are short soon


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Entry):
    pages: int = 0
    total: int = 0  # tokens at which it ends
    kept: int = 0  # what a prefix cache has of it
    all_cuts: tuple[int, ...] = ()
    waits_for: Entry | None = None  # its leader
    was_through: bool = False  # its prompt has been processed once


@dataclass
class Pool:
    """A cache of pages and slots; remembers part of what is evicted."""

    num_pages: int
    num_slots: int
    rng: random.Random
    free: int = field(init=False)
    slots: int = field(init=False)

    def __post_init__(self):
        self.free, self.slots = self.num_pages, self.num_slots

    def admit(self, job):
        need = -(-(job.target + 1) // PAGE)
        if not self.slots or need > self.free:
            return False
        self.slots -= 1
        self.free -= need
        job.pages = need
        job.computed = job.kept
        job.cuts = [cut for cut in job.all_cuts if job.kept < cut < job.target]
        return True

    def reserve(self, job, length):
        assert job.is_running
        more = max(0, -(-length // PAGE) - job.pages)
        if more > self.free:
            return False
        self.free -= more
        job.pages += more
        return True

    def evict(self, job):
        assert not job.is_running
        job.kept = self.rng.randrange(min(job.computed, job.target - 1) + 1)
        job.target = max(job.target, job.computed)
        job.computed = 0
        self.close(job)

    def close(self, job):
        if job.pages:
            self.free += job.pages
            self.slots += 1
            job.pages = 0


def shares(prompts, budget):
    """Token by token: half of the budget down the line, the rest to those with the fewest tokens left."""
    given = dict.fromkeys(prompts, 0)

    def room(job):
        end = min([cut for cut in job.cuts if cut > job.computed] + [job.target])
        return end - job.computed - given[job]

    for i in range(budget):
        open_ones = [job for job in prompts if room(job)]
        if not open_ones:
            break
        if i < budget - budget // 2:
            best = min(open_ones, key=lambda job: (job.priority, job.arrival))
        else:
            best = min(open_ones, key=lambda job: (job.priority, job.target - job.computed, job.arrival))
        given[best] += 1
    return {job: count for job, count in given.items() if count}


class World:
    """A scheduler, its host and everything that ever happened to them."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.budget = rng.choice([1, 3, 8, 40, 200])
        self.pool = Pool(rng.choice([4, 10, 40]), rng.choice([1, 3, 8]), rng)
        self.max_exact = 3 if self.pool.num_slots * 4 <= self.budget else 0
        self.max_waiting = rng.choice([None, 5, 40])
        self.scheduler = Scheduler(self.pool, max_step_tokens=self.budget, max_waiting=self.max_waiting)
        self.now = 0.0
        self.open = []  # all that have not ended
        self.arrivals = 0

    def add(self):
        rng, room = self.rng, self.pool.num_pages * PAGE
        total = min(room, rng.choice([2, 5, 12, 100]))
        target = rng.randrange(1, total)
        jobs = []
        for _ in range(rng.choice([1, 1, 1, 3])):
            jobs.append(
                Job(
                    arrival=self.arrivals,
                    target=target,
                    total=total,
                    priority=rng.choice([0, 0, 0, 1, 2]),
                    deadline=rng.choice([None, None, None, self.now + rng.randrange(30)]),
                    leader=jobs[0] if jobs else None,
                    waits_for=jobs[0] if jobs else None,
                    is_exact=rng.random() < 0.3,
                    all_cuts=tuple(sorted(rng.sample(range(1, 100), 3))),
                )
            )
            jobs[-1].priority, jobs[-1].deadline = jobs[0].priority, jobs[0].deadline
            self.arrivals += 1
        waiting = len(self.scheduler.waiting)
        if self.max_waiting is not None and waiting + len(jobs) > self.max_waiting:
            with pytest.raises(QueueFullError, match="queue"):
                self.scheduler.check_room(len(jobs))
            return
        self.scheduler.check_room(len(jobs))
        for job in jobs:
            self.scheduler.add(job)
        self.open += jobs

    def end(self, job):
        self.pool.close(job)
        self.scheduler.remove(job)
        self.scheduler.remove(job)  # a second time does nothing
        self.open.remove(job)

    def step(self):
        self.now += 1
        late = [job for job in self.open if job.deadline is not None and job.deadline <= self.now]
        expired = self.scheduler.expire(self.now)
        assert set(expired) == set(late)
        for job in expired:
            self.end(job)
        for job in self.scheduler.running:
            left = job.total - job.computed - 1
            job.drafts = max(0, min(left, self.max_exact if job.is_exact else self.rng.randrange(5)))
        before = list(self.scheduler.running)
        were_decoding = [job for job in before if job.is_decoding]
        plan = self.scheduler.schedule()
        self.check(plan, set(before), were_decoding)
        for job, drafts in plan.decode:
            job.computed += 1 + self.rng.randrange(drafts + 1)
            assert job.pages * PAGE >= job.computed
        for job, count in plan.prefill:
            job.computed += count
            job.was_through |= job.computed >= job.target
        for job in [job for job in self.open if job.is_running and job.computed >= job.total - 1]:
            self.end(job)

    def check(self, plan, were_running, were_decoding):
        scheduler, pool = self.scheduler, self.pool
        # Nobody is lost, twice in a line, or out of it.
        for line in (scheduler.waiting, scheduler.running):
            assert line == sorted(line, key=lambda job: (job.priority, job.arrival))
        assert sorted(scheduler.waiting + scheduler.running) == sorted(self.open)
        assert len(set(scheduler.waiting + scheduler.running)) == len(self.open)
        assert {job for job in self.open if job.is_running} == set(scheduler.running)
        assert pool.free + sum(job.pages for job in self.open) == pool.num_pages
        # The plan names each once, keeps to the budget, and its tokens have pages.
        jobs = [job for job, _ in plan.decode] + [job for job, _ in plan.prefill]
        assert len(set(jobs)) == len(jobs)
        assert set(jobs) <= set(scheduler.running)
        used = sum(1 + drafts for _, drafts in plan.decode) + sum(count for _, count in plan.prefill)
        assert used <= self.budget
        for job, drafts in plan.decode:
            assert job.is_decoding
            assert job.computed + 1 + drafts <= job.pages * PAGE
            assert drafts == job.drafts if job.is_exact else drafts <= job.drafts
        for job, count in plan.prefill:
            assert count > 0
            assert job.computed + count <= job.target < job.pages * PAGE
            assert not [cut for cut in job.cuts if job.computed < cut < job.computed + count]
            assert job.leader is None
        # Who was decoding goes on, unless the step is full of others that decode, or its pages were taken.
        decoding = [job for job, _ in plan.decode]
        for job in were_decoding:
            if job not in decoding and job.is_running:
                assert 1 + (job.drafts if job.is_exact else 0) > self.budget - sum(
                    1 + (j.drafts if j.is_exact else 0) for j in decoding
                )
        # Pages are taken from the last in line, for those before it.
        for job in plan.preempted:
            assert all(other < job for other in scheduler.running)
        for job in scheduler.running:
            assert job.waits_for is None or job.waits_for.was_through or job.waits_for.is_done
        # First come, first served among equals.
        for job in scheduler.waiting:
            if job.leader is None:
                assert all(other < job for other in scheduler.running if other not in were_running)
        # Nothing stands still: someone runs, and the first in line gets on unless answers fill the step.
        assert bool(scheduler.running) == bool(self.open)
        if self.open and sum(1 + drafts for _, drafts in plan.decode) < self.budget:
            assert scheduler.running[0] in jobs
        # What is left of the budget goes to prompts as the twin divides it.
        prompts = [job for job in scheduler.running if not job.is_decoding]
        rest = self.budget - sum(1 + drafts for _, drafts in plan.decode)
        assert dict(plan.prefill) == shares(prompts, rest)
        if prompts:  # drafts leave them half
            fixed = sum(1 + (drafts if job.is_exact else 0) for job, drafts in plan.decode)
            assert rest >= (self.budget - fixed) - (self.budget - fixed) // 2


@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed):
    world = World(seed)
    for _ in range(250):
        action = world.rng.random()
        if action < 0.25:
            world.add()
        elif action < 0.3 and world.open:
            world.end(world.rng.choice(world.open))
        else:
            world.step()
    steps = 0
    while world.open:
        world.step()
        steps += 1
        assert steps < 20_000, "no end"
    assert not world.scheduler.has_work
    assert (world.pool.free, world.pool.slots) == (world.pool.num_pages, world.pool.num_slots)


def scheduler_of(num_pages=1000, slots=8, budget=100, **options):
    pool = Pool(num_pages, slots, random.Random(0))
    return pool, Scheduler(pool, max_step_tokens=budget, **options)


def test_a_long_prompt_keeps_half_while_short_ones_pass_it():
    pool, scheduler = scheduler_of(num_pages=4000)
    long = Job(arrival=0, target=5000, total=5001)
    scheduler.add(long)
    for step in range(1, 40):
        short = Job(arrival=step, target=30, total=31)
        scheduler.add(short)
        plan = scheduler.schedule()
        assert dict(plan.prefill)[short] == 30, "a short prompt is through at once"
        assert dict(plan.prefill)[long] == 70
        for job, count in plan.prefill:
            job.computed += count
        pool.close(short)
        scheduler.remove(short)
    # However many come, half of every step is the long one's.
    for step in range(40, 47):
        scheduler.add(Job(arrival=step, target=1000, total=1001))
    long.computed = 0
    assert dict(scheduler.schedule().prefill)[long] >= 50


def test_short_prompts_do_not_pass_those_that_are_more_important():
    _, scheduler = scheduler_of()
    important, short = Job(arrival=1, target=500, total=501), Job(arrival=0, target=10, total=11, priority=1)
    scheduler.add(short)
    scheduler.add(important)
    assert scheduler.schedule().prefill == [(important, 100)]


def test_running_answers_are_not_held_up_by_prompts():
    _, scheduler = scheduler_of(slots=90)
    answers = [Job(arrival=i, target=1, total=1000) for i in range(80)]
    for job in answers:
        scheduler.add(job)
    scheduler.schedule()
    for job in answers:
        job.computed, job.drafts = 1, 4
    scheduler.add(Job(arrival=99, target=1500, total=1501, priority=-1))
    plan = scheduler.schedule()
    assert [job for job, _ in plan.decode] == answers
    assert sum(drafts for _, drafts in plan.decode) == 10, "drafts leave prompts half of the rest"
    assert [count for _, count in plan.prefill] == [10]


def test_pages_come_from_the_last_in_line():
    pool, scheduler = scheduler_of(num_pages=6)
    jobs = [Job(arrival=i, target=7, total=30, priority=priority) for i, priority in enumerate([1, 0, 0])]
    for job in jobs:
        scheduler.add(job)
    scheduler.schedule()
    for job in jobs:
        job.computed = 8
    plan = scheduler.schedule()
    assert plan.preempted == [jobs[0]], "the least important, although it came first"
    assert [job for job, _ in plan.decode] == [jobs[1], jobs[2]]
    assert pool.free == 0
    jobs[1].computed = jobs[2].computed = 12
    assert scheduler.schedule().preempted == [jobs[2]]
    assert scheduler.waiting == [jobs[2], jobs[0]]
    assert scheduler.num_preemptions == 2


def test_who_does_not_fit_holds_up_those_behind():
    _, scheduler = scheduler_of(num_pages=10)
    first, large, small = (Job(arrival=i, target=target, total=target + 1) for i, target in enumerate([20, 30, 1]))
    for job in (first, large, small):
        scheduler.add(job)
    scheduler.schedule()
    assert scheduler.waiting == [large, small]


def test_deadlines_free_pages_before_the_step():
    """What the late one held is there for those who go on: nobody is preempted for it."""
    pool, scheduler = scheduler_of(num_pages=4)
    stays, late = Job(arrival=0, target=7, total=16), Job(arrival=1, target=7, total=16, deadline=5.0)
    for job in (stays, late):
        scheduler.add(job)
    scheduler.schedule()
    stays.computed = late.computed = 8
    assert scheduler.expire(4.9) == []
    assert scheduler.expire(5.0) == [late]
    pool.close(late)
    plan = scheduler.schedule()
    assert [job for job, _ in plan.decode] == [stays]
    assert plan.preempted == []


def test_the_queue_has_an_end():
    _, scheduler = scheduler_of(slots=1, max_waiting=2)
    for i in range(2):
        scheduler.check_room(1)
        scheduler.add(Job(arrival=i, target=5, total=9))
    with pytest.raises(QueueFullError, match="2 sequences wait and 1 more") as caught:
        scheduler.check_room(1)
    assert caught.value.retry_after is not None
    scheduler.schedule()  # one runs now
    scheduler.check_room(1)
    with pytest.raises(QueueFullError):
        scheduler.check_room(2)
