"""A real uvicorn on a free port around a scripted engine, for tests of the protocols."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn

from leadline.config.model import read_config
from leadline.server.run import server_config
from leadline.server.service import ServedModel, Service
from leadline.server.settings import ServerSettings
from leadline.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.released_tokenizer import released_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = read_config(GOLDEN / "released_config.json")
NAME = "leadline-test"


def released_parts() -> tuple[Tokenizer, Any]:
    return released_tokenizer(RELEASED), RELEASED.vision


def plain_parts() -> tuple[Tokenizer, Any]:
    """A small vocabulary without control tokens."""
    config = read_config(GOLDEN / "models" / "vision" / "config.json")
    return Tokenizer.load(GOLDEN / "models" / "vision", config), config.vision


def fake_model(engine: FakeEngine, vision: Any) -> ServedModel:
    def encode(images: list[Any]) -> torch.Tensor:
        tokens = sum(image.plan.num_tokens for image in images)
        return torch.zeros(tokens, 1, dtype=torch.bfloat16)

    return ServedModel(
        tokenizer=engine.tokenizer,
        vision=vision,
        encode_images=encode,
        engine=engine,
        max_model_len=5000,
        cache_tokens=5000,
    )


class Running:
    """A server that runs: its address, service and engine."""

    def __init__(self, url: str, service: Service, engine: Any, server: uvicorn.Server) -> None:
        self.url, self.service, self.engine, self.server = url, service, engine, server

    def until(self, condition: Any, seconds: float = 10.0) -> None:
        """Wait for something that the server does in its own time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.005)


@contextmanager
def serving(service: Service, engine: Any, wait: bool = True) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = server_config(service, "127.0.0.1", port)
    config.timeout_graceful_shutdown = 5
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    running = Running(f"http://127.0.0.1:{port}", service, engine, server)
    running.until(lambda: server.started and (service.model is not None or not wait))
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def fake_server(*, plain: bool = False, **settings: Any) -> Iterator[Running]:
    tokenizer, vision = plain_parts() if plain else released_parts()
    engine = FakeEngine(tokenizer)
    service = Service(ServerSettings(names=(NAME,), **settings), lambda progress: fake_model(engine, vision))
    with serving(service, engine) as running:
        yield running
