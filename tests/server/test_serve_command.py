"""`leadline serve`: its options, and a real process with the small default model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from typer.testing import CliRunner

from leadline.cli import main as cli_main
from leadline.errors import CheckpointError, LeadlineError
from tests.server.test_clients import ASK, data_url

MODEL = Path(__file__).parent.parent / "golden" / "models" / "everything"
START_SECONDS = 120  # on a busy machine
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/messages": {"messages": ASK},
    "/v1/responses": {"input": "hi"},
    "/v1/completions": {"prompt": "x"},
}
CODE = "from leadline.cli.main import main; main()"
COMMAND = [sys.executable, "-c", CODE, "serve"]
HASTY = [sys.executable, "-c", f"import leadline.server.run as run; run._GRACE_SECONDS = 1.0; {CODE}", "serve"]


@pytest.mark.unit
def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("leadline.cli.serve.run", lambda *given: ran.append(given))
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)
    line = "serve some/model --port 0 --host 0.0.0.0 --served-model-name a --served-model-name b --no-image-urls "
    line += "--max-body-mib 2 --drain-timeout 3 --request-timeout 9 --log-prompts --max-images 1"
    found = CliRunner().invoke(cli_main.app, line.split(), env={"LEADLINE_API_KEY": "k"})
    assert found.exit_code == 0, found.output
    ((service, host, port),) = ran
    settings = service.settings
    assert (host, port) == ("0.0.0.0", 0)
    assert settings.names == ("a", "b")
    assert (settings.api_key, settings.image_urls, settings.max_body_bytes) == ("k", False, 2 << 20)
    assert (settings.drain_seconds, settings.request_seconds, settings.max_images) == (3, 9, 1)
    assert settings.log_prompts
    assert "'k'" not in repr(settings)
    monkeypatch.delenv("LEADLINE_API_KEY", raising=False)
    CliRunner().invoke(cli_main.app, ["serve"])
    service, host, port = ran[1]
    assert (service.settings.names, service.settings.api_key) == (("leadline",), None)
    assert (host, port) == ("127.0.0.1", 8000)


@contextmanager
def process(*options: str, command: list[str] = COMMAND) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server process, its address, and its log up to the line that tells it."""
    command = [*command, "--port", "0", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stderr is not None
            log: list[str] = []
            while not (address := re.search(r"serving address=(\S+)", log[-1] if log else "")):
                line = child.stderr.readline()
                assert line, "".join(log)
                log.append(line)
            yield child, address[1], log
        finally:
            child.kill()


@pytest.mark.tiny
def test_small_model_end_to_end() -> None:
    with process("--drain-timeout", "5") as (child, url, log):
        assert len([line for line in log if " INFO " in line]) == 1
        assert "context=" in log[-1]
        client = openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0, timeout=60)
        claude = anthropic.Anthropic(base_url=url, api_key="-", max_retries=0, timeout=60)
        with client, claude:
            (model,) = client.models.list().data
            asked: Any = {"model": model.id, "temperature": 0, "max_tokens": 12}
            whole = client.chat.completions.create(messages=ASK, **asked)
            pieces = list(client.chat.completions.create(messages=ASK, **asked, stream=True))
            reasoning = "".join(getattr(piece.choices[0].delta, "reasoning", None) or "" for piece in pieces)
            assert whole.choices[0].message.model_dump().get("reasoning", "") == reasoning
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"
            parts: Any = [{"type": "image_url", "image_url": {"url": data_url()}}, {"type": "text", "text": "?"}]
            seen = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
            assert seen.usage is not None
            assert seen.usage.prompt_tokens > whole.usage.prompt_tokens
            text = client.completions.create(prompt="The", **asked).choices[0].text
            streamed = client.completions.create(prompt="The", **asked, stream=True)
            assert "".join(piece.choices[0].text for piece in streamed) == text
            assert claude.messages.create(model=model.id, messages=ASK, max_tokens=12).usage.output_tokens <= 12
            answer = client.responses.create(model=model.id, input="hi", max_output_tokens=12, temperature=0)
            assert answer.usage is not None
            off = {"thinking": {"type": "disabled"}}
            shape: Any = {"type": "json_object"}
            asked["max_tokens"] = 64
            json_text = client.chat.completions.create(messages=ASK, **asked, response_format=shape, extra_body=off)
            assert (json_text.choices[0].message.content or "").startswith("{")
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=model.id, prompt="word " * 400_000)
            assert refused.value.param == "prompt"
            assert answer.usage.output_tokens <= 12
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


@contextmanager
def streaming(url: str, tokens: int) -> Iterator[dict[str, Future[list[str]]]]:
    """A stream of so many tokens in each protocol, all of them begun; their lines come when they have ended."""
    begun = threading.Barrier(len(STREAMS) + 1, timeout=START_SECONDS)

    def read(path: str) -> list[str]:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {**STREAMS[path], limit: tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + path, json=body, timeout=START_SECONDS) as response:
            lines = response.iter_lines()
            first = next(lines)
            begun.wait()
            return [line for line in (first, *lines) if line]

    with ThreadPoolExecutor(len(STREAMS)) as pool:
        streams = {path: pool.submit(read, path) for path in STREAMS}
        begun.wait()
        yield streams


def wait_until_refused(url: str) -> None:
    """A signal takes effect within a tenth of a second."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            if httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 503:
                return
        except httpx.TransportError:
            return
    raise AssertionError("new requests are still taken")


def log_after_the_end(child: subprocess.Popen[str], seconds: float) -> str:
    """What the server wrote from the signal on; it must have ended in time, and well."""
    assert child.wait(seconds) == 0
    assert child.stderr is not None
    _, _, log = child.stderr.read().partition(" stopping ")
    assert log
    assert not re.search("Traceback|ERROR|WARNING", log), log
    return log


@pytest.mark.tiny
def test_a_second_signal_ends_the_draining() -> None:
    """A client that never sends the rest of its request is cut off a little later."""
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
    with process("--drain-timeout", "20", command=HASTY) as (child, url, _):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as late, streaming(url, 4000) as streams:
            late.sendall(half)
            child.send_signal(signal.SIGTERM)
            wait_until_refused(url)
            child.send_signal(signal.SIGINT)
            for lines in streams.values():
                error = json.loads(lines.result(10)[-1].removeprefix("data: "))["error"]
                assert error["message"] == "engine: it has stopped before the answer ended; ask again later"
            log = log_after_the_end(child, 10)
        assert log.count("finish=cancelled") == len(STREAMS)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (["--api-key", ""], None, "--api-key: expected a key, got an empty text"),
        ([], "", "--api-key: expected a key, got an empty text"),
        (["--cache-file", "x", "--max-snapshots", "0"], None, "--cache-file: expected none with max_snapshots 0"),
    ],
)
def test_options_that_would_mislead_are_refused_at_the_start(
    options: list[str], env: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leadline.cli.serve.run", lambda *_: None)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    if env is not None:
        monkeypatch.setenv("LEADLINE_API_KEY", env)
    assert str(CliRunner().invoke(cli_main.app, ["serve", *options]).exception).startswith(message)


@pytest.fixture(scope="module")
def cache_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "prefixes"


@pytest.mark.tiny
def test_sigterm_drains_kill_leaves_nothing_behind_and_restarts_hit(cache_file: Path) -> None:
    options = ("--drain-timeout", "30", "--cache-file", str(cache_file))
    body = {"prompt": list(range(3, 203)), "max_tokens": 10, "temperature": 0}
    endless = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with process(*options) as (child, url, _):
        first = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        with streaming(url, 80) as streams:
            child.send_signal(signal.SIGTERM)
            wait_until_refused(url)
            ends = {path: lines.result()[-1] for path, lines in streams.items()}
        assert ends["/v1/chat/completions"] == ends["/v1/completions"] == "data: [DONE]"
        assert ends["/v1/messages"] == 'data: {"type": "message_stop"}'
        response = json.loads(ends["/v1/responses"].removeprefix("data: "))
        assert (response["type"], response["response"]["usage"]["output_tokens"]) == ("response.incomplete", 80)
        ended = re.findall("finish=length .* completion_tokens=80 ", log_after_the_end(child, 20))
        assert len(ended) == len(STREAMS)
    assert cache_file.exists()
    port = url.rpartition(":")[2]
    for is_killed in (True, False):
        drain = () if is_killed else ("--drain-timeout", "0.3")
        with process(*options, *drain, "--port", port) as (child, again, _):
            assert again == url
            second = httpx.post(url + "/v1/completions", json=body, timeout=60).json()
            assert second["choices"] == first["choices"]
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
            if is_killed:
                with httpx.stream("POST", url + "/v1/completions", json=endless, timeout=60) as response:
                    lines = response.iter_lines()
                    next(lines)
                    child.kill()
                    with pytest.raises(httpx.HTTPError):
                        list(lines)
            else:
                with streaming(url, 4000) as streams:
                    child.send_signal(signal.SIGTERM)
                    ends = {path: lines.result()[-1] for path, lines in streams.items()}
                for end in ends.values():
                    error = json.loads(end.removeprefix("data: "))["error"]
                    assert error["message"] == "engine: it has stopped before the answer ended; ask again later"
                assert log_after_the_end(child, 10).count("finish=cancelled") == len(STREAMS)
    assert [path.name for path in cache_file.parent.iterdir()] == [cache_file.name]


@pytest.mark.tiny
def test_cache_files_that_do_not_fit_are_refused(
    cache_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: str, path: Path) -> BaseException | None:
        monkeypatch.setattr("leadline.cli.serve.run", lambda service, *_: service._load(lambda done, total: None))
        monkeypatch.setattr("logging.basicConfig", lambda **options: None)
        return CliRunner().invoke(cli_main.app, ["serve", model, "--cache-file", str(path)]).exception

    if not cache_file.exists():
        pytest.skip("the test before has not written the file")
    whole = cache_file.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    error = load("", damaged)
    assert isinstance(error, CheckpointError)
    assert str(error) == f"{damaged}: not a saved prefix cache, or damaged: its check sum does not fit; delete it"
    error = load(str(MODEL), cache_file)
    assert isinstance(error, CheckpointError)
    assert "a saved prefix cache with model" in str(error)
    assert damaged.exists()
    assert cache_file.read_bytes() == whole
    error = load("", tmp_path / "no" / "file")
    assert isinstance(error, LeadlineError)
    assert str(error).startswith("--cache-file: expected a file in a folder that exists")


@pytest.mark.unit
def test_missing_model_ends_the_process() -> None:
    command = [*COMMAND, "/no/such/model", "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert found.returncode == 1
    assert "/no/such/model" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
