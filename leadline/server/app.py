"""The paths of the server, and what every request passes on its way: limits, key, id, errors."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute, APIRouter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leadline import __version__
from leadline.errors import RequestError
from leadline.server import bodies, metrics
from leadline.server.answers import Event
from leadline.server.errors import ApiError, api_error, request_id_of, too_slow
from leadline.server.protocol import Wish, read_wish
from leadline.server.service import Job, Service, cancel
from leadline.text.chat import Protocol

logger = logging.getLogger("leadline.server")
T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

PAGE = Path(__file__).parent / "page.html"
MAX_DEPTH = 100  # of brackets in a body
MAX_PARTS = 1_250_000  # commas, and four times the opening brackets, of a body: a million token ids have a million
MAX_TOKENIZED = 1 << 20  # tokens of a text for /tokenize, which need not fit the context
MAX_OBJECTS = 50_000  # of a body: one for 20 of a million tokens
MAX_HEAD = 16 << 10  # bytes of path and headers
_TOO_DEEP = f"expected brackets at most {MAX_DEPTH} deep"
_OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": bodies.ErrorBody}, "5XX": {"model": bodies.ErrorBody}}


def create_app(service: Service) -> FastAPI:
    """The application. Its lifespan loads the model in the background and stops the engine at the end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop(0.0)

    app = FastAPI(title="leadline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
                  redirect_slashes=False)  # fmt: skip
    app.state.service = service
    app.include_router(_routes(service))
    for kind in (RequestValidationError, HTTPException):  # the gate answers all others
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(_Gate, service=service)
    return app


def parse_json(body: bytes) -> Any:
    """The JSON document of a request.

    While json.loads, pydantic or deepseek-recipe work nothing else runs, and each part of a document costs them a
    microsecond and some hundred bytes: so the parts are counted first. Those inside strings count as well.

    Raises: ApiError 413 for more than `MAX_PARTS`. ApiError 400 for what is no JSON in UTF-8, and what `_flaw` finds.
    """

    def refuse(what: str, field: str = "body") -> ApiError:
        return ApiError(400, f"{field}: {what}", param=field, code="invalid_json")

    if (parts := body.count(b",") + 4 * (body.count(b"[") + body.count(b"{"))) > MAX_PARTS:
        raise _too_large(f"{MAX_PARTS} commas and opening brackets, brackets counted four times", str(parts))
    try:  # 21 characters of an integer show that it has more than 64 bits; thousands take long, or are refused
        document = json.loads(body.decode("utf-8"), parse_int=lambda digits: int(digits[:21]))
    except UnicodeDecodeError as error:
        raise refuse(f"expected UTF-8, got byte {body[error.start]:#04x} at {error.start}") from None
    except RecursionError:
        raise refuse(_TOO_DEEP) from None
    except ValueError as error:
        raise refuse(f"expected JSON, got {str(error)[:100]}") from None
    if (flaw := _flaw(document, MAX_DEPTH, itertools.count(1))) is not None:
        field, what = flaw
        raise refuse(what, field[:200].removeprefix(".") or "body")
    return document


def _flaw(value: Any, depth: int, objects: Iterator[int]) -> tuple[str, str] | None:
    """Where a document holds what no field takes, and what would be right: NaN and infinities, integers beyond 64 bits,
    lone surrogates, brackets nested deeper than `depth`, an object whose number is beyond `MAX_OBJECTS`."""
    if isinstance(value, dict | list):
        if depth == 0:
            return "", _TOO_DEEP
        if isinstance(value, dict) and next(objects) > MAX_OBJECTS:
            return "", f"expected at most {MAX_OBJECTS} objects in the whole body"
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and _SURROGATE.search(key):
                return "", "expected Unicode text as names, got a lone surrogate"
            if (flaw := _flaw(entry, depth - 1, objects)) is not None:
                return (f".{key}" if isinstance(key, str) else f"[{key}]") + flaw[0], flaw[1]
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            return "", "expected Unicode text, got a lone surrogate"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return "", f"expected a finite JSON number, got {json.dumps(value)}"
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return "", "expected an integer of at most 64 bits, got a larger one"
    return None


def head_too_large() -> ApiError:
    message = f"request: expected at most {MAX_HEAD} bytes of line and headers, got more"
    return ApiError(431, message, code="head_too_large", headers={"Connection": "close"})


def _too_large(most: str, got: str) -> ApiError:
    return ApiError(413, f"body: expected at most {most}, got {got}", param="body", code="body_too_large")


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await asyncio.to_thread(parse_json, await self.body())
        return self._json


class _JsonRoute(APIRoute):
    """Reads bodies with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return read


class _Gate:
    """In front of everything: request id, key, size and time of the body, errors, one log line for every refusal."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, settings = Headers(scope=scope), self._service.settings
        request_id = request_id_of(headers.get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        path, is_started, received = scope["path"], False, 0
        end: float | None = asyncio.get_running_loop().time() + settings.read_seconds  # None once the body is whole

        async def limited() -> Message:
            nonlocal received, end
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise too_slow(settings.read_seconds) from None
            received += len(message.get("body", b""))
            if received > settings.max_body_bytes:
                raise _too_large(f"{settings.max_body_bytes} bytes", "more")
            if not message.get("more_body", False):
                end = None
            return message

        async def marked(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = request_id
                out["X-Content-Type-Options"] = "nosniff"
                route = getattr(scope.get("route"), "path", "other")
                self._service.metrics.response(route, message["status"])
                if message["status"] >= 400:
                    logger.info("request=%s method=%s path=%r status=%d", request_id, scope["method"], path,
                                message["status"])  # fmt: skip
            await send(message)

        try:
            if not scope["http_version"].startswith("1."):
                message = f"request: expected HTTP/1.1, got HTTP/{scope['http_version']}"
                raise ApiError(505, message, headers={"Connection": "close"})
            head = (scope["path"], scope["query_string"], *itertools.chain(*scope["headers"]))
            if sum(map(len, head)) > MAX_HEAD:  # h11 sees to it only where the head comes in several pieces
                raise head_too_large()
            if headers.get("upgrade", "").lower() == "websocket":
                raise ApiError(400, "upgrade: expected plain HTTP; there are no websockets here", param="upgrade")
            if self._key is not None and path not in _OPEN_PATHS:
                self._check_key(headers)
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > settings.max_body_bytes:
                raise _too_large(f"{settings.max_body_bytes} bytes", length[:20])
            await self._app(scope, limited, marked)
        except ClientGone:
            logger.info("request=%s path=%r the client is gone", request_id, path)
        except Exception as error:
            if is_started:
                raise
            await _logged(error, request_id).response(path)(scope, receive, marked)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if self._key is None or not hmac.compare_digest(given.encode("latin-1"), self._key):
            message = "api key: expected this server's key as Authorization: Bearer ... or x-api-key"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")


class ClientGone(Exception):  # noqa: N818
    """The client has hung up; nobody reads an answer any more."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client hangs up. Raises: ClientGone, what work raises."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class _EventStream(Response):
    """A job as server-sent events. An error after the start is an event as well, and ends the stream."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, job: Job, path: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service, self._job, self._path = service, job, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        finally:
            cancel(self._job)  # the client may have gone before the first event was asked for

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sequence = 0
        try:
            async with aclosing(self._service.events(self._job)) as steps:
                async for events in steps:
                    sequence += len(events)
                    body = b"".join(_encoded(event) for event in events) or b": alive\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except Exception as error:
            failure = _logged(error, self._job.id)
            data = failure.body(self._path)
            if self._job.kind == "responses":
                data |= {"type": "error", "code": failure.code, "message": failure.detail, "param": failure.param}
                data["sequence_number"] = sequence
            name = "error" if self._job.kind in ("messages", "responses") else None
            await send({"type": "http.response.body", "body": _encoded(Event(name, data)), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _encoded(event: Event) -> bytes:
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False, allow_nan=False)
    return (f"event: {event.name}\n" if event.name else "").encode() + f"data: {data}\n\n".encode()


async def _run(service: Service, request: Request, making: Awaitable[Job]) -> Response:
    """Prepare a job, run it, and answer in one document or as a stream."""
    path = request.url.path

    async def work() -> Response:
        job = await making
        await service.submit(job)
        if job.stream:
            return _EventStream(service, job, path)
        try:
            async with aclosing(service.events(job)) as steps:
                async for _ in steps:
                    pass
        finally:
            cancel(job)
        return _json(job.answers.document())

    return await until_gone(request.receive, work())


async def _wish(protocol: Protocol, request: Request) -> Wish:
    return await asyncio.to_thread(read_wish, protocol, await request.json())


def _json(document: Any) -> Response:
    return Response(json.dumps(document, ensure_ascii=False, allow_nan=False), media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    return _logged(error, request.state.request_id).response(request.url.path)


def _logged(error: Exception, request_id: str) -> ApiError:
    """The error for the client. What is our fault goes into the log with its cause."""
    found = api_error(error)
    if found.status_code == 500:
        logger.error("request=%s error=%s", request_id, found.code, exc_info=error)
    return found


def _routes(service: Service) -> APIRouter:
    router, started = APIRouter(route_class=_JsonRoute), int(time.time())

    def post(path: str) -> Callable[[Handler], Handler]:
        return router.post(path, responses=_ERRORS, response_model=None)

    def get(path: str) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            router.get(path, response_model=None)(handler)  # the first of a path is what Allow names
            return router.head(path, include_in_schema=False)(handler)

        return add

    @post("/v1/chat/completions")
    async def chat_completions(body: bodies.ChatBody, request: Request) -> Response:
        making = service.chat_job("chat", body, await request.json(), request.state.request_id)
        return await _run(service, request, making)

    @post("/v1/completions")
    async def completions(body: bodies.CompletionBody, request: Request) -> Response:
        return await _run(service, request, service.completion_job(body, request.state.request_id))

    @post("/v1/messages")
    async def messages(body: bodies.MessagesBody, request: Request) -> Response:
        making = service.chat_job("messages", body, await request.json(), request.state.request_id)
        return await _run(service, request, making)

    @post("/v1/messages/count_tokens")
    async def count_tokens(body: bodies.MessagesPromptBody, request: Request) -> Response:
        service.check_model_name(body.model)
        _, made = await service.chat_input(service.ready_model(), await _wish("messages", request))
        return _json({"input_tokens": len(made.request.token_ids)})

    @post("/v1/responses")
    async def responses(body: bodies.ResponsesBody, request: Request) -> Response:
        making = service.chat_job("responses", body, await request.json(), request.state.request_id)
        return await _run(service, request, making)

    @post("/tokenize")
    async def tokenize(body: bodies.TokenizeBody, request: Request) -> Response:
        service.check_model_name(body.model)
        model = service.ready_model()
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt: expected a prompt or messages, and only one of them")
        if body.prompt is not None:
            prompt, most = body.prompt, max(model.max_model_len, MAX_TOKENIZED)

            def encode() -> list[int]:
                model.tokenizer.check_length("prompt", prompt, most, "a million, or the context")
                return model.tokenizer.encode(prompt, add_bos=body.add_special_tokens)

            ids = await asyncio.to_thread(encode)
        else:
            _, made = await service.chat_input(model, await _wish("chat", request))
            ids = list(made.request.token_ids)
        document: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            document["token_strs"] = [model.tokenizer.token_of(token_id) for token_id in ids]
        return _json(document)

    @post("/detokenize")
    async def detokenize(body: bodies.DetokenizeBody) -> Response:
        service.check_model_name(body.model)
        tokenizer = service.ready_model().tokenizer
        await asyncio.to_thread(tokenizer.check_ids, body.tokens, "tokens")
        return _json({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    def described(name: str) -> dict[str, Any]:
        length = None if service.model is None else service.model.max_model_len
        return {"id": name, "object": "model", "created": started, "owned_by": "leadline", "max_model_len": length}

    @get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [described(name) for name in service.settings.names]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(described(service.check_model_name(name)))

    @get("/health")
    async def health() -> Response:
        status, word = (200, "alive") if service.error is None else (503, "failed")
        return JSONResponse({"status": word}, status)

    @get("/ready")
    async def ready() -> Response:
        is_ready, waits_for = service.state()
        document = {"status": "ready"} if is_ready else {"status": "not ready", "waits_for": waits_for}
        return JSONResponse(document, 200 if is_ready else 503)

    @get("/metrics")
    async def prometheus() -> Response:
        return Response(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @get("/")
    async def page() -> Response:
        return FileResponse(PAGE, headers=_PAGE_HEADERS)

    return router
