"""`leadline chat --url` against a scripted server: what is sent, what is shown, errors in words."""

import functools
import json
import sys

import httpx
import pytest
from PIL import Image
from typer.testing import CliRunner

from leadline.cli import chat as chat_command
from leadline.cli import main as cli_main
from leadline.cli.answers import ServerAnswers
from leadline.config.sampling import SamplingParams
from leadline.errors import ServerError

pytestmark = pytest.mark.unit


def event(document):
    return f"data: {json.dumps(document)}\n\n"


def answer(*deltas, reason="stop", tokens=3):
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({"choices": [], "usage": {"completion_tokens": tokens}})
    return httpx.Response(200, text=": ping\n\n" + "".join(map(event, chunks)) + "data: [DONE]\n\n")


class Server:
    """Answers `/v1/models` and, one after the other, with `replies`."""

    def __init__(self, *replies):
        self.replies, self.bodies, self.headers = list(replies), [], []

    def __call__(self, request):
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        self.bodies.append(json.loads(request.content))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def run(monkeypatch):
    def invoke(server, *args, stdin=""):
        transport = httpx.MockTransport(server)
        monkeypatch.setattr(chat_command, "ServerAnswers", functools.partial(ServerAnswers, transport=transport))
        return CliRunner().invoke(cli_main.app, ["chat", "--url", "http://host/v1", *map(str, args)], input=stdin)

    return invoke


def test_a_conversation(run):
    server = Server(answer({"role": "assistant", "content": ""}, {"reasoning_content": "hm. "}, {"content": "one"}),
                    answer({"reasoning": "again. "}, {"content": "two"}))  # fmt: skip
    result = run(server, "--system", "S", "--api-key", "k", stdin="a\nb\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "hm. one\nagain. two\n"
    assert "first at http://host/v1" in result.stderr
    assert "3 tokens in " in result.stderr
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.bodies[1]["messages"][2]["content"] == "one"
    assert {headers["authorization"] for headers in server.headers} == {"Bearer k"}


def test_only_what_was_asked_for_is_sent(run):
    server = Server(answer({"content": "x"}), answer({"content": "x"}))
    run(server, stdin="a\n")
    assert server.bodies[0].keys() == {"model", "stream", "stream_options", "max_tokens", "messages"}
    run(
        *(server, "-m", "second", "-t", 0, "--top-k", 4, "--seed", 1, "--stop", "z", "--max-tokens", 0),
        *("--no-thinking", "--effort", 30),
        stdin="a\n",
    )
    sent = {key: value for key, value in server.bodies[1].items() if key not in ("messages", "stream_options")}
    assert sent == {
        "model": "second", "stream": True, "temperature": 0, "top_k": 4, "seed": 1, "stop": ["z"],
        "thinking": {"type": "disabled"}, "reasoning_effort": 30,
    }  # fmt: skip


def test_images_travel_as_data_urls(run, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "dot.png")
    server = Server(answer({"content": "a dot"}))
    result = run(server, stdin=f"/image {tmp_path / 'dot.png'}\nwhat?\n")
    assert result.stdout == "a dot\n"
    image, text = server.bodies[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text == {"type": "text", "text": "what?"}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "/v1/chat/completions answered 400: too long"),
        (httpx.Response(429, json={"error": {"message": "full"}}), "answered 429: full; it is busy"),
        (httpx.Response(500, text="<h1>oops</h1>"), "answered 500: <h1>oops</h1>"),
        (httpx.ReadError("reset"), "the connection broke off (reset)"),
        (httpx.Response(200, text=event({"choices": [{"delta": {"content": "x"}}]})), "the stream ended before"),
        (httpx.Response(200, text=event({"error": {"message": "row is NaN"}})), "ended the answer: row is NaN"),
        (httpx.Response(200, text="data: [1]\n\n"), "expected a JSON object in each event"),
    ],
    ids=["400", "429", "500", "reset", "cut off", "in the stream", "not an object"],
)
def test_a_failed_answer_ends_a_piped_chat(run, reply, message):
    server = Server(reply, answer({"content": "fine"}))
    result = run(server, stdin="a\nb\n")
    assert isinstance(result.exception, ServerError)  # which the command prints, with status 1
    assert message in str(result.exception)
    assert len(server.bodies) == 1


def test_a_chat_at_a_terminal_goes_on_without_the_failed_message(run, monkeypatch):
    monkeypatch.setattr(chat_command, "_at_terminal", lambda: True)
    server = Server(httpx.ReadError("reset"), answer({"content": "fine"}))
    result = run(server, stdin="a\nb\n/exit\n")
    assert result.exit_code == 0, result.output
    assert "error: server http://host: the connection broke off (reset)" in result.stderr
    assert "fine\n" in result.stdout
    assert len(server.bodies[1]["messages"]) == 1


def test_a_server_that_is_not_there_is_one_line_and_status_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["leadline", "chat", "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    captured = capsys.readouterr()
    assert stopped.value.code == 1
    assert captured.err.startswith("error: server http://127.0.0.1:9: not reachable")
    assert captured.err.count("\n") == 1


def test_options_of_a_local_model_are_refused(run):
    result = run(Server(), "--speculate")
    assert result.exit_code == 2
    assert "choose" in result.stderr


def test_keys_that_no_header_can_carry():
    with pytest.raises(ServerError, match="printable ASCII"):
        ServerAnswers("http://host", SamplingParams(), api_key="a\nb")
