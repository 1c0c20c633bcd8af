"""Runs a server in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from leadline.server.app import create_app
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
        """As uvicorn's, which raises the signal again at the end: that would kill us before the cache is saved."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("stopping drain_seconds=%g", self._service.settings.drain_seconds)
        stopping = asyncio.ensure_future(self._service.stop(self._service.settings.drain_seconds))
        await super().shutdown(sockets)
        await stopping


def run(service: Service, host: str, port: int) -> None:
    """Serve on an address until SIGTERM or Ctrl-C. The socket opens at once, the model loads behind it.

    Raises: whatever loading the model raised.
    """
    grace = int(service.settings.drain_seconds + _GRACE_SECONDS)
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Server(config, service)

    async def announce() -> None:
        try:
            await service.loaded()
        except BaseException:
            server.should_exit = True
            raise
        model: Any = service.model
        address = f"http://{f'[{host}]' if ':' in host else host}:{_port(server, port)}"
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


def _port(server: uvicorn.Server, port: int) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1]) if server.servers else port
