"""`leadline bench serve` against a scripted server: requests, figures, errors in words."""

import asyncio
import functools
import itertools
import json
import math
import sys

import httpx
import pytest
from typer.testing import CliRunner

from leadline import client
from leadline.bench import serve
from leadline.bench.serve import Benchmark, summary
from leadline.bench.workload import Range, Workload, draw
from leadline.cli import bench as bench_command
from leadline.cli import main as cli_main
from leadline.errors import LeadlineError, ServerError

pytestmark = pytest.mark.unit


class Stream(httpx.AsyncByteStream):
    """Chunks of an answer as they come over the wire; counts what the client takes and whether it closed early."""

    def __init__(self, chunks, pause=0.0):
        self.chunks, self.pause = chunks, pause
        self.taken = 0

    async def __aiter__(self):
        for chunk in self.chunks:
            await asyncio.sleep(self.pause)
            self.taken += 1
            yield chunk


class FakeServer:
    """An OpenAI-compatible server that answers each prompt with `max_tokens` chunks."""

    def __init__(self, *, pause=0.0, cached=None, replies=()):
        self.pause, self.cached = pause, cached
        self.replies = list(replies)  # taken one after the other in place of an answer
        self.bodies, self.streams, self.headers = [], [], []
        self.in_flight = self.most_in_flight = 0

    async def __call__(self, request):
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(range(10, 60)), "count": 50, "max_model_len": 4096})
        self.bodies.append(body)
        if self.replies and (reply := self.replies.pop(0)) is not None:
            return reply
        self.streams.append(Stream(self.events(body), self.pause))
        return httpx.Response(200, stream=self.streams[-1])

    def events(self, body):
        for i in range(body["max_tokens"]):
            reason = "length" if i == body["max_tokens"] - 1 else None
            yield event({"choices": [{"index": 0, "text": "x", "finish_reason": reason}], "usage": None})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def event(document):
    return f"data: {json.dumps(document)}\n\n".encode()


def measure(server, workload, **options):
    benchmark = Benchmark("http://host:1/v1/", workload, transport=httpx.MockTransport(server), **options)
    asyncio.run(benchmark.run())
    return summary(benchmark)


SMALL = Workload(sessions=6, turns=2, shared_prefix=5, input_len=Range(3, 9), output_len=Range(2, 4), max_concurrency=2)


def test_counts_and_names():
    server = FakeServer(cached=4)
    figures = measure(server, SMALL, api_key="secret")
    assert (figures["completed"], figures["failed"], figures["cancelled"]) == (12, 0, 0)
    assert figures["total_input_tokens"] == sum(len(body["prompt"]) for body in server.bodies)
    assert figures["total_output_tokens"] == sum(body["max_tokens"] for body in server.bodies)
    assert figures["cached_share"] == pytest.approx(12 * 4 / figures["total_input_tokens"])
    assert figures["model_id"] == "first"
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p90", "p99"):
            assert figures[f"{kind}_{name}_ms"] >= 0
    assert {header.get("authorization") for header in server.headers} == {"Bearer secret"}
    assert server.bodies[0].keys() == {"model", "prompt", "max_tokens", "stream", "stream_options"}


def test_cached_share_is_unknown_where_the_server_does_not_tell():
    assert measure(FakeServer(), SMALL)["cached_share"] is None


def test_workload_is_repeatable_and_turns_extend_each_other():
    sessions = draw(SMALL, range(100))
    assert sessions == draw(SMALL, range(100))
    prefix = sessions[0].turns[0].prompt[:5]
    for session in sessions:
        first, second = session.turns
        assert first.prompt[:5] == prefix
        assert second.prompt[: len(first.prompt)] == first.prompt
        assert 3 <= len(second.prompt) - len(first.prompt) <= 9
        assert 2 <= first.max_tokens <= 4


def test_poisson_arrivals():
    starts = [session.start for session in draw(Workload(sessions=4000, request_rate=50.0), [1])]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(1 / 50**2, rel=0.2)


def test_concurrency_is_kept():
    now, most = 0, 0

    async def slow(request):
        nonlocal now, most
        if request.url.path != "/v1/completions":
            return await server(request)
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return await server(request)

    server = FakeServer()
    assert measure(slow, SMALL)["completed"] == 12
    assert most == 2


def test_cancelled_requests_close_early_and_leave_the_times_alone():
    server = FakeServer()
    figures = measure(server, Workload(sessions=40, input_len=Range(1, 3), output_len=Range(5, 9), cancel=0.5, seed=3))
    dropped = [stream for stream in server.streams if stream.taken < 5]
    assert figures["cancelled"] + figures["completed"] == 40
    assert 10 <= figures["cancelled"] <= 30
    assert any(stream.taken == 0 for stream in dropped)


def test_times_are_those_of_the_wire():
    figures = measure(FakeServer(pause=0.02), Workload(sessions=1, input_len=Range(1, 1), output_len=Range(6, 6)))
    assert figures["mean_ttft_ms"] >= 20
    assert figures["mean_itl_ms"] >= 20
    assert figures["mean_tpot_ms"] == pytest.approx(figures["mean_itl_ms"])
    assert figures["mean_e2el_ms"] == pytest.approx(figures["mean_ttft_ms"] + 5 * figures["mean_itl_ms"])


def test_figures_are_those_of_the_outcomes():
    benchmark = Benchmark("http://host", SMALL)
    for number, seconds in enumerate((0.3, 0.1, 0.9, 0.4, 0.2), start=1):
        benchmark.outcomes.append(
            serve.Outcome(state="completed", prompt_len=number, ttft=seconds, latency=3 * seconds, output_len=3)
        )
    benchmark.outcomes.append(serve.Outcome(prompt_len=1, error="busy", ttft=70.0))
    figures = summary(benchmark)
    expected = {"mean_ttft_ms": 380, "median_ttft_ms": 300, "p90_ttft_ms": 700, "p99_ttft_ms": 880, "mean_tpot_ms": 380}
    expected |= {"p90_ttft_short_ms": 280, "p90_ttft_long_ms": 800, "std_ttft_ms": 278.567766}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["mean_itl_ms"] is None


def test_busy_and_broken_answers_are_counted_by_reason():
    half = Stream([event({"choices": [{"text": "x", "finish_reason": None}]})])
    in_stream = Stream([event({"error": {"message": "row is NaN"}})])
    server = FakeServer(replies=[
        httpx.Response(429, json={"error": {"message": "queue full"}}),
        httpx.Response(503, text="going down"),
        httpx.Response(200, stream=half),
        httpx.Response(200, stream=in_stream),
    ])  # fmt: skip
    figures = measure(server, SMALL)
    assert (figures["completed"], figures["failed"]) == (8, 4)
    text = "\n".join(figures["errors"])
    for reason in ("429: queue full", "503: going down", "ended before the answer did", "row is NaN"):
        assert reason in text


def test_a_wrong_request_ends_the_benchmark():
    server = FakeServer(replies=[httpx.Response(400, json={"error": {"message": "prompt: too long"}})])
    with pytest.raises(ServerError, match="answered 400: prompt: too long"):
        measure(server, SMALL)


def test_a_server_without_tokenize_needs_a_vocabulary_size():
    server = FakeServer()

    async def plain(request):
        return httpx.Response(404, json={"detail": "Not Found"}) if request.url.path == "/tokenize" else await server(
            request
        )  # fmt: skip

    with pytest.raises(ServerError, match="--vocab-size has to be given"):
        measure(plain, SMALL)
    assert measure(plain, SMALL, vocab_size=7)["completed"] == 12
    assert max(max(body["prompt"]) for body in server.bodies) <= 6


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:port", "http://h/?a=b"])
def test_addresses_that_are_none(url):
    with pytest.raises(ServerError, match="expected an address like"):
        client.base_url(url)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_v1_may_be_part_of_the_address(url):
    assert client.base_url(url) == "http://host:1"


@pytest.mark.parametrize(
    "change",
    [{"sessions": 0}, {"input_len": Range(5, 4)}, {"output_len": Range(0, 4)}, {"request_rate": 0.0}, {"cancel": 1.5},
     {"turns": 0}, {"max_concurrency": 0}, {"shared_prefix": -1}, {"temperature": math.inf}, {"cancel": math.nan}],
    ids=str,
)  # fmt: skip
def test_workloads_that_cannot_be(change):
    with pytest.raises(LeadlineError, match="expected"):
        Workload(**change)


@pytest.fixture
def command(monkeypatch):
    """Runs the command line against a server function."""

    def invoke(server, *args):
        transport = httpx.MockTransport(server)
        monkeypatch.setattr(bench_command, "Benchmark", functools.partial(Benchmark, transport=transport))
        return CliRunner().invoke(cli_main.app, ["bench", "serve", "--url", "http://host", *map(str, args)])

    return invoke


def test_table_and_json_line(command):
    args = ("--sessions", 4, "--input-len", "3:5", "--output-len", 2, "--turns", 2)
    result = command(FakeServer(cached=1), *args)
    assert result.exit_code == 0, result.output
    assert "8 completed, 0 cancelled, 0 failed" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["completed"] == 8
    assert document["output_len"] == [2, 2]
    assert document["request_rate"] == "inf"
    assert not document["interrupted"]
    assert json.loads(command(FakeServer(), *args, "--json").stdout)["completed"] == 8


def test_ctrl_c_prints_what_was_measured(command):
    server = FakeServer()

    async def interrupting(request):
        if len(server.bodies) == 3:
            raise KeyboardInterrupt
        return await server(request)

    result = command(interrupting, "--sessions", 9, "--max-concurrency", 1, "--json", "--output-len", 2)
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"]
    assert document["completed"] == 3


def unreachable(request):
    raise httpx.ConnectError("Connection refused")


def web_page(request):
    return httpx.Response(200, text="<html>hello</html>")


def locked(request):
    return httpx.Response(401, json={"error": {"message": "no such key"}})


def always_busy(request):
    if request.url.path == "/v1/completions":
        return httpx.Response(429, json={"error": {"message": "queue full"}})
    tokens = {"tokens": [1], "data": [{"id": "m"}]}
    return httpx.Response(200, json=tokens)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (unreachable, "server http://host: not reachable (Connection refused)"),
        (web_page, "expected a list of models from /v1/models, got '<html>hello</html>'"),
        (lambda request: httpx.Response(404, text="nothing here"), "/v1/models answered 404: nothing here"),
        (locked, "/v1/models answered 401: no such key; give its key with --api-key"),
        (always_busy, "no request was answered: server http://host: /v1/completions answered 429: queue full"),
    ],
    ids=["unreachable", "web page", "404", "401", "429"],
)
def test_errors_are_one_line_and_status_1(command, capsys, monkeypatch, server, message):
    monkeypatch.setattr(bench_command, "Benchmark", functools.partial(Benchmark, transport=httpx.MockTransport(server)))
    monkeypatch.setattr(sys, "argv", ["leadline", "bench", "serve", "--url", "http://host", "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    captured = capsys.readouterr()
    assert stopped.value.code == 1
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_unknown_model():
    with pytest.raises(ServerError, match="model 'third': expected one that http://host:1 serves, first, second"):
        measure(FakeServer(), SMALL, model="third")
