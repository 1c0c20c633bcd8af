"""Drives a running OpenAI-compatible server over `/v1/completions` and takes the times that its clients see.

Prompts are token ids, so lengths are exact. Times have the meaning of `vllm bench serve`: TTFT from sending to the
first chunk, ITL between chunks, TPOT the time after the first token divided by the tokens after it, E2EL to the end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np

from leadline import client
from leadline.bench.workload import Session, Turn, Workload, draw, sample_text
from leadline.errors import ServerError

_PATH = "/v1/completions"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request. Times in seconds; prompt and output tokens as the server counts them, for completed requests."""

    prompt_len: int
    state: Literal["completed", "cancelled", "failed"] = "failed"
    error: str = ""
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    output_len: int = 0
    cached: int | None = None


class _WrongRequestError(ServerError):
    """A request that the server refuses as wrong."""


class Benchmark:
    """A workload against a server.

    url: the server's address. model: its name there; empty for the first that it lists. vocab_size: draw prompts from
    all ids below it, instead of the plain ones that `/tokenize` tells. request_seconds: a request that takes longer
    counts as failed. report: called after each request with the number done, the number of all, and a word for people.
    outcomes, seconds: what was measured so far, also if `run` is cancelled; from the first request to the last answer.
    Raises: ServerError for an address or key that no request can carry.
    """

    def __init__(
        self,
        url: str,
        workload: Workload,
        *,
        model: str = "",
        api_key: str = "",
        vocab_size: int | None = None,
        request_seconds: float = 600.0,
        report: Callable[[int, int, str], None] = lambda done, total, what: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._connection = client.connection(url, api_key) | {"limits": limits, "transport": transport}
        self.url = client.base_url(url)
        self.model = model
        self.workload = workload
        self.outcomes: list[Outcome] = []
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._vocab_size = vocab_size
        self._request_seconds = request_seconds
        self._report = report
        self._failed = 0

    @property
    def seconds(self) -> float:
        return (time.perf_counter() if self._ended is None else self._ended) - self._started

    async def run(self) -> None:
        """Sends everything.

        Raises: ServerError if the server is not there, is something else, or refuses a request as wrong (a 4xx other
            than 429: all others would fare alike).
        """
        async with httpx.AsyncClient(**self._connection) as http:
            sessions = draw(self.workload, await self._prepare(http))
            limit = asyncio.Semaphore(self.workload.max_concurrency or len(sessions))
            self._started = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for session in sessions:
                        group.create_task(self._session(http, session, limit))
            except* _WrongRequestError as errors:
                raise errors.exceptions[0] from None  # requests refused for the same reason say the same
            finally:
                self._ended = time.perf_counter()

    async def _prepare(self, http: httpx.AsyncClient) -> Sequence[int]:
        """Settles the model's name and returns the token ids to draw from."""
        try:
            with client.failures_in_words(self.url):
                async with asyncio.timeout(client.CONNECT_SECONDS):
                    self.model = client.model_name(await http.get("/v1/models"), self.url, self.model)
                    if self._vocab_size is not None:
                        return range(self._vocab_size)
                    body = {"model": self.model, "prompt": sample_text(), "add_special_tokens": False}
                    response = await http.post("/tokenize", json=body)
        except TimeoutError:
            raise ServerError(f"server {self.url}: no answer within {client.CONNECT_SECONDS:.0f} s") from None
        if not response.is_success:
            refusal = client.refused(self.url, "/tokenize", response.status_code, response.content)
            raise ServerError(f"{refusal}; without it --vocab-size has to be given")
        return sorted(set(response.json()["tokens"]))

    async def _session(self, http: httpx.AsyncClient, session: Session, limit: asyncio.Semaphore) -> None:
        await asyncio.sleep(max(0.0, session.start - self.seconds))
        for turn in session.turns:
            async with limit:
                outcome = Outcome(prompt_len=len(turn.prompt))
                try:
                    with client.failures_in_words(self.url):
                        async with asyncio.timeout(self._request_seconds):
                            await self._request(http, turn, outcome)
                except TimeoutError:
                    outcome.error = f"no end within {self._request_seconds:g} s"
                except _WrongRequestError:
                    raise
                except ServerError as error:
                    outcome.error = str(error)
            self.outcomes.append(outcome)
            self._failed += outcome.state == "failed"
            what = f"requests, {self._failed} failed" if self._failed else "requests"
            self._report(len(self.outcomes), self.workload.sessions * self.workload.turns, what)

    async def _request(self, http: httpx.AsyncClient, turn: Turn, outcome: Outcome) -> None:
        body = {
            "model": self.model,
            "prompt": turn.prompt,
            "max_tokens": turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.workload.temperature is not None:
            body["temperature"] = self.workload.temperature
        if self.workload.ignore_eos:
            body["ignore_eos"] = True
        chunks, stream = 0, client.EventStream()
        start = last = time.perf_counter()
        async with http.stream("POST", _PATH, json=body) as response:
            if not response.is_success:
                error = client.refused(self.url, _PATH, response.status_code, await response.aread())
                is_wrong = response.status_code < 500 and response.status_code != 429
                raise _WrongRequestError(str(error)) if is_wrong else error
            if turn.cancel_after == 0:
                outcome.state = "cancelled"
                return
            async for line in response.aiter_lines():
                if not stream.choices(line):
                    continue
                now = time.perf_counter()
                if chunks:
                    outcome.gaps.append(now - last)
                else:
                    outcome.ttft = now - start
                chunks, last = chunks + 1, now
                if chunks == turn.cancel_after:
                    outcome.state = "cancelled"
                    return
        stream.check_end(self.url)
        outcome.latency = last - start
        outcome.output_len = stream.usage.get("completion_tokens", chunks)
        outcome.cached = (stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        outcome.state = "completed"


def summary(benchmark: Benchmark) -> dict[str, Any]:
    """The figures of a benchmark, named as in `vllm bench serve`; what it lacks is spelled out in the same manner.

    Times cover completed requests; None where there is nothing to take them from. cached_share: of their prompt tokens,
    None for a server that does not tell. short and long: the completed requests with the shorter and the longer half of
    the prompts.
    """
    outcomes = benchmark.outcomes
    seconds = benchmark.seconds
    completed = [outcome for outcome in outcomes if outcome.state == "completed"]
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    input_tokens = sum(outcome.prompt_len for outcome in completed)
    output_tokens = sum(outcome.output_len for outcome in completed)
    told = [outcome for outcome in completed if outcome.cached is not None]
    told_tokens = sum(outcome.prompt_len for outcome in told)
    by_length = sorted(completed, key=lambda outcome: outcome.prompt_len)
    half = len(by_length) // 2
    figures: dict[str, Any] = {
        "model_id": benchmark.model,
        "num_prompts": benchmark.workload.sessions * benchmark.workload.turns,
        "duration": seconds,
        "completed": len(completed),
        "failed": len(failed),
        "cancelled": sum(outcome.state == "cancelled" for outcome in outcomes),
        "errors": dict(Counter(outcome.error for outcome in failed).most_common()),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(completed) / seconds,
        "input_throughput": input_tokens / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        "cached_share": sum(outcome.cached or 0 for outcome in told) / told_tokens if told else None,
    }
    after_first = [outcome for outcome in completed if outcome.output_len > 1]
    for name, values in (
        ("ttft", [outcome.ttft for outcome in completed]),
        ("tpot", [(outcome.latency - outcome.ttft) / (outcome.output_len - 1) for outcome in after_first]),
        ("itl", [gap for outcome in completed for gap in outcome.gaps]),
        ("e2el", [outcome.latency for outcome in completed]),
    ):
        for kind, statistic in (("mean", np.mean), ("median", np.median), ("std", np.std)):
            figures[f"{kind}_{name}_ms"] = _milliseconds(statistic, values)
        for share in (90, 99):
            figures[f"p{share}_{name}_ms"] = _milliseconds(np.percentile, values, share)
    for name, some in (("short", by_length[:half]), ("long", by_length[half:])):
        figures[f"p90_ttft_{name}_ms"] = _milliseconds(np.percentile, [outcome.ttft for outcome in some], 90)
    return figures


def _milliseconds(statistic: Callable[..., Any], seconds: list[float], *arguments: int) -> float | None:
    return float(statistic(seconds, *arguments)) * 1000 if seconds else None
