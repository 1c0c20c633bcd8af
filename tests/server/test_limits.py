"""What a server takes in: how much, how long it waits for it, and what HTTP it answers plainly."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from leadline.server.app import MAX_OBJECTS, MAX_PARTS
from leadline.server.settings import ServerSettings
from leadline.text.tokenizer import Tokenizer
from tests.server.serving import Running, fake_server
from tests.server.test_clients import ASK

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
MIB = 1 << 20
READ_SECONDS = 0.6


@pytest.fixture(scope="module")
def whole() -> Iterator[Running]:
    """A server with the limits that operators get."""
    with fake_server() as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server that does not wait long for requests."""
    with fake_server(read_seconds=READ_SECONDS) as running:
        yield running


USER = b'{"messages":[{"role":"user","content":'
BIG: list[tuple[str, tuple[bytes, bytes, int, bytes], int]] = [  # head; part and how many, with commas; tail
    (CHAT, (USER + b"[", b'{"type":"text","text":""}', 30 * MIB // 26, b"]}]}"), 413),
    (CHAT, (USER + b'"x"}],"tools":[', b'{"type":"function"}', 30 * MIB // 20, b"]}"), 413),
    ("/v1/completions", (b'{"prompt":[', b"1", 15 * MIB, b"]}"), 413),
    ("/v1/completions", (b'{"prompt":[', b"129", 1_200_000, b',"x"]}'), 400),
    (CHAT, (b'{"messages":[', b'{"role":"user","content":"x"}', MAX_OBJECTS - 1, b"]}"), 400),
    (CHAT, (b'{"messages":[', b'{"role":"user","content":5}', MAX_OBJECTS - 1, b"]}"), 400),
    (CHAT, (USER + b'"x"}],"metadata":[', b'{"a":[]}', 130_000, b"]}"), 400),
    (CHAT, (USER + b'"', b"all of it, text", 2 * MIB // 16, b'"}]}'), 400),
]


@pytest.mark.parametrize(("path", "parts", "status"), BIG)
def test_big_bodies_do_not_hold_up_others(
    whole: Running, path: str, parts: tuple[bytes, bytes, int, bytes], status: int
) -> None:
    head, part, count, tail = parts
    body = head + b",".join([part] * count) + tail
    found: list[httpx.Response] = []

    def post() -> None:
        headers = {"content-type": "application/json"}
        found.append(httpx.post(whole.url + path, content=body, headers=headers, timeout=60))

    def longest_wait() -> float:
        thread, longest = threading.Thread(target=post), 0.0
        with httpx.Client(base_url=whole.url, timeout=60) as client:
            client.get("/health")
            thread.start()
            while thread.is_alive():
                start = time.perf_counter()
                assert client.get("/health").status_code == 200
                longest = max(longest, time.perf_counter() - start)
                time.sleep(0.005)
        return longest

    # Other work of the machine may hold up one try; a body that holds up the server does it in each.
    assert any(longest_wait() < 0.5 for _ in range(3))
    assert found[0].status_code == status, found[0].text
    assert found[0].json()["error"]["param"]


def test_a_million_tokens_and_images_have_room() -> None:
    settings = ServerSettings()
    ids = json.dumps({"prompt": [129_279] * (1 << 20)})
    assert ids.count(",") + 4 * (ids.count("[") + ids.count("{")) <= MAX_PARTS
    images = settings.max_images * 512 * 1024 * 4 / 3
    escaped = 6 * 1.5 * (1 << 20)  # of Chinese, where a token has one and a half characters
    assert images + escaped <= settings.max_body_bytes


def answer(running: Running, *pieces: bytes, wait: float = 0.0) -> tuple[bytes, float]:
    """All that comes back for pieces sent `wait` seconds apart, until the server closes, and the seconds it took."""
    port = int(running.url.rpartition(":")[2])
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break  # it has closed
            time.sleep(wait)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
        except ConnectionResetError:
            pass
    return received, time.monotonic() - start


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


HALF_SENT: list[tuple[tuple[bytes, ...], float]] = [  # pieces, and the seconds between them
    ((b"",), 0.0),
    ((b"POST /v1/chat",), 0.0),
    ((HEAD,), 0.0),
    ((HEAD + b"Content-Length: 100\r\n\r\n",), 0.0),
    ((HEAD + b'Content-Length: 100\r\n\r\n{"messages"',), 0.0),
    ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{    \r\n",), 0.0),
    ((HEAD, *[b"X-A: b\r\n"] * 20), 0.1),
    ((HEAD + b"Content-Length: 100\r\n\r\n", *[b" "] * 20), 0.1),
]


def test_half_sent_requests_get_a_408(hasty: Running) -> None:
    """All at the same time."""
    with ThreadPoolExecutor(len(HALF_SENT)) as pool:
        answers = list(pool.map(lambda case: answer(hasty, *case[0], wait=case[1]), HALF_SENT))
    for (pieces, wait), (received, seconds) in zip(HALF_SENT, answers, strict=True):
        assert seconds < 5, pieces
        if received or not wait:  # a client that goes on sending to a closed connection may lose the answer
            head, _, body = received.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 "), pieces
            assert b"connection: close" in head.lower(), pieces
            assert b"x-request-id: " in head.lower(), pieces
            assert json.loads(body)["error"]["code"] == "read_timeout", pieces


def test_a_second_request_of_a_connection_has_to_come_too(hasty: Running) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    received, seconds = answer(hasty, health, HEAD, wait=0.1)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in received
    assert seconds < 4  # uvicorn's own time for idle connections is 5 seconds


def test_slow_answers_and_pauses_are_no_slow_requests(hasty: Running) -> None:
    hasty.engine.script, hasty.engine.step_seconds = "word " * 4, 0.12
    with httpx.Client(base_url=hasty.url, timeout=20) as client:
        for pause, stream in ((0.0, True), (1.5 * READ_SECONDS, False)):
            time.sleep(pause)
            start = time.monotonic()
            found = client.post(CHAT, json={"messages": ASK, "stream": stream})
            assert time.monotonic() - start > READ_SECONDS
            assert found.status_code == 200
            assert "read_timeout" not in found.text
        hasty.engine.step_seconds = 0.0


LONG = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000


@pytest.mark.parametrize(
    ("request_bytes", "status", "word"),
    [
        (b"\x16\x03\x01 hello\r\n\r\n", b"400", "HTTP/1.1"),
        (b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", b"505", "HTTP/1.1, got HTTP/9.9"),
        (b"GET /health HTTP/0.9\r\n\r\n", b"505", "HTTP/1.1, got HTTP/0.9"),
        (LONG, b"431", "16384 bytes"),
        (LONG + b"\r\nConnection: close\r\n\r\n", b"431", "16384 bytes"),
    ],
    ids=["tls", "version 9", "version 0", "long head without an end", "long head"],
)
def test_what_is_no_request_of_ours(hasty: Running, request_bytes: bytes, status: bytes, word: str) -> None:
    received, _ = answer(hasty, request_bytes)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b" ")
    assert b"x-request-id: " in head.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert word in error["message"]


def test_head_requests(whole: Running) -> None:
    connection = http.client.HTTPConnection(whole.url.removeprefix("http://"), timeout=10)
    for path in ("/health", "/ready", "/", "/v1/models", "/version", "/metrics"):
        connection.request("HEAD", path)
        found = connection.getresponse()
        assert (found.status, found.read()) == (200, b""), path
        assert int(found.headers["content-length"]) > 0
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"alive"}'
    connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 5}),
        ("/v1/responses", lambda text: {"input": text}),
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_a_prompt_that_is_far_too_long_is_not_read_whole(
    whole: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    read: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: bool) -> list[int]:
        read.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    found = httpx.post(whole.url + path, json=body("a " * (4 << 20)))
    assert found.status_code == 400
    assert "expected at most 4999 tokens" in found.json()["error"]["message"]
    assert "got more than 9998" in found.json()["error"]["message"]
    assert sum(read) < 1 << 19


def test_texts_beyond_the_context_are_tokenized_up_to_a_million_tokens(whole: Running) -> None:
    found = httpx.post(whole.url + "/tokenize", json={"prompt": "a " * 10_000}, timeout=60)
    assert found.status_code == 200
    assert found.json()["count"] > 2 * 5000
    found = httpx.post(whole.url + "/tokenize", json={"prompt": "a " * (4 << 20)}, timeout=60)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")
    assert "expected at most 1048576 tokens (a million, or the context)" in found.json()["error"]["message"]


def test_wrong_methods_tell_the_right_one(whole: Running) -> None:
    found = httpx.get(whole.url + CHAT)
    assert (found.status_code, found.headers["allow"]) == (405, "POST")
    assert found.json()["error"]["type"] == "invalid_request_error"
    for path in ("/", "/health", "/metrics", "/v1/models"):
        assert httpx.delete(whole.url + path).headers["allow"] == "GET"


def test_a_slash_too_many_is_another_path(whole: Running) -> None:
    for method, path in (("POST", CHAT + "/"), ("GET", "/health/"), ("GET", "/v1/models/")):
        found = httpx.request(method, whole.url + path)
        assert (found.status_code, "error" in found.json()) == (404, True), path
    assert httpx.post(whole.url + "/v1/messages/").json()["error"]["type"] == "not_found_error"


def test_websockets_are_refused_in_plain_words(whole: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    for path in ("/", CHAT, "/nothing"):
        found = httpx.get(whole.url + path, headers=headers)
        assert (found.status_code, found.json()["error"]["param"]) == (400, "upgrade")
    assert "pip install" not in caplog.text


def test_unexpected_failures_have_a_request_id(whole: Running, caplog: pytest.LogCaptureFixture) -> None:
    whole.engine.refuse = RuntimeError("oops")
    try:
        found = httpx.post(whole.url + CHAT, json={"messages": ASK}, headers={"X-Request-Id": "mine"})
    finally:
        whole.engine.refuse = None
    assert (found.status_code, found.headers["x-request-id"]) == (500, "mine")
    assert found.json()["error"]["code"] == "internal_error"
    assert "request=mine" in caplog.text


def test_the_schema_is_behind_the_key() -> None:
    document: Any
    with fake_server(api_key="k", plain=True) as running:
        assert httpx.get(running.url + "/openapi.json").status_code == 401
        document = httpx.get(running.url + "/openapi.json", headers={"x-api-key": "k"}).json()
    assert CHAT in document["paths"]
    assert "head" not in document["paths"]["/health"]
