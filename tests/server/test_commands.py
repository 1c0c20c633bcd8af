"""`leadline bench serve` and `leadline chat --url` against a server over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.server.serving import Running, fake_server

pytestmark = pytest.mark.tiny

SECONDS = 60  # for a subprocess on a busy machine


def leadline(*args: str, **options: object) -> subprocess.Popen[str]:
    code = "import sys, leadline.cli.main as m; sys.argv = ['leadline', *sys.argv[1:]]; m.main()"
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "NO_COLOR": "1"}, **options,
    )  # fmt: skip


def test_bench_serve(server: Running) -> None:
    server.engine.script = "word " * 50
    server.engine.cached = 8
    process = leadline(
        *("bench", "serve", "--url", server.url, "--sessions", "10", "--turns", "2", "--cancel", "0.3", "--seed", "1"),
        *("--input-len", "8:40", "--output-len", "4:9", "--shared-prefix", "16", "--request-rate", "200"),
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    document = json.loads(out.splitlines()[-1])
    assert document["completed"] + document["cancelled"] == 20
    assert document["cancelled"] > 0
    assert document["failed"] == 0
    completed = document["completed"]
    assert document["cached_share"] == pytest.approx(8 * completed / document["total_input_tokens"])
    assert 4 * completed <= document["total_output_tokens"] <= 9 * completed
    assert len(server.engine.requests) <= 20  # one dropped at once may never have come so far
    server.until(lambda: not server.engine.open_streams)


def test_ctrl_c_in_bench_serve_prints_what_was_measured_and_frees_the_server(server: Running) -> None:
    server.engine.script = "word " * 100_000
    server.engine.step_seconds = 0.01
    process = leadline(
        *("bench", "serve", "--url", server.url, "--sessions", "500", "--max-concurrency", "2", "--json"),
        *("--output-len", "5"),
    )
    server.until(lambda: len(server.engine.requests) > 6, SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["completed"] >= 4
    assert "Traceback" not in err
    server.until(lambda: not server.engine.open_streams)


def test_chat_with_a_server(server: Running) -> None:
    server.engine.script = "A thought.</think>An answer."
    process = leadline("chat", "--url", server.url)
    out, err = process.communicate("one\ntwo\n", timeout=SECONDS)
    assert process.returncode == 0, err
    assert out == "A thought.An answer.\n" * 2
    assert "leadline-test at http://" in err
    first, second = server.engine.requests
    assert len(second.token_ids) > len(first.token_ids)


def test_ctrl_c_stops_the_answer_at_the_server_too(server: Running) -> None:
    server.engine.script = "word " * 100_000
    server.engine.step_seconds = 0.01
    process = leadline("chat", "--url", server.url, "--max-tokens", "0")
    assert process.stdin is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    server.until(lambda: server.engine.open_streams, SECONDS)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    server.until(lambda: not server.engine.open_streams)
    server.engine.script = "</think>Still here."
    out, err = process.communicate("two\n", timeout=SECONDS)
    assert process.returncode == 0, err
    assert out.endswith("Still here.\n")
    assert ", stopped" in err


def test_a_key() -> None:
    with fake_server(plain=True, api_key="sesame") as server:
        server.engine.script = "in"
        _, err = leadline("chat", "--url", server.url).communicate("", timeout=SECONDS)
        assert "answered 401" in err
        assert "--api-key" in err
        out, _ = leadline("chat", "--url", server.url, "--api-key", "sesame").communicate("hi\n", timeout=SECONDS)
        assert out == "in\n"
