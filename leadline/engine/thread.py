"""The engine on a thread of its own, for asyncio programs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType

from leadline.engine.core import EngineCore, EngineStats
from leadline.engine.request import Delta, Request
from leadline.errors import EngineError


class RequestStream:
    """Deltas of one request, as lists of what a step gave. Ends when all its sequences have; `async with` cancels."""

    def __init__(self, engine: AsyncEngine, num_sequences: int) -> None:
        self._engine = engine
        self._left = num_sequences
        self._queue: asyncio.Queue[list[Delta] | EngineError] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.ticket = -1
        self.is_open = True

    def cancel(self) -> None:
        """End the request; its pages are free within a step. Any number of times, at any moment."""
        if self.is_open:
            self.is_open = False
            self._engine.cancel(self)
            _call(self, [])  # wakes a reader that waits for what will not come

    def put(self, item: list[Delta] | EngineError) -> None:
        """For the engine, on the loop of the stream."""
        self._queue.put_nowait(item)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Raises EngineError if the engine stops before the request has ended."""
        try:
            while self._left and self.is_open:
                item = await self._queue.get()
                if isinstance(item, EngineError):
                    raise item
                if not self.is_open:
                    break
                self._left -= sum(delta.finish_reason is not None for delta in item)
                if not self._left:
                    self.is_open = False
                yield item
        finally:
            self.cancel()


class AsyncEngine:
    """Runs an `EngineCore` on one thread, which alone touches it.

    error: what killed the thread, if anything did; requests are refused then.
    """

    def __init__(self, core: EngineCore) -> None:
        self.error: BaseException | None = None
        self._core = core
        self._wake = threading.Condition()
        self._commands: deque[tuple[str, RequestStream, Request | None, asyncio.Future[None] | None]] = deque()
        self._streams: dict[int, RequestStream] = {}
        self._stats = core.stats()
        self._is_draining = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def stop(self, drain_s: float = 30.0) -> None:
        """Take no more requests, wait so long for those that run, cancel the rest, end the thread."""
        with self._wake:
            self._is_draining = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, drain_s)
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def submit(self, request: Request, request_id: str = "") -> RequestStream:
        """Hand a request to the engine.

        Raises: as `EngineCore.add`; EngineError if the engine is stopping or has failed.
        """
        stream = RequestStream(self, request.params.n)
        taken: asyncio.Future[None] = stream.loop.create_future()
        self._command("add", stream, request, taken)
        try:
            await taken
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    def cancel(self, stream: RequestStream) -> None:
        """For `RequestStream.cancel`, from any thread."""
        with contextlib.suppress(EngineError):  # an engine that has ended holds nothing any more
            self._command("cancel", stream, None, None)

    def stats(self) -> EngineStats:
        """Figures as of the last step."""
        return self._stats

    def _command(
        self, name: str, stream: RequestStream, request: Request | None, taken: asyncio.Future[None] | None
    ) -> None:
        with self._wake:
            if self.error is not None or self._is_stopping or (self._is_draining and name == "add"):
                raise EngineError("engine: it is stopping or has failed; ask again later")
            self._commands.append((name, stream, request, taken))
            self._wake.notify()

    # On the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                deltas = self._core.step()
                self._stats = self._core.stats()  # first, so that who has the last delta finds it counted
                self._deliver(deltas)
        except BaseException as error:
            with self._wake:
                self.error = error
            raise
        finally:
            with self._wake:
                self._is_stopping = True
                commands, self._commands = self._commands, deque()
            ended = EngineError("engine: it has stopped before the answer ended; ask again later")
            for _, stream, _, taken in commands:
                _answer(stream, taken, ended)
            for stream in self._streams.values():
                _call(stream, ended)
            self._streams.clear()
            self._core.cancel_all()
            self._stats = self._core.stats()

    def _wait(self) -> bool:
        """Carries out commands; sleeps while there is nothing to do. False when it is time to end."""
        while True:
            with self._wake:
                while not self._commands and not self._core.has_work and not self._is_draining:
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                if self._is_stopping:
                    self._commands.extendleft(reversed(commands))
                    return False
            for name, stream, request, taken in commands:
                if name == "cancel":
                    self._drop(stream)
                elif request is not None:
                    self._add(stream, request, taken)
            if commands:
                self._stats = self._core.stats()
            if self._core.has_work:
                return True
            if self._is_draining:
                return False

    def _add(self, stream: RequestStream, request: Request, taken: asyncio.Future[None] | None) -> None:
        error: Exception | None = None
        if not stream.is_open:  # cancelled before it came here
            return
        try:
            stream.ticket = self._core.add(request)
            self._streams[stream.ticket] = stream
        except Exception as failure:
            error = failure
        _answer(stream, taken, error)

    def _drop(self, stream: RequestStream) -> None:
        self._core.cancel(stream.ticket)
        self._streams.pop(stream.ticket, None)

    def _deliver(self, deltas: list[Delta]) -> None:
        by_ticket: dict[int, list[Delta]] = {}
        for delta in deltas:
            by_ticket.setdefault(delta.request, []).append(delta)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, list[Delta]]]] = {}
        for ticket, own in by_ticket.items():
            stream = self._streams[ticket]
            by_loop.setdefault(stream.loop, []).append((stream, own))
            if not self._core.is_open(ticket):
                del self._streams[ticket]
        for loop, parts in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, parts)
            except RuntimeError:  # the loop is closed: nobody reads any more
                for stream, _ in parts:
                    self._drop(stream)
                self._stats = self._core.stats()


def _put_all(parts: list[tuple[RequestStream, list[Delta]]]) -> None:
    for stream, deltas in parts:
        stream.put(deltas)


def _call(stream: RequestStream, item: list[Delta] | EngineError) -> None:
    with contextlib.suppress(RuntimeError):
        stream.loop.call_soon_threadsafe(stream.put, item)


def _answer(stream: RequestStream, taken: asyncio.Future[None] | None, error: Exception | None) -> None:
    """Settle a `submit` that waits."""

    def settle() -> None:
        if taken is None or taken.done():
            return
        if error is None:
            taken.set_result(None)
        else:
            taken.set_exception(error)

    with contextlib.suppress(RuntimeError):
        stream.loop.call_soon_threadsafe(settle)
