"""An engine that recites: the surface of AsyncEngine around a script, for tests of protocols without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from leadline.engine.request import Delta, Request
from leadline.engine.sampler import Logprob
from leadline.engine.text_stream import TextStream
from leadline.errors import EngineError, LeadlineError, NumericsError, QueueFullError
from leadline.text.chat import hidden_ids
from leadline.text.tokenizer import Tokenizer

Script = str | list[int] | Callable[[Request], str]


@dataclass
class FakeStats:
    """The figures that the server reads; those without a meaning here stay at zero."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    numerics_errors: int = 0
    drafted: int = 0
    accepted: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 1
    window_pages_used: int = 0
    window_pages_total: int = 1
    slots_used: int = 0
    slots_total: int = 1
    prefix_nodes: int = 0
    snapshots: int = 0
    host_bytes: int = 0
    steps: int = 0
    step_seconds: float = 0.0


class FakeStream:
    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self._engine, self._request, self._is_open = engine, request, True
        engine.open_streams.add(self)

    def cancel(self) -> None:
        self._is_open = False
        self._engine.open_streams.discard(self)

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        engine, params = self._engine, self._request.params
        answers = [engine.answer(self._request, sample) for sample in range(params.n)]
        while answers and self._is_open and not engine.stopped:
            await asyncio.sleep(engine.step_seconds)
            deltas = [(answer, delta) for answer in answers if (delta := next(answer, None)) is not None]
            answers = [answer for answer, _ in deltas]
            if deltas:
                yield [delta for _, delta in deltas]
        if answers and engine.stopped:
            error = EngineError("engine: it has stopped before the answer ended; ask again later")
            yield [Delta(request=0, sample=0, token_ids=[], finish_reason="error", error=error)]
        self.cancel()


class FakeEngine:
    """Recites `script` to every request, token by token, then EOS.

    script: a text, the ids of its tokens, or a function of the request. refuse: raised by every `submit`. nan_at: the
    token of an answer at which its logits turn out not to be numbers. cached: prompt tokens that count as cached. cuts:
    the numbers of tokens after which a delta ends; None for one delta a token. requests: all that came.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script = "ok", step_seconds: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.step_seconds = step_seconds
        self.refuse: LeadlineError | None = None
        self.nan_at: int | None = None
        self.cached = 0
        self.cuts: list[int] | None = None
        self.error: BaseException | None = None
        self.stopped = False
        self.requests: list[Request] = []
        self.open_streams: set[FakeStream] = set()
        self._stats = FakeStats()

    def start(self) -> None:
        pass

    async def stop(self, drain_s: float = 30.0) -> None:
        waited = 0.0
        while self.open_streams and waited < drain_s:
            await asyncio.sleep(0.01)
            waited += 0.01
        self.stopped = True

    async def submit(self, request: Request, request_id: str = "") -> FakeStream:
        if self.refuse is not None:
            raise self.refuse
        if self.stopped:
            raise EngineError("engine: it has stopped; ask again later")
        self.requests.append(request)
        self._stats.prompt_tokens += len(request.token_ids)
        return FakeStream(self, request)

    def stats(self) -> Any:
        self._stats.running = len(self.open_streams)
        return self._stats

    def queue_full(self) -> None:
        """Refuse from now on as a full queue does."""
        self.refuse = QueueFullError("queue: full; try again later")
        self.refuse.retry_after = 3.0

    def answer(self, request: Request, sample: int) -> Any:
        """One answer as an iterator of deltas."""
        params, tokenizer = request.params, self.tokenizer
        script = self.script(request) if callable(self.script) else self.script
        ids = tokenizer.encode(script) if isinstance(script, str) else script
        ids = [*ids, *([] if params.ignore_eos else [tokenizer.eos_token_id])]
        text = TextStream(tokenizer, params, hidden_ids(tokenizer))
        pending: list[int] = []
        new = ""
        for count, token in enumerate(ids, start=1):
            if count == self.nan_at:
                self._stats.numerics_errors += 1
                error = NumericsError("logits: expected numbers, got NaN")
                yield Delta(request=0, sample=sample, token_ids=[], finish_reason="error", error=error)
                return
            pending.append(token)
            reason: Any = None
            stop: int | str | None = None
            if token == tokenizer.eos_token_id or token in params.stop_token_ids:
                reason, stop = "stop", None if token == tokenizer.eos_token_id else token
            else:
                new += text.push(token)
                if text.stopped_by is not None:
                    reason, stop = "stop", text.stopped_by
            if reason is None and (count == params.max_tokens or count == len(ids)):
                reason = "length"
            if reason is not None:
                new += text.finish()
                self._stats.finished[reason] += 1
            if reason is not None or self.cuts is None or count in self.cuts:
                yield self._delta(params.logprobs, sample, pending, new, reason, stop)
                pending, new = [], ""
            if reason is not None:
                return

    def _delta(
        self, logprobs: int | None, sample: int, token_ids: list[int], text: str, reason: Any, stop: int | str | None
    ) -> Delta:
        self._stats.generation_tokens += len(token_ids)
        return Delta(
            request=0,
            sample=sample,
            token_ids=token_ids,
            text=text,
            logprobs=None if logprobs is None else [self._logprobs(token, logprobs) for token in token_ids],
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=self.cached,
        )

    def _logprobs(self, token: int, top: int) -> list[Logprob]:
        return [Logprob(token, -0.5, 1), *(Logprob(i, -0.5 - i, i + 1) for i in range(top))]
