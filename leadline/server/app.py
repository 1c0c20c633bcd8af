"""The paths of the server, and what every request passes on its way: limits, key, id, errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
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
from leadline.errors import LeadlineError, PromptError, RequestError
from leadline.server import bodies, metrics
from leadline.server.answers import Event
from leadline.server.errors import ApiError, api_error
from leadline.server.protocol import read_wish
from leadline.server.service import Job, Service, cancel

logger = logging.getLogger("leadline.server")
T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

PAGE = Path(__file__).parent / "page.html"
_OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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

    app = FastAPI(title="leadline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(_routes(service))
    for kind in (RequestValidationError, HTTPException, LeadlineError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(_Gate, service=service)
    return app


def parse_json(body: bytes, max_depth: int) -> Any:
    """The JSON document of a request.

    Raises: ApiError 400 for what is no JSON in UTF-8, NaN and infinities, integers beyond 64 bits, lone surrogates, and
        brackets nested deeper than `max_depth`.
    """

    def refuse(what: str) -> ApiError:
        return ApiError(400, f"body: {what}", param="body", code="invalid_json")

    def constant(name: str) -> Any:
        raise refuse(f"expected JSON numbers, got {name}")

    try:
        document = json.loads(body.decode("utf-8"), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise refuse(f"expected UTF-8, got byte {body[error.start]:#04x} at {error.start}") from None
    except RecursionError:
        raise refuse(f"expected brackets at most {max_depth} deep") from None
    except ValueError as error:
        raise refuse(f"expected JSON, got {str(error)[:100]}") from None
    level = [document]
    for _ in range(max_depth):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                    raise refuse("expected Unicode text, got a lone surrogate")
            elif isinstance(value, float):
                if math.isinf(value):
                    raise refuse("expected finite numbers, got one beyond the range of a double")
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise refuse("expected integers of at most 64 bits, got a larger one")
        if not below:
            return document
        level = below
    raise refuse(f"expected brackets at most {max_depth} deep")


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body(), self.app.state.service.settings.max_json_depth)
        return self._json


class _JsonRoute(APIRoute):
    """Reads bodies with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return read


class _Gate:
    """In front of everything: request id, API key, size of the body, one log line for every refusal."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._max_bytes = service.settings.max_body_bytes
        key = service.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        path, is_started, received = scope["path"], False, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
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
            if self._key is not None and path not in _OPEN_PATHS:
                self._check_key(headers)
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length[:20]) > self._max_bytes:
                raise self._too_large()
            await self._app(scope, counted, marked)
        except ClientGone:
            logger.info("request=%s path=%r the client is gone", request_id, path)
        except ApiError as error:
            if is_started:
                raise
            await error.response(path)(scope, receive, marked)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if self._key is None or not hmac.compare_digest(given.encode("latin-1"), self._key):
            raise ApiError(
                401,
                "api key: expected this server's key as Authorization: Bearer ... or x-api-key",
                kind="authentication_error",
                code="invalid_api_key",
            )

    def _too_large(self) -> ApiError:
        message = f"body: expected at most {self._max_bytes} bytes, got more"
        return ApiError(413, message, param="body", code="body_too_large")


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
    router = APIRouter(route_class=_JsonRoute)

    def post(path: str) -> Callable[[Handler], Handler]:
        return router.post(path, responses=_ERRORS, response_model=None)

    def get(path: str) -> Callable[[Handler], Handler]:
        return router.get(path, response_model=None)

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
        wish = read_wish("messages", await request.json())
        _, made = await service.chat_input(service.ready_model(), "messages", wish)
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
            ids = await asyncio.to_thread(model.tokenizer.encode, body.prompt, add_bos=body.add_special_tokens)
        else:
            _, made = await service.chat_input(model, "chat", read_wish("chat", await request.json()))
            ids = list(made.request.token_ids)
        document: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
        if body.return_token_strs:
            document["token_strs"] = [model.tokenizer.token_of(token_id) for token_id in ids]
        return _json(document)

    @post("/detokenize")
    async def detokenize(body: bodies.DetokenizeBody) -> Response:
        service.check_model_name(body.model)
        tokenizer = service.ready_model().tokenizer
        try:
            return _json({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})
        except PromptError as error:
            raise RequestError(f"tokens: {error}") from None

    @get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service, name) for name in service.settings.names]})

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(_model(service, service.check_model_name(name)))

    @get("/health")
    async def health() -> Response:
        failed = service.failure or (service.model is not None and service.model.engine.error)
        return JSONResponse({"status": "failed" if failed else "alive"}, 503 if failed else 200)

    @get("/ready")
    async def ready() -> Response:
        is_ready, waits_for = service.state()
        return JSONResponse(
            {"status": "ready"} if is_ready else {"status": "not ready", "waits_for": waits_for},
            200 if is_ready else 503,
        )

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


def _model(service: Service, name: str) -> dict[str, Any]:
    model = service.model
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "leadline",
        "max_model_len": None if model is None else model.max_model_len,
    }
