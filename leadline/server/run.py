"""Runs a server in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from leadline.server.app import MAX_HEAD, create_app, head_too_large
from leadline.server.errors import ApiError, request_id_of, too_slow
from leadline.server.service import Service

logger = logging.getLogger("leadline.server")

_GRACE_SECONDS = 5.0  # for the last bytes of answers, after the engine has ended them


class _Server(uvicorn.Server):
    """Told to stop, it takes no more connections, lets answers end while the service drains, and then closes."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which raises the signal again at the end: that would kill us before the cache is saved. After a
        second signal nothing drains any longer: answers that still run get the error."""
        loop = asyncio.get_running_loop()

        def handle(number: int, frame: FrameType | None) -> None:
            if self.should_exit:
                loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._service.stop(0.0)))
            self.should_exit = True

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("stopping drain_seconds=%g", self._service.settings.drain_seconds)
        stopping = asyncio.ensure_future(self._service.stop(self._service.settings.drain_seconds))
        cutting = asyncio.ensure_future(self._cut(stopping))
        await super().shutdown(sockets)
        await stopping
        cutting.cancel()

    async def _cut(self, stopping: asyncio.Future[None]) -> None:
        """Hang up on clients that have not read their answer, or sent their request, some time after the end of all."""
        await asyncio.wait((stopping,))
        await asyncio.sleep(_GRACE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Protocol(H11Protocol):
    """Closes a connection whose next request does not begin, with line and headers whole, in `seconds`: uvicorn waits
    for ever. Bodies have the same time, see `app.py`. What is not HTTP gets an error in the usual form, too."""

    def __init__(self, *args: Any, seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def send_400_response(self, msg: str) -> None:
        is_long = getattr(sys.exception(), "error_status_hint", 400) == 431  # uvicorn is handling an error of h11's
        other = ApiError(400, f"request: expected HTTP/1.1; {msg}", headers={"Connection": "close"})
        self._refuse(head_too_large() if is_long else other)

    def _should_upgrade(self) -> bool:
        return False  # the application refuses; uvicorn would log how to install a library for websockets

    def _watch(self) -> None:
        """The time runs from the first sign of a request to the moment in which the application has it."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_busy and self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._give_up)

    def _give_up(self) -> None:
        if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(too_slow(self._seconds))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        response = error.response("")
        headers = [*response.raw_headers, (b"x-request-id", request_id_of("").encode())]
        for event in (h11.Response(status_code=error.status_code, headers=headers),
                      h11.Data(data=bytes(response.body)), h11.EndOfMessage()):  # fmt: skip
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def server_config(service: Service, host: str, port: int) -> uvicorn.Config:
    """How uvicorn has to serve the application: no websockets, times and grace as the settings say."""
    protocol: Any = partial(_Protocol, seconds=service.settings.read_seconds)
    return uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=int(service.settings.drain_seconds + 2 * _GRACE_SECONDS),
    )


def run(service: Service, host: str, port: int) -> None:
    """Serve on an address until SIGTERM or Ctrl-C. The socket opens at once, the model loads behind it.

    Raises: whatever loading the model raised.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(server_config(service, host, port), service)

    async def announce() -> None:
        try:
            await service.loaded()
        except BaseException:
            server.should_exit = True
            raise
        model: Any = service.model
        bound = server.servers[0].sockets[0].getsockname()[1] if server.servers else port
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        logger.info("serving address=%s model=%s context=%d cache_tokens=%d", address, service.settings.names[0],
                    model.max_model_len, model.cache_tokens)  # fmt: skip

    async def main() -> None:
        announcing = asyncio.ensure_future(announce())
        await server.serve()
        if not announcing.done():
            announcing.cancel()
        elif (failure := announcing.exception()) is not None:
            raise failure

    asyncio.run(main())
