"""Keys, queues, hang-ups, failures, loading and stopping."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from leadline.errors import CapacityError, CheckpointError, PromptError
from leadline.server import service as service_module
from leadline.server.app import PAGE, create_app
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from tests.server.serving import NAME, Running, fake_model, fake_server, plain_parts, serving
from tests.server.test_clients import ASK
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
PATHS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": ASK}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 100_000}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 100_000}),
    ("/v1/responses", {"input": "x"}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_request(server: Running, path: str, body: dict[str, Any], stream: bool) -> None:
    server.engine.script, server.engine.step_seconds = "word " * 5000, 0.01
    with httpx.Client(base_url=server.url) as client:
        try:
            with client.stream(
                "POST", path, json={**body, "stream": stream}, timeout=10 if stream else 0.5
            ) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not stream
        assert server.engine.requests
    server.until(lambda: not server.engine.open_streams)


def test_hanging_up_while_the_prompt_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is noticed at once; what the thread has read in the end goes to nobody."""
    caplog.set_level(logging.INFO, "leadline.server")
    begun, go_on, render = threading.Event(), threading.Event(), service_module.render_request

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return render(*args, **options)

    monkeypatch.setattr(service_module, "render_request", slow)
    try:
        with httpx.Client(base_url=server.url) as client, pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json={"messages": ASK}, timeout=0.3)
        assert begun.is_set()
        server.until(lambda: "the client is gone" in caplog.text)
    finally:
        go_on.set()
    assert httpx.post(server.url + CHAT, json={"messages": ASK}).status_code == 200
    assert len(server.engine.requests) == 1


def test_hanging_up_before_the_first_event() -> None:
    """The client goes after the engine has taken the request and before the stream begins."""
    tokenizer, vision = plain_parts()
    engine = FakeEngine(tokenizer, "word " * 100, step_seconds=0.01)

    async def run() -> list[Any]:
        service = Service(ServerSettings(), lambda progress: fake_model(engine, vision))
        service.model = fake_model(engine, vision)
        messages: Any = [{"type": "http.request", "body": json.dumps({"prompt": "x", "stream": True}).encode()}]
        sent, calls = [], 0

        async def receive() -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:  # while the request is prepared
                await asyncio.sleep(60)
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            await asyncio.sleep(0.01)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("x", 1)}
        await create_app(service)(scope, receive, send)
        return sent

    sent = asyncio.run(run())
    assert len(engine.requests) == 1
    assert len(sent) <= 1
    assert not engine.open_streams


def test_full_queue(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    server.engine.queue_full()
    for stream in (True, False):
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=NAME, messages=ASK, stream=stream)
        assert refused.value.response.headers["retry-after"] == "3"
        assert refused.value.code == "queue_full"
    with pytest.raises(anthropic.RateLimitError):
        claude.messages.create(model=NAME, messages=ASK, max_tokens=5)


@pytest.mark.parametrize(
    "error",
    [
        PromptError("prompt: expected at most 99 tokens (the context less one), got 200; shorten it"),
        CapacityError("prompt 0: 200 tokens needed with the first answer token, 128 fit in the free cache"),
    ],
)
def test_too_long_prompt(server: Running, http: httpx.Client, error: Any) -> None:
    server.engine.refuse = error
    for path, body in PATHS:
        for stream in (True, False):
            found = http.post(path, json={**body, "stream": stream})
            assert found.status_code == 400
            assert found.json()["error"]["param"] == "prompt"
    assert http.post(CHAT, json={"messages": ASK}).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_row_that_is_not_a_number_ends_its_request(
    server: Running, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    server.engine.script, server.engine.nan_at = "one two three four", 3
    found = http.post(path, json=body)
    assert found.status_code == 500
    assert "NaN" in found.json()["error"]["message"]
    text = http.post(path, json={**body, "stream": True}).text
    last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
    assert "NaN" in json.loads(last[6:])["error"]["message"]
    assert "[DONE]" not in text
    server.engine.nan_at = None
    assert http.post(path, json=body).status_code == 200
    errors = [
        line for line in http.get("/metrics").text.splitlines() if line.startswith("leadline:numerics_errors_total")
    ]
    assert float(errors[0].split()[-1]) >= 2


def test_clients_see_errors_inside_streams(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    server.engine.script, server.engine.nan_at = "one two three four", 3
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.chat.completions.create(model=NAME, messages=ASK, stream=True))
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(model=NAME, prompt="x", stream=True))
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.responses.create(model=NAME, input="x", stream=True))
    with pytest.raises(anthropic.APIStatusError, match="NaN"):
        list(claude.messages.create(model=NAME, messages=ASK, max_tokens=9, stream=True))


def test_unexpected_failure_is_a_500_that_keeps_its_words(
    server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.refuse = RuntimeError("secret path /x")
    found = http.post(CHAT, json={"messages": ASK})
    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in found.text
    assert "secret" in caplog.text


def test_api_key() -> None:
    with fake_server(api_key="schlüssel") as running, httpx.Client(base_url=running.url) as client:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert client.get("/").status_code in (200, 404)
        for headers in ({}, {"Authorization": "Bearer no"}, {"x-api-key": "schl"}, {"Authorization": "Basic x"}):
            found = client.get("/v1/models", headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.post(CHAT, json={"messages": ASK}).status_code == 401
        assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        for name, value in (("Authorization", "Bearer schlüssel"), ("x-api-key", "schlüssel")):
            found = client.get("/v1/models", headers=[(name.encode(), value.encode())])
            assert found.status_code == 200


def test_request_ids(http: httpx.Client) -> None:
    own = http.get("/health", headers={"x-request-id": "abc-1.2_3"}).headers
    assert own["x-request-id"] == "abc-1.2_3"
    assert own["x-content-type-options"] == "nosniff"
    for bad in ("a b", "x" * 65, "a\u00e9".encode().decode("latin-1"), ""):
        made = http.get("/health", headers=[(b"x-request-id", bad.encode("latin-1"))]).headers["x-request-id"]
        assert made != bad
        assert len(made) == 24
    body = http.post(CHAT, json={"messages": ASK}, headers={"x-request-id": "mine"}).json()
    assert body["id"] == "chatcmpl-mine"


def test_logs_hold_no_text_unless_asked(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "very secret words"
    http.post(CHAT, json={"messages": [{"role": "user", "content": secret}]})
    http.post(CHAT, json={"messages": [{"role": "user", "content": secret}], "temperature": secret})
    http.post("/v1/completions", json={"prompt": secret})
    assert secret not in caplog.text
    assert "finish=stop prompt_tokens=" in caplog.text
    with fake_server(log_prompts=True) as running:
        httpx.post(running.url + CHAT, json={"messages": [{"role": "user", "content": secret}]})
    assert secret in caplog.text


def test_metrics(server: Running, http: httpx.Client) -> None:
    server.engine.cached = 3
    http.post(CHAT, json={"messages": ASK, "stream": True})
    text = http.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "leadline:numerics_errors_total",
    ):
        assert f'\n{name}{{model_name="{NAME}"}} ' in text
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{NAME}"}}' in text


def test_page(http: httpx.Client) -> None:
    found = http.get("/")
    if PAGE.exists():
        assert found.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in found.headers["content-security-policy"]
    else:
        assert found.status_code == 404


def test_loading() -> None:
    tokenizer, vision = plain_parts()
    engine, go = FakeEngine(tokenizer), threading.Event()

    def load(progress: Any) -> Any:
        progress(30, 100)
        go.wait(20)
        return fake_model(engine, vision)

    service = Service(ServerSettings(names=(NAME,)), load)
    with serving(service, engine, wait=False) as running, httpx.Client(base_url=running.url) as client:
        running.until(lambda: "30 %" in service.waits_for)
        waiting = client.get("/ready")
        assert (waiting.status_code, waiting.json()["waits_for"]) == (503, "the model to be loaded: 30 %")
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        found = client.get("/v1/models")
        assert found.status_code == 200
        assert abs(found.json()["data"][0]["created"] - time.time()) < 600
        for path, body in (*PATHS, ("/tokenize", {"prompt": "x"})):
            found = client.post(path, json=body)
            assert (found.status_code, "retry-after" in found.headers) == (503, True)
            assert "30 %" in found.json()["error"]["message"]
        go.set()
        running.until(lambda: service.model is not None)
        assert client.get("/ready").status_code == 200
        assert client.post(CHAT, json={"messages": ASK}).status_code == 200


def test_loading_fails() -> None:
    tokenizer, _ = plain_parts()

    def load(progress: Any) -> Any:
        raise CheckpointError("model: no such folder")

    service = Service(ServerSettings(), load)
    with serving(service, FakeEngine(tokenizer), wait=False) as running:
        running.until(lambda: service.failure is not None)
        assert httpx.get(running.url + "/health").status_code == 503
        assert "CheckpointError" in httpx.get(running.url + "/ready").text
        with pytest.raises(CheckpointError):
            asyncio.run(asyncio.wait_for(service.loaded(), 1))


def test_dead_engine(server: Running, http: httpx.Client) -> None:
    server.engine.error = RuntimeError("broken")
    try:
        assert http.get("/health").status_code == 503
        assert http.post(CHAT, json={"messages": ASK}).status_code == 503
    finally:
        server.engine.error = None


@pytest.mark.parametrize("drain", [5.0, 0.2])
def test_stopping_drains(drain: float) -> None:
    with fake_server() as running, httpx.Client(base_url=running.url, timeout=20) as client:
        running.engine.script, running.engine.step_seconds = "word " * 50, 0.01
        with client.stream("POST", CHAT, json={"messages": ASK, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            loop: Any = running.server.servers[0].get_loop()
            stopping = asyncio.run_coroutine_threadsafe(running.service.stop(drain), loop)
            running.until(lambda: running.service.is_draining)
            with httpx.Client(base_url=running.url) as other:
                assert other.get("/ready").status_code == 503
                assert other.post(CHAT, json={"messages": ASK}).status_code == 503
            rest = list(lines)
        stopping.result(10)
        ended = "data: [DONE]" in rest
        assert ended == (drain == 5.0)
        if not ended:
            assert "stopped" in [line for line in rest if line][-1]


def test_many_at_once(server: Running) -> None:
    server.engine.script, server.engine.step_seconds = "why</think>one two three", 0.001

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:

            async def one() -> str:
                found = await client.chat.completions.create(model=NAME, messages=ASK)
                return found.choices[0].message.content or ""

            return await asyncio.gather(*[one() for _ in range(40)])

    start = time.monotonic()
    assert asyncio.run(ask()) == ["one two three"] * 40
    assert time.monotonic() - start < 20
    assert not server.engine.open_streams
