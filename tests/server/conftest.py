from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
import torch

from leadline.cli.serve import served_model
from leadline.llm import LLM
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from tests.server.serving import NAME, Running, fake_server, serving


@pytest.fixture(scope="session")
def _released() -> Iterator[Running]:
    with fake_server(max_body_bytes=4 << 20, max_images=4) as running:
        yield running


@pytest.fixture(scope="session")
def _plain() -> Iterator[Running]:
    with fake_server(plain=True) as running:
        yield running


def _reset(running: Running) -> Running:
    engine = running.engine
    engine.script, engine.step_seconds, engine.refuse, engine.nan_at, engine.cached = "ok", 0.0, None, None, 0
    engine.cuts = None
    engine.requests.clear()
    return running


@pytest.fixture
def server(_released: Running) -> Running:
    """Serves the released vocabulary; what the engine says is the test's affair."""
    return _reset(_released)


@pytest.fixture
def plain_server(_plain: Running) -> Running:
    return _reset(_plain)


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=20) as found:
        yield found


@pytest.fixture
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=20) as found:
        yield found


@pytest.fixture(scope="session")
def real() -> Iterator[Running]:
    """The small default model on the real engine."""
    llm = LLM(max_num_seqs=4, max_cache_tokens=1 << 14)
    torch.set_num_threads(1)
    model = served_model(llm)
    with serving(Service(ServerSettings(names=(NAME,)), lambda progress: model), model.engine) as running:
        yield running
