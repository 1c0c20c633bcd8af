"""From a protocol's request to the engine's and back: one path for all of them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from leadline.config.model import VisionConfig
from leadline.config.sampling import SamplingParams
from leadline.engine.request import Delta, Request
from leadline.errors import EngineError, ImageError, RequestError, SamplingError
from leadline.server import bodies
from leadline.server.answers import (
    Answers,
    ChatAnswers,
    CompletionAnswers,
    Event,
    MessagesAnswers,
    ResponsesAnswers,
    Usage,
)
from leadline.server.errors import ApiError
from leadline.server.images import fetch_image
from leadline.server.metrics import Metrics
from leadline.server.protocol import Wish, call_grammar, json_schema_of, read_wish, sampling_params
from leadline.server.settings import ServerSettings
from leadline.text.chat import ChatPrompt, Protocol, render_request
from leadline.text.grammar import Grammar
from leadline.text.images import PreparedImage, content_ids, expand_images, load_image, prepare_image
from leadline.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
logger = logging.getLogger("leadline.server")

LOADER = "load"  # name of the thread
_MAX_PROMPTS = 128  # of one request to /v1/completions
_COMPLETION_TOKENS = 16  # OpenAI's default for legacy completions
_KEEP_ALIVE_SECONDS = 15.0
_ID_PREFIX = {"chat": "chatcmpl", "messages": "msg", "responses": "resp", "completions": "cmpl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a server needs of a loaded model. engine: an AsyncEngine, not yet started."""

    tokenizer: Tokenizer
    vision: VisionConfig | None
    encode_images: Callable[[list[PreparedImage]], Tensor]
    engine: Any
    max_model_len: int
    cache_tokens: int


class _Input(NamedTuple):
    """A prompt as the engine takes it, and how much of it is images."""

    request: Request
    images: int
    image_tokens: int


@dataclass(slots=True)
class Job:
    """A request that is ready to run: one engine request per prompt, and where its answers are put together."""

    id: str
    kind: Literal["chat", "messages", "responses", "completions"]
    requests: list[Request]
    answers: Answers
    stream: bool
    started: float
    streams: list[Any] = field(default_factory=list)
    first_token_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)


class Service:
    """The state of a server: its model, once loaded, and the way of every request through it.

    load: makes the model, on a thread of its own, reporting progress.
    """

    def __init__(self, settings: ServerSettings, load: Callable[[Progress], ServedModel]) -> None:
        self.settings = settings
        self.model: ServedModel | None = None
        self.waits_for = "the model to be loaded"
        self.failure: BaseException | None = None
        self.is_draining = False
        self.metrics = Metrics(settings.names[0], lambda: None if self.model is None else self.model.engine.stats())
        self._load = load
        self._tower = asyncio.Lock()  # one request's images at a time
        self._loaded = asyncio.Event()

    def start(self) -> None:
        """Load in the background. The thread does not keep the process alive."""
        loop = asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            self.waits_for = f"the model to be loaded: {100 * done // max(1, total)} %"

        def load() -> None:
            loaded: ServedModel | BaseException
            try:
                loaded = self._load(progress)
            except BaseException as error:
                loaded = error
            with suppress(RuntimeError):  # the loop is gone: nobody waits any more
                loop.call_soon_threadsafe(self._take, loaded)

        threading.Thread(target=load, name=LOADER, daemon=True).start()

    async def loaded(self) -> None:
        """Wait until the model is there. Raises: what loading raised."""
        await self._loaded.wait()
        if self.failure is not None:
            raise self.failure

    async def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let the running ones end, then stop the engine."""
        self.is_draining = True
        if self.model is not None:
            await self.model.engine.stop(drain_s=drain_seconds)

    @property
    def error(self) -> BaseException | None:
        """What has ended the loading or the engine, if anything has."""
        return self.failure or (None if self.model is None else self.model.engine.error)

    def state(self) -> tuple[bool, str]:
        """Whether requests are taken, and if not, why."""
        if (error := self.error) is not None:
            return False, f"nothing: it has failed ({type(error).__name__})"
        if self.is_draining:
            return False, "nothing: it is stopping"
        return self.model is not None, self.waits_for

    def ready_model(self) -> ServedModel:
        """The model. Raises: ApiError 503 while there is none."""
        is_ready, waits_for = self.state()
        if self.model is None or not is_ready:
            message = f"the server is not ready; it waits for {waits_for}"
            raise ApiError(503, message, kind="server_error", code="not_ready", retry_after=5)
        return self.model

    def check_model_name(self, name: str | None) -> str:
        """The name that a response reports. Raises: ApiError 404 for an unknown one; only exact names count."""
        if name is not None and name not in self.settings.names:
            served = ", ".join(self.settings.names)
            message = f"model: {name[:100]!r} is not served here; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.settings.names[0]

    async def chat_job(
        self,
        protocol: Protocol,
        body: bodies.ChatBody | bodies.MessagesBody | bodies.ResponsesBody,
        raw: Mapping[str, Any],
        request_id: str,
    ) -> Job:
        """A request of one of the chat protocols, rendered and with its images read."""
        started = time.perf_counter()
        bodies.refuse_unsupported(body)
        name, model = self.check_model_name(body.model), self.ready_model()
        n, params = self._chat_params(body)
        wish = await asyncio.to_thread(read_wish, protocol, raw)
        grammar = await _grammar(model, wish.is_json, wish.schema, wish.format_field)
        prompt, inputs = await self.chat_input(model, wish)
        grammar = await asyncio.to_thread(call_grammar, model.tokenizer, wish, prompt) or grammar
        request = self._request(inputs.request, params, body, grammar, wish.field)
        usage = Usage(len(request.token_ids), inputs.images, inputs.image_tokens)
        answer_id = f"{_ID_PREFIX[protocol]}-{request_id}"
        args = (model.tokenizer, protocol, prompt, answer_id, name, usage, n)
        answers: Answers
        if isinstance(body, bodies.ChatBody):
            options = body.stream_options
            answers = ChatAnswers(
                *args,
                include_usage=bool(options and options.include_usage),
                top_logprobs=body.top_logprobs or 0,
            )
        elif protocol == "messages":
            answers = MessagesAnswers(*args)
        else:
            answers = ResponsesAnswers(*args, echo=wish.echo)
        if self.settings.log_prompts:
            logger.info("request=%s prompt=%s", request_id, json.dumps(prompt.text, ensure_ascii=False))
        return Job(request_id, protocol, [request], answers, bool(body.stream), started)

    async def completion_job(self, body: bodies.CompletionBody, request_id: str) -> Job:
        """A request of legacy Completions, for one prompt or several."""
        started = time.perf_counter()
        bodies.refuse_unsupported(body)
        name, model = self.check_model_name(body.model), self.ready_model()
        n = self._checked_n(body.n)
        params = sampling_params(
            body, n=n, max_tokens=body.max_tokens or _COMPLETION_TOKENS, stop=body.stop, logprobs=body.logprobs
        )
        shape = None if body.response_format is None else body.response_format.model_dump(by_alias=True)
        grammar = await _grammar(model, *json_schema_of(shape), "response_format")
        given = body.prompt
        is_one = isinstance(given, str) or given[:1] == [] or isinstance(given[0], int)
        prompts: Sequence[Any] = [given] if is_one else given
        if not 1 <= len(prompts) <= _MAX_PROMPTS:
            raise RequestError(f"prompt: expected 1 to {_MAX_PROMPTS} prompts, got {len(prompts)}")
        if n * len(prompts) > (most := self.settings.max_answers):
            raise RequestError(f"prompt: expected at most {most} answers in all, got {len(prompts)} prompts times {n}")

        def encode(prompt: str | list[int], field: str) -> list[int]:
            if not isinstance(prompt, str):
                model.tokenizer.check_ids(prompt, field)
                return prompt
            model.tokenizer.check_length(field, prompt, model.max_model_len - 1)
            return model.tokenizer.encode(prompt, add_bos=True)

        fields = ["prompt"] if is_one else [f"prompt[{number}]" for number in range(len(prompts))]
        ids = await asyncio.to_thread(lambda: list(map(encode, prompts, fields)))
        if not all(ids):
            raise RequestError("prompt: expected at least one token, got none")
        if any(model.tokenizer.image_token_id in prompt for prompt in ids):
            raise RequestError("prompt: expected no image tokens; images need a chat")
        requests = [self._request(Request(token_ids=prompt), params, body, grammar, "prompt") for prompt in ids]
        usage = Usage(sum(len(prompt) for prompt in ids))
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        answer_id = f"{_ID_PREFIX['completions']}-{request_id}"
        answers = CompletionAnswers(model.tokenizer, answer_id, name, usage, n * len(ids), include_usage)
        if self.settings.log_prompts:
            logger.info("request=%s prompt=%s", request_id, json.dumps(given, ensure_ascii=False))
        return Job(request_id, "completions", requests, answers, bool(body.stream), started)

    async def chat_input(self, model: ServedModel, wish: Wish) -> tuple[ChatPrompt, _Input]:
        """Render a conversation, fetch and encode its images."""

        def render() -> ChatPrompt:
            return render_request(
                *(model.tokenizer, wish.protocol, wish.body),
                thinking=wish.thinking,
                effort=wish.effort,
                most_tokens=model.max_model_len - 1,
            )

        prompt = await asyncio.to_thread(render)
        if not prompt.images:
            return prompt, _Input(Request(token_ids=prompt.token_ids), 0, 0)
        if len(prompt.images) > self.settings.max_images:
            field, most = prompt.image_fields[-1], self.settings.max_images
            raise RequestError(f"{field}: expected at most {most} images, got {len(prompt.images)}")
        sources = [
            await self._image_source(str(url), name)
            for url, name in zip(prompt.images, prompt.image_fields, strict=True)
        ]
        async with self._tower:
            made = await asyncio.to_thread(_with_images, model, prompt, sources)
        return prompt, made

    async def submit(self, job: Job) -> None:
        """Hand the job to the engine. Raises: the engine's errors, all of them before a response has begun."""
        engine = self.ready_model().engine
        try:
            for number, request in enumerate(job.requests):
                job.streams.append(await engine.submit(request, request_id=f"{job.id}-{number}"))
        except BaseException:
            cancel(job)
            raise

    async def events(self, job: Job) -> AsyncGenerator[list[Event], None]:
        """The events of a submitted job as they come. An empty list now and then says that it is alive.

        Raises: the error that ended an answer. Closing the iterator cancels the job.
        """
        last: dict[int, float] = {}
        try:
            async with aclosing(_merged(job.streams)) as merged:
                async for number, deltas in merged:
                    events: list[Event] = []
                    now = time.perf_counter()
                    for delta in deltas:
                        index = number * job.requests[number].params.n + delta.sample
                        self._observe(job, index, delta, last, now)
                        if delta.finish_reason not in (None, "stop", "length"):
                            raise _failure(delta)
                        events += job.answers.feed(index, delta)
                    if events or not deltas:
                        yield events
            if len(job.finish_reasons) < sum(request.params.n for request in job.requests):
                raise EngineError("engine: the answer broke off before its end")
            self.metrics.request_end(time.perf_counter() - job.started)
            if ending := job.answers.end():
                yield ending
        finally:
            cancel(job)
            self._log(job)

    def _observe(self, job: Job, index: int, delta: Delta, last: dict[int, float], now: float) -> None:
        if delta.token_ids:
            if job.first_token_s is None:
                job.first_token_s = now - job.started
                self.metrics.first_token(job.first_token_s)
            if index in last:
                self.metrics.inter_token(now - last[index])
            last[index] = now
        if delta.finish_reason is not None:
            job.finish_reasons.append(delta.finish_reason)

    def _log(self, job: Job) -> None:
        usage, first = job.answers.usage, job.first_token_s
        logger.info(
            f"request={job.id} protocol={job.kind} stream={str(job.stream).lower()} "
            f"finish={','.join(job.finish_reasons) or 'cancelled'} prompt_tokens={usage.prompt} "
            f"cached_tokens={usage.cached} images={usage.images} image_tokens={usage.image_tokens} "
            f"completion_tokens={usage.completion} reasoning_tokens={usage.reasoning} "
            f"first_token_s={'-' if first is None else f'{first:.3f}'} seconds={time.perf_counter() - job.started:.3f}"
        )

    def _chat_params(
        self, body: bodies.ChatBody | bodies.MessagesBody | bodies.ResponsesBody
    ) -> tuple[int, SamplingParams]:
        if isinstance(body, bodies.MessagesBody):
            try:
                return 1, sampling_params(body, max_tokens=body.max_tokens, stop=body.stop_sequences)
            except SamplingError as error:
                raise SamplingError(re.sub("^stop:", "stop_sequences:", str(error))) from None
        if isinstance(body, bodies.ResponsesBody):
            return 1, sampling_params(body, max_tokens=body.max_output_tokens, stop=body.stop)
        n = self._checked_n(body.n)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs: expected logprobs true with it")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens or body.max_tokens
        return n, sampling_params(body, n=n, max_tokens=max_tokens, stop=body.stop, logprobs=logprobs)

    def _checked_n(self, n: int | None) -> int:
        if n is not None and n > self.settings.max_n:
            raise RequestError(f"n: expected at most {self.settings.max_n}, got {n}")
        return n or 1

    def _request(
        self, prompt: Request, params: SamplingParams, body: bodies.SamplingBody, grammar: Grammar | None, field: str
    ) -> Request:
        most, length = self.ready_model().max_model_len - 1, len(prompt.token_ids)
        if length > most:
            raise ApiError(
                400,
                f"{field}: expected at most {most} tokens (the context less one for the answer), got {length}; "
                "shorten it, or serve with a larger --max-model-len and --max-cache-tokens",
                param=field,
                code="context_length_exceeded",
            )
        self.ready_model().tokenizer.check_ids(body.stop_token_ids or (), "stop_token_ids")
        timeout = self.settings.request_seconds
        return replace(prompt, params=params, priority=body.priority or 0, timeout=timeout, grammar=grammar)

    async def _image_source(self, url: str, name: str) -> tuple[str, str | bytes]:
        if url.startswith("data:"):
            return name, url
        if not self.settings.image_urls:
            raise RequestError(f"{name}: expected a data URL; this server fetches no images")
        try:
            return name, await fetch_image(url, seconds=self.settings.image_seconds)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None

    def _take(self, loaded: ServedModel | BaseException) -> None:
        if isinstance(loaded, BaseException):
            self.failure = loaded
        else:
            loaded.engine.start()
            self.model = loaded
        self._loaded.set()


def cancel(job: Job) -> None:
    """Give back whatever the job still holds. Any number of times."""
    for stream in job.streams:
        stream.cancel()


async def _grammar(model: ServedModel, is_json: bool, schema: dict[str, Any] | None, field: str) -> Grammar | None:
    try:
        return await asyncio.to_thread(Grammar.json_schema, model.tokenizer, schema) if is_json else None
    except RequestError as error:
        raise RequestError(f"{field}: {str(error).removeprefix('response_format: ')}") from None


async def _merged(streams: Sequence[Any]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """What several streams give, with the number of the stream, as it comes; nothing of stream 0 as a sign of life."""

    async def following(iterator: Any) -> list[Delta] | None:
        return await anext(iterator, None)

    iterators = [aiter(stream) for stream in streams]
    tasks = {asyncio.ensure_future(following(iterator)): number for number, iterator in enumerate(iterators)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield 0, []
            for task in done:
                number = tasks.pop(task)
                deltas = task.result()
                if deltas is not None:
                    tasks[asyncio.ensure_future(following(iterators[number]))] = number
                    yield number, deltas
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(delta: Delta) -> Exception:
    if delta.finish_reason == "timeout":
        message = str(delta.error or "request: its time is over")
        return ApiError(504, message, kind="timeout_error", code="timeout")
    if delta.finish_reason == "error" and isinstance(delta.error, EngineError):  # ours, and no use in trying again
        return ApiError(500, str(delta.error), kind="server_error", code="engine_error")
    return delta.error or EngineError("engine: the request was cancelled; ask again later")


def _with_images(model: ServedModel, prompt: ChatPrompt, sources: list[tuple[str, str | bytes]]) -> _Input:
    if model.vision is None:
        raise ImageError(f"{sources[0][0]}: expected text only; this model does not read images")
    prepared = []
    for name, source in sources:
        try:
            prepared.append(prepare_image(load_image(source), model.vision))
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from None
    plans = [image.plan for image in prepared]
    ids_T, types_T = expand_images(prompt.token_ids, plans, model.tokenizer.image_token_id)
    request = Request(
        token_ids=ids_T.tolist(),
        image_rows=model.encode_images(prepared),
        token_types=types_T,
        cache_ids=content_ids(ids_T, types_T, prepared),
    )
    return _Input(request, len(prepared), sum(plan.num_tokens for plan in plans))
