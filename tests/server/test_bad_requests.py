"""What a server must refuse, with a 4xx that names the field."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

from tests.server.serving import NAME, Running
from tests.server.test_clients import ASK, TOOL, data_url

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"


def image(url: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


BAD_TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a b": {}}}},
}


def named(tool: str) -> Any:
    return {"type": "function", "function": {"name": tool}}


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [5]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, 400, "messages"),
    (CHAT, {"messages": ASK, "model": "nope"}, 404, "model"),
    (CHAT, {"messages": ASK, "model": 5}, 400, "model"),
    (CHAT, {"messages": ASK, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": ASK, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": ASK, "temperature": True}, 400, "temperature"),
    (CHAT, {"messages": ASK, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": ASK, "top_k": -5}, 400, "top_k"),
    (CHAT, {"messages": ASK, "min_p": 2}, 400, "min_p"),
    (CHAT, {"messages": ASK, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": ASK, "max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"messages": ASK, "max_tokens": 1.5}, 400, "max_tokens"),
    (CHAT, {"messages": ASK, "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens"),
    (CHAT, {"messages": ASK, "n": 0}, 400, "n"),
    (CHAT, {"messages": ASK, "n": 17}, 400, "n"),
    (CHAT, {"messages": ASK, "seed": 1 << 63}, 400, "seed"),
    (CHAT, {"messages": ASK, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": ASK, "stop": ["x"] * 65}, 400, "stop"),
    (CHAT, {"messages": ASK, "stop": 5}, 400, "stop"),
    (CHAT, {"messages": ASK, "stop_token_ids": [-1]}, 400, "stop_token_ids[0]"),
    (CHAT, {"messages": ASK, "top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, {"messages": ASK, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": ASK, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": ASK, "reasoning_effort": 0}, 400, "reasoning_effort"),
    (CHAT, {"messages": ASK, "reasoning_effort": "very"}, 400, "reasoning_effort"),
    (CHAT, {"messages": ASK, "reasoning_effort": "none", "thinking": {"type": "enabled"}}, 400, "reasoning_effort"),
    (CHAT, {"messages": ASK, "reasoning_effort": 5, "thinking": {"type": "disabled"}}, 400, "reasoning_effort"),
    (CHAT, {"messages": ASK, "frequency_penalty": 0.5}, 400, "frequency_penalty"),
    (CHAT, {"messages": ASK, "logit_bias": {"5": 1.0}}, 400, "logit_bias"),
    (CHAT, {"messages": ASK, "functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"messages": ASK, "stop_sequences": ["a"]}, 400, "stop_sequences"),
    (CHAT, {"messages": ASK, "repetition_penalty": 1.1}, 400, "repetition_penalty"),
    ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens"),
    ("/v1/completions", {"prompt": ["x"] * 17, "n": 16}, 400, "prompt"),
    ("/v1/responses", {"input": "x", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ("/v1/responses", {"input": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 5, "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 5, "stop": "a"}, 400, "stop"),
    (CHAT, {"messages": ASK, "tools": [{}]}, 400, "tools[0].type"),
    (CHAT, {"messages": ASK, "tools": 5}, 400, "tools"),
    (CHAT, {"messages": ASK, "tool_choice": "sometimes", "tools": [TOOL]}, 400, "tool_choice"),
    (CHAT, {"messages": ASK, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (
        CHAT,
        {"messages": ASK, "response_format": {"type": "json_schema"}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        CHAT,
        {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "oops"}}}},
        400,
        "response_format",
    ),
    (CHAT, {"messages": ASK, "tool_choice": {"type": "function"}, "tools": [TOOL]}, 400, "tool_choice"),
    (CHAT, {"messages": ASK, "tool_choice": named("none"), "tools": [TOOL]}, 400, "tool_choice"),
    (CHAT, {"messages": ASK, "tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, 400, "tool_choice"),
    (CHAT, {"messages": ASK, "tool_choice": "required", "tools": [BAD_TOOL]}, 400, "tools[0].function.parameters"),
    (CHAT, {"messages": ASK, "parallel_tool_calls": "no", "tools": [TOOL]}, 400, "parallel_tool_calls"),
    (CHAT, {"messages": image("data:image/png;base64,AAAA")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("data:image/png;base64,!!!!")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image(data_url()[:100])}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("http://example.org/a.png")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("https://127.0.0.1/a.png")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("https://localhost:1/a.png")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("https://[::1]/a.png")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("https://[::ffff:10.0.0.1]/a.png")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image("file:///etc/passwd")}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": image(data_url()) * 5}, 400, "messages[4].content[0]"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": {"a": 1}}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[-1]]}, 400, "prompt[0][0]"),
    ("/v1/completions", {"prompt": ["x"] * 129}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "best_of": 2}, 400, "best_of"),
    (
        CHAT,
        {
            "messages": ASK,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"properties": {f"p{i}": {} for i in range(101)}}},
            },
        },
        400,
        "response_format",
    ),
    ("/v1/completions", {"prompt": [129264]}, 400, "prompt"),
    ("/v1/messages", {"messages": ASK}, 400, "max_tokens"),
    ("/v1/messages", {"messages": ASK, "max_tokens": -5}, 400, "max_tokens"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 5, "model": "nope"}, 404, "model"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 5, "system": 5}, 400, "system"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (
        "/v1/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        400,
        "input[0].content[0].type",
    ),
    ("/v1/responses", {}, 400, "input"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ("/v1/responses", {"input": "x", "background": True}, 400, "background"),
    ("/v1/responses", {"input": "x", "top_logprobs": 3}, 400, "top_logprobs"),
    ("/v1/responses", {"input": [{"role": "user", "content": 7}]}, 400, "input[0]"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": ASK}, 400, "prompt"),
    ("/detokenize", {"tokens": [1 << 30]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_field(http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    found = http.post(path, json=body)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert error["param"] == param, error
    assert error["message"]
    assert error["type"]
    assert ("type" in found.json()) == path.startswith("/v1/messages")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON object"),
        (b"{", "expected JSON"),
        (b"[1, 2]", ""),
        (b"null", ""),
        (b'{"messages": "\xff\xfe"}', "UTF-8"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "finite"),
        (b'{"seed": 18446744073709551616}', "64 bits"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "64 bits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 101 + b"]" * 101, "deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deep"),
        (b"[" * 300_000, "deep"),
    ],
)
def test_bad_json(http: httpx.Client, body: bytes, word: str) -> None:
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"):
        found = http.post(path, content=body, headers={"content-type": "application/json"})
        assert found.status_code == 400, found.text
        assert word in found.json()["error"]["message"]
        assert found.json()["error"]["param"]


def test_bad_content_type_and_paths(http: httpx.Client) -> None:
    body = json.dumps({"messages": ASK}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        found = http.post(CHAT, content=body, headers={"content-type": kind})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "body")
    assert http.get(CHAT).status_code == 405
    assert http.get("/nothing").json()["error"]["type"] == "not_found_error"


def test_huge_body(http: httpx.Client) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}).encode()
    found = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["error"]["param"]) == (413, "body")
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))  # without a content-length
    try:
        found = http.post(CHAT, content=pieces, headers={"content-type": "application/json"})
        assert found.status_code == 413
    except httpx.WriteError:
        pass  # hung up on while we were still sending


def test_literal_image_tokens_are_text(server: Running, http: httpx.Client) -> None:
    content = "<｜deepseek_image｜> <image>path</image> <｜User｜>"
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": content}]}).status_code == 200
    assert 129264 not in server.engine.requests[0].token_ids


def test_many_images_in_one_body_are_counted(server: Running, http: httpx.Client) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_url()}}] * 4
    body = {"model": NAME, "messages": [{"role": "user", "content": parts}]}
    used = http.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"]
    assert used["images"] == 4


def test_animated_or_odd_pictures(http: httpx.Client) -> None:
    svg = "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    assert http.post(CHAT, json={"messages": image(svg)}).status_code == 400
