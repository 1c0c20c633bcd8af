"""Errors name the field that is at fault, in one spelling, and say what would be right."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from leadline.cli import main as cli_main
from tests.server.serving import Running
from tests.server.test_clients import ASK, TOOL

pytestmark = pytest.mark.unit

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CLAUDE_TOOL = {"name": "look_up", "input_schema": {"type": "object"}}
FLAT_TOOL = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    MESSAGES: {"messages": ASK, "max_tokens": 5},
    RESPONSES: {"input": "x"},
    "/v1/completions": {"prompt": "x"},
}


def said(*parts: Any, role: str = "user") -> list[Any]:
    return [*ASK, {"role": role, "content": list(parts)}]


TEXT = {"type": "text", "text": "x"}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look_up", "input": {}}]}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    # What deepseek-recipe leaves out or refuses without a place: types.
    (CHAT, {"messages": said(TEXT, {"type": "input_audio"})}, "messages[1].content[1].type", "image_url"),
    (CHAT, {"messages": said({"type": "file", "file": {}})}, "messages[1].content[0].type", "text"),
    (CHAT, {"messages": said({})}, "messages[1].content[0].type", "None"),
    (CHAT, {"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type", "'web_search'"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "custom"}]}]},
     "messages[0].tool_calls[0].type", "function"),
    (MESSAGES, {"messages": said({"type": "search_result"})}, "messages[1].content[0].type", "tool_result"),
    (MESSAGES, {"messages": said({"type": "server_tool_use"}, role="assistant")}, "messages[1].content[0].type", "got"),
    (MESSAGES, {"messages": [CALL, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}]}]},
     "messages[1].content[0].content[0].type", "'document'"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system[0].type", "text"),
    (MESSAGES, {"tools": [CLAUDE_TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type", "custom"),
    (RESPONSES, {"input": [{"role": "user", "content": "x"}, {"type": "zz"}]}, "input[1].type", "'zz'"),
    (RESPONSES, {"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", "function_call"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0].type",
     "input_text"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "zz"}]}]},
     "input[0].output[0].type", "input_text"),
    (RESPONSES, {"tools": [FLAT_TOOL, {"type": "web_search"}]}, "tools[1].type", "namespace"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "zz"}]}]}, "tools[0].tools[0].type",
     "function"),
    # What it refuses by its words alone.
    (CHAT, {"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1]", "name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools", "'a'"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "name of a tool"),
    (CHAT, {"messages": [*ASK, {"role": "user"}]}, "messages[1]", "content"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools[0]", "name"),
    (MESSAGES, {"system": [TEXT, {"type": "text"}]}, "system[1]", "text"),
    (MESSAGES, {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice", "'no'"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0]", "name"),
    (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "zz"}}, "tool_choice", "zz"),
    (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity", "medium"),
    (RESPONSES, {"user": 5}, "user", "string"),
    (RESPONSES, {"instructions": 5}, "instructions", "string"),
    # What is ours.
    (CHAT, {"stop": ["x"] * 65}, "stop", "at most 64 texts, got 65"),
    ("/v1/completions", {"stop": ["x"] * 65}, "stop", "at most 64 texts, got 65"),
    (MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64 texts, got 65"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences", "empty"),
    (CHAT, {"reasoning_effort": 101}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max or"),
    (CHAT, {"reasoning_effort": "zz"}, "reasoning_effort", "high, xhigh, max or a number 1 to 100"),
    (MESSAGES, {"output_config": {"effort": 0}}, "output_config.effort", "1 to 100"),
    (RESPONSES, {"reasoning": {"effort": True}}, "reasoning.effort", ""),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format",
     "allows no document; it may refer to itself without an end"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "oops"}}}}, "text.format",
     "oops"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "oops"}}}},
     "output_config.format", "oops"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
def test_errors_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    found = http.post(path, json={**NEEDED[path], **body})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert len(error["message"]) < 300


def test_the_types_that_are_known_are_taken(http: httpx.Client) -> None:
    for tool in (CLAUDE_TOOL, {**CLAUDE_TOOL, "type": "custom"}):
        found = http.post(MESSAGES, json={**NEEDED[MESSAGES], "tools": [tool]})
        assert found.status_code == 200, found.text
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
    ]
    assert http.post(RESPONSES, json={"input": items, "tools": [FLAT_TOOL]}).status_code == 200


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ('"temperature": NaN', "temperature", "finite JSON number, got NaN"),
        ('"temperature": 1e999', "temperature", "finite JSON number, got Infinity"),
        ('"logit_bias": {"5": -Infinity}', "logit_bias.5", "got -Infinity"),
        ('"seed": 18446744073709551616', "seed", "at most 64 bits"),
        ('"seed": -9223372036854775809', "seed", "at most 64 bits"),
        ('"stop_token_ids": [1, ' + "7" * 5000 + "]", "stop_token_ids[1]", "at most 64 bits, got a larger one"),
        ('"tools": [{"a": {"b": [0, NaN]}}]', "tools[0].a.b[1]", "got NaN"),
        ('"user": "\\ud800"', "user", "lone surrogate"),
    ],
)
def test_values_that_no_field_takes_are_named(http: httpx.Client, text: str, param: str, words: str) -> None:
    body = '{"messages": [{"role": "user", "content": "x"}], ' + text + "}"
    found = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    assert words in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 6000}]}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": "word " * 6000}], "max_tokens": 5}, "messages"),
        (RESPONSES, {"input": "word " * 6000}, "input"),
        ("/v1/completions", {"prompt": "word " * 6000}, "prompt"),
    ],
)
def test_too_long_prompts_have_one_limit(server: Running, http: httpx.Client, path: str, body: Any, param: str) -> None:
    found = http.post(path, json=body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    assert "at most 4999 tokens" in found.json()["error"]["message"]
    assert path == MESSAGES or found.json()["error"]["code"] == "context_length_exceeded"
    assert not server.engine.requests


def test_more_answers_than_may_wait_are_no_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("leadline.cli.serve.run", lambda *given: ran.append(given[0]))
    monkeypatch.setattr("logging.basicConfig", lambda **options: None)
    for line in ("serve --max-waiting 3 --read-timeout 7", "serve"):
        assert CliRunner().invoke(cli_main.app, line.split()).exit_code == 0
    assert [service.settings.max_n for service in ran] == [3, 16]
    assert [service.settings.read_seconds for service in ran] == [7, 60]
