"""The engine's thread and the streams of its requests, on the fake model."""

import asyncio
import random
import threading
import time
from contextlib import asynccontextmanager

import pytest

from leadline.config.sampling import SamplingParams
from leadline.engine.core import EngineCore
from leadline.engine.request import Request
from leadline.engine.thread import AsyncEngine
from leadline.errors import EngineError, PromptError, QueueFullError, RequestError, SamplingError
from leadline.model.step import Run
from tests.support.fake_model import FakeModel

pytestmark = pytest.mark.unit

SOON = 20.0  # seconds that nothing here takes unless it hangs
LONG = 3000  # tokens of an answer that nobody waits for


class Model(FakeModel):
    """Steps wait for `gate`; `broken` is raised by the next one. `pace`: seconds of a step."""

    def __init__(self, pace: float = 0.0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.broken: BaseException | None = None
        self.pace = pace

    def step(self, runs: list[Run], cache):
        assert self.gate.wait(SOON)
        if self.pace:
            time.sleep(self.pace)
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        return FakeModel.step(self, runs, cache)


class Setup:
    def __init__(self, pace: float = 0.0, **options) -> None:
        self.model = Model(pace)
        self.cache = self.model.new_cache(max_tokens=16384, max_sequences=4, max_step_tokens=64)
        self.core = EngineCore(self.model, self.cache, **options)
        self.engine = AsyncEngine(self.core)

    def assert_nothing_is_left(self) -> None:
        assert self.cache.num_free_slots == self.cache.max_sequences
        assert self.cache.pages.num_free == self.cache.pages.num_pages
        assert not self.core.has_work
        assert self.engine._streams == {}
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.slots_used, stats.kv_pages_used) == (0, 0, 0, 0)


def request(count: int = 10, last: int = 5, **options) -> Request:
    params = {"temperature": 0, "max_tokens": count, "ignore_eos": True} | options
    return Request(token_ids=[4, last], params=SamplingParams(**params))


def chain(model: FakeModel, count: int, last: int = 5) -> list[int]:
    tokens = []
    for _ in range(count):
        last = int(model.table[last].argmax())
        tokens.append(last)
    return tokens


async def read(stream, sample: int = 0) -> list[int]:
    return [t async for deltas in stream for delta in deltas if delta.sample == sample for t in delta.token_ids]


@asynccontextmanager
async def running(setup: Setup):
    setup.engine.start()
    try:
        yield setup.engine
    finally:
        await setup.engine.stop(drain_s=0.0)


def in_time(work) -> None:
    asyncio.run(asyncio.wait_for(work, SOON))


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_streams_give_what_the_core_gives() -> None:
    setup = Setup()

    async def work() -> None:
        async with running(setup) as engine:
            streams = [await engine.submit(request(20, last)) for last in range(4, 12)]
            results = await asyncio.gather(*map(read, streams))
            assert results == [chain(setup.model, 20, last) for last in range(4, 12)]
            both = await engine.submit(request(7, n=2))
            assert await read(both, 1) == chain(setup.model, 7)
            both.cancel()  # after its end it means nothing
            assert engine.stats().finished == {"length": 10}
            assert engine.error is None

    in_time(work())
    setup.assert_nothing_is_left()


def test_cancel_frees_everything_within_a_step_and_ends_the_stream() -> None:
    setup = Setup(pace=0.001)

    async def work() -> None:
        async with running(setup) as engine:
            stream = await engine.submit(request(LONG))
            reader = asyncio.create_task(read(stream))
            await until(lambda: engine.stats().generation_tokens > 3)
            stream.cancel()
            stream.cancel()
            assert 0 < len(await reader) < LONG, "a reader that waits is woken"
            await until(lambda: engine.stats().slots_used == 0)
            assert [deltas async for deltas in stream] == []
            assert engine.stats().finished == {"cancelled": 1}

    in_time(work())
    setup.assert_nothing_is_left()


def test_cancel_while_the_reader_waits_for_its_first_token() -> None:
    setup = Setup()

    async def work() -> None:
        async with running(setup) as engine:
            setup.model.gate.clear()
            stream = await engine.submit(request())
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0.01)
            stream.cancel()
            assert await reader == []
            setup.model.gate.set()

    in_time(work())
    setup.assert_nothing_is_left()


def test_leaving_the_block_or_the_loop_cancels() -> None:
    setup = Setup(pace=0.001)

    async def work() -> None:
        async with running(setup) as engine:
            async with await engine.submit(request(LONG)):
                pass
            stream = await engine.submit(request(LONG))
            deltas = aiter(stream)
            await anext(deltas)
            await deltas.aclose()
            assert not stream.is_open
            reader = asyncio.create_task(read(await engine.submit(request(LONG))))
            await asyncio.sleep(0.02)
            reader.cancel()  # what a disconnect does to a handler
            with pytest.raises(asyncio.CancelledError):
                await reader
            await until(lambda: engine.stats().slots_used == 0)
            assert engine.stats().finished["cancelled"] == 3

    in_time(work())
    setup.assert_nothing_is_left()


def test_submit_given_up_before_the_engine_answers() -> None:
    setup = Setup()

    async def work() -> None:
        async with running(setup) as engine:
            setup.model.gate.clear()
            first = await engine.submit(request())
            await until(lambda: engine.stats().waiting == 1)
            waiting = [asyncio.create_task(engine.submit(request())) for _ in range(5)]
            await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
            setup.model.gate.set()
            assert await read(first) == chain(setup.model, 10)
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: not setup.core.has_work)

    in_time(work())
    setup.assert_nothing_is_left()


def test_refusals_come_from_submit() -> None:
    setup = Setup(max_waiting=3)

    async def work() -> None:
        async with running(setup) as engine:
            with pytest.raises(PromptError):
                await engine.submit(Request(token_ids=[]))
            with pytest.raises(SamplingError):
                await engine.submit(Request(token_ids=[4], params=SamplingParams(stop=("x",))))
            with pytest.raises(RequestError):
                await engine.submit(Request(token_ids=[4], cache_ids=[4, 4]))
            with pytest.raises(QueueFullError) as caught:
                await engine.submit(request(n=4))
            assert caught.value.retry_after > 0
            assert await read(await engine.submit(request(5))) == chain(setup.model, 5)

    in_time(work())
    setup.assert_nothing_is_left()


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    setup = Setup()

    async def work() -> None:
        async with running(setup) as engine:
            setup.model.broken = RuntimeError("device lost")
            stream = await engine.submit(request())
            (last,) = [delta async for deltas in stream for delta in deltas]
            assert last.finish_reason == "error"
            assert "device lost" in str(last.error)
            assert await read(await engine.submit(request(5))) == chain(setup.model, 5)
            assert engine.error is None

    in_time(work())
    setup.assert_nothing_is_left()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_dies() -> None:
    setup = Setup()

    async def work() -> None:
        setup.engine.start()
        setup.model.gate.clear()
        stream = await setup.engine.submit(request())
        await until(lambda: setup.engine.stats().waiting)
        late = [asyncio.create_task(setup.engine.submit(request())) for _ in range(3)]
        await asyncio.sleep(0.01)
        setup.model.broken = SystemExit("killed")  # no Exception: not the failure of a request
        setup.model.gate.set()
        with pytest.raises(EngineError, match="has stopped"):
            await read(stream)
        stream.cancel()
        for task in late:
            with pytest.raises(EngineError):
                await task
        with pytest.raises(EngineError, match="has failed"):
            await setup.engine.submit(request())
        assert isinstance(setup.engine.error, SystemExit)
        await setup.engine.stop()

    in_time(work())
    setup.assert_nothing_is_left()


def test_stop_lets_answers_end_and_takes_no_more() -> None:
    setup = Setup(pace=0.002)

    async def work() -> None:
        setup.engine.start()
        streams = [await setup.engine.submit(request(30)) for _ in range(6)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        stopping = asyncio.create_task(setup.engine.stop(drain_s=SOON))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="stopping"):
            await setup.engine.submit(request())
        assert await asyncio.gather(*readers) == [chain(setup.model, 30)] * 6
        await stopping
        assert setup.engine.error is None

    in_time(work())
    setup.assert_nothing_is_left()


def test_stop_cuts_what_does_not_end_in_time() -> None:
    setup = Setup(pace=0.002)

    async def work() -> None:
        setup.engine.start()
        reader = asyncio.create_task(read(await setup.engine.submit(request(LONG))))
        await setup.engine.stop(drain_s=0.05)
        with pytest.raises(EngineError, match="has stopped"):
            await reader
        await setup.engine.stop()  # again: nothing to do

    in_time(work())
    setup.assert_nothing_is_left()


def test_stop_without_a_start() -> None:
    in_time(Setup().engine.stop())


def test_a_loop_that_ends_takes_its_requests_along() -> None:
    """Whoever read them is gone: they do not hold pages until their last token."""
    setup = Setup(pace=0.002)
    setup.engine.start()

    async def submit() -> None:
        setup.stream = await setup.engine.submit(request(LONG))

    in_time(submit())

    async def work() -> None:
        await until(lambda: setup.engine.stats().slots_used == 0)
        assert setup.engine.stats().generation_tokens < LONG
        await setup.engine.stop()

    in_time(work())
    setup.assert_nothing_is_left()


def test_many_streams_from_two_loops_with_everything_at_random() -> None:
    setup = Setup(max_waiting=12)
    setup.engine.start()
    failures: list[BaseException] = []
    outcomes: list[str] = []

    async def one(rng: random.Random) -> None:
        count, last, n = rng.randrange(1, 60), rng.randrange(4, 13), rng.choice([1, 1, 2])
        await asyncio.sleep(rng.random() * 0.05)
        try:
            stream = await setup.engine.submit(request(count, last, n=n))
        except QueueFullError:
            outcomes.append("full")
            return
        fate, stop_at = rng.choice(["all", "all", "cancel", "leave", "other task"]), rng.randrange(1, 20)
        if fate == "other task":
            asyncio.get_running_loop().call_later(rng.random() * 0.02, stream.cancel)
        tokens: list[list[int]] = [[] for _ in range(n)]
        async with stream:
            async for deltas in stream:
                for delta in deltas:
                    tokens[delta.sample] += delta.token_ids
                if fate == "cancel" and len(tokens[0]) >= stop_at:
                    stream.cancel()
                if fate == "leave" and len(tokens[0]) >= stop_at:
                    break
        for own in tokens:
            assert own == chain(setup.model, count, last)[: len(own)]
            assert fate != "all" or len(own) == count
        outcomes.append(fate)

    def loop(seed: int) -> None:
        async def all_of_them() -> None:
            rng = random.Random(seed)
            await asyncio.gather(*(one(random.Random(rng.random())) for _ in range(60)))

        try:
            in_time(all_of_them())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert failures == []
    assert len(outcomes) == 120
    assert set(outcomes) >= {"all", "cancel", "leave", "other task"}
    in_time(setup.engine.stop())
    setup.assert_nothing_is_left()
