"""Stop strings over HTTP: every kind of substring of an answer, in every protocol, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import httpx
import pytest
import torch

from leadline.cli.serve import served_model
from leadline.server.service import Service
from leadline.server.settings import ServerSettings
from tests.server.serving import NAME, RELEASED, Running, released_parts, serving
from tests.server.test_clients import ASK
from tests.support.scripted_llm import scripted_llm
from tests.unit.test_stop import expected

pytestmark = pytest.mark.tiny

# Words of several characters a token, and characters of several tokens: a stop may begin and end inside either.
ANSWER = "hm 🤔</think>Grüße aabaab 世界!👩‍👧 aaab."
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
PIECES = [[ANSWER[i : i + size]] for size in (1, 2, 3, 5) for i in range(size // 2, len(ANSWER) - size + 1, size)]
SEVERAL = [[ANSWER[:1]], [ANSWER], [ANSWER[-1:]], ["baa", "aabaab"], ["aabaab", "baab"], ["aab", "aabaab"], ["aab."]]


@pytest.fixture(scope="module")
def reciting() -> Iterator[Running]:
    """Recites `ANSWER`, with drafts, so that a stop string also ends among tokens that came together."""
    llm = scripted_llm(RELEASED, ANSWER, max_cache_tokens=1 << 12, speculate=True)
    llm.model.encode_images = lambda images: torch.zeros(0, 8)  # a server wants to know
    torch.set_num_threads(1)
    model = served_model(llm)
    with serving(Service(ServerSettings(names=(NAME,)), lambda progress: model), model.engine) as running:
        yield running


@pytest.fixture(scope="module")
def texts(reciting: Running) -> list[str]:
    """What is certain of the text after each token."""
    tokenizer = reciting.service.model.tokenizer  # type: ignore[union-attr]
    parts = accumulate(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(ANSWER))
    return [part.decode(errors="ignore") for part in parts]


def split(text: str) -> tuple[str, str]:
    reasoning, _, content = text.partition("</think>")
    return reasoning, content


def ask(client: httpx.Client, form: str, **fields: Any) -> tuple[tuple[str, str], Any, int]:
    """Reasoning and content of an answer, why it ended, and its number of tokens; the same as a stream."""
    fields["temperature"] = 0
    if form == "completions":
        prompt = [released_parts()[0].id_of("<｜Assistant｜>"), 5]  # behind it the recital begins
        fields |= {"prompt": prompt, "max_tokens": 100, "stream_options": {"include_usage": True}}
    elif form == "responses":
        fields |= {"input": "hi"}
    else:
        fields |= {"messages": ASK, "max_tokens": 100}
        if form == "chat":
            fields["stream_options"] = {"include_usage": True}
        elif "stop" in fields:
            fields["stop_sequences"] = fields.pop("stop")
    whole = client.post(PATHS[form], json=fields)
    assert whole.status_code == 200, whole.text
    found = READERS[form]([whole.json()])
    streamed = client.post(PATHS[form], json=fields | {"stream": True}).text
    datas = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
    assert READERS[form]([json.loads(data) for data in datas if data != "[DONE]"]) == found
    return found


def read_chat(parts: list[dict[str, Any]]) -> tuple[tuple[str, str], Any, int]:
    choices = [choice for part in parts for choice in part["choices"]]
    messages = [choice.get("message") or choice["delta"] for choice in choices]
    reasoning, content = (
        "".join(message.get(key) or "" for message in messages) for key in ("reasoning_content", "content")
    )
    end = choices[-1]
    return (reasoning, content), (end["finish_reason"], end["stop_reason"]), parts[-1]["usage"]["completion_tokens"]


def read_messages(parts: list[dict[str, Any]]) -> tuple[tuple[str, str], Any, int]:
    if parts[0]["type"] == "message":
        (end,) = parts
        pieces, usage = end["content"], end["usage"]
    else:
        pieces = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
        (last,) = (part for part in parts if part["type"] == "message_delta")
        end, usage = last["delta"], last["usage"]
    reasoning, content = ("".join(piece.get(key, "") for piece in pieces) for key in ("thinking", "text"))
    return (reasoning, content), (end["stop_reason"], end["stop_sequence"]), usage["output_tokens"]


def read_responses(parts: list[dict[str, Any]]) -> tuple[tuple[str, str], Any, int]:
    response = parts[-1].get("response", parts[-1])
    texts = {"reasoning": "", "message": ""}
    for item in response["output"]:
        texts[item["type"]] += "".join(piece["text"] for piece in item["content"])
    if len(parts) > 1:  # the last event says the whole once more
        for kind, name in (("reasoning", "reasoning_text"), ("message", "output_text")):
            deltas = [part["delta"] for part in parts if part["type"] == f"response.{name}.delta"]
            assert "".join(deltas) == texts[kind]
    return (texts["reasoning"], texts["message"]), response["status"], response["usage"]["output_tokens"]


def read_completions(parts: list[dict[str, Any]]) -> tuple[tuple[str, str], Any, int]:
    choices = [choice for part in parts for choice in part["choices"]]
    text, end = "".join(choice["text"] for choice in choices), choices[-1]
    return split(text), (end["finish_reason"], end["stop_reason"]), parts[-1]["usage"]["completion_tokens"]


READERS = {"chat": read_chat, "messages": read_messages, "responses": read_responses, "completions": read_completions}


def ending(form: str, matched: str | None) -> Any:
    if form == "messages":
        return ("end_turn" if matched is None else "stop_sequence", matched)
    return "completed" if form == "responses" else ("stop", matched)


@pytest.mark.parametrize("form", PATHS)
def test_an_answer_ends_before_its_stop_string(reciting: Running, texts: list[str], form: str) -> None:
    with httpx.Client(base_url=reciting.url, timeout=60) as client:
        assert ask(client, form) == (split(ANSWER), ending(form, None), len(texts) + 1)
        # The engine finds them for all protocols alike, so each of these gets a part of the pieces.
        for number, stops in enumerate([*SEVERAL, *PIECES[list(PATHS).index(form) :: len(PATHS)]]):
            include = number % 3 == 0
            text, matched = expected(ANSWER, stops, include)
            assert matched is not None
            through = expected(ANSWER, stops, True)[0]
            count = 1 + next(i for i, sofar in enumerate(texts) if sofar.startswith(through))
            found = ask(client, form, stop=stops, include_stop_str_in_output=include)
            assert found == (split(text), ending(form, matched), count), stops
