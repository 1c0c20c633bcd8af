"""Errors name the field that is at fault, in one spelling, and say what would be right."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from leadline.cli import main as cli_main
from tests.server.serving import Running
from tests.server.test_clients import ASK, TOOL, data_url

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


def function(parameters: Any, name: str = "f") -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def flat(parameters: Any, name: str = "f") -> Any:
    return {"type": "function", "name": name, "parameters": parameters}


def picture(kind: str, url: str) -> Any:
    """An image as Chat Completions, Messages or Responses write it."""
    if kind == "image":
        return {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}
    return {"type": kind, "image_url": {"url": url} if kind == "image_url" else url}


TEXT = {"type": "text", "text": "x"}
INPUT_TEXT = {"type": "input_text", "text": "x"}
BROKEN = "data:image/png;base64,AAAA"
BAD_URLS = [
    (BROKEN, "PNG"),
    (BROKEN[:-4] + "!!!!", "base64"),
    ("http://x.org/a.png", "https://"),
    ("file:///x", "format"),
]
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
    (CHAT, {"tools": [TOOL, TOOL]}, "tools[1]", "unique"),
    (CHAT, {"tools": [TOOL, function({}, "")]}, "tools[1].function.name", "function.name: empty string. Expected"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice", "'no'"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "name of a tool"),
    (CHAT, {"messages": [*ASK, {"role": "user"}]}, "messages[1]", "content"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools[0]", "name"),
    (MESSAGES, {"system": [TEXT, {"type": "text"}]}, "system[1]", "text"),
    (MESSAGES, {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice", "'no'"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0]", "name"),
    (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "zz"}}, "tool_choice.type", "zz"),
    (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity", "medium"),
    (RESPONSES, {"instructions": 5}, "instructions", "expected a text, got 5"),
    # Images, by the part that holds them.
    *((CHAT, {"messages": said(TEXT, picture("image_url", data_url()), picture("image_url", url))},
       "messages[1].content[2]", words) for url, words in BAD_URLS),
    *((RESPONSES, {"input": [{"role": "user", "content": [INPUT_TEXT, picture("input_image", url)]}]},
       "input[0].content[1]", words) for url, words in BAD_URLS),
    (CHAT, {"messages": said(TEXT, {"type": "image_url"})}, "messages[1].content[1]", "missing field"),
    (CHAT, {"messages": said(TEXT, {"type": "image_url", "image_url": 5})}, "messages[1].content[1]", "integer `5`"),
    (CHAT, {"messages": said(*[picture("image_url", data_url())] * 5)}, "messages[1].content[4]", "at most 4 images"),
    (MESSAGES, {"messages": said(TEXT, picture("image", BROKEN))}, "messages[1].content[1]", "PNG"),
    (MESSAGES, {"messages": [CALL, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, picture("image", BROKEN)]}]}]},
     "messages[1].content[0].content[1]", "PNG"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "c",
                            "output": [picture("input_image", data_url()), picture("input_image", BROKEN)]}]},
     "input[1].output[1]", "PNG"),
    # Schemas of tools, in each protocol's words; some are refused only where a call is required.
    (CHAT, {"tools": [TOOL, function(5, "a")]}, "tools[1].function.parameters", "'a'"),
    (CHAT, {"tools": [TOOL, function({"type": "object", "properties": {"a b": {}}}, "a")], "tool_choice": "required"},
     "tools[1].function.parameters", "'a b'"),
    (MESSAGES, {"tools": [CLAUDE_TOOL, {"name": "a", "input_schema": {"type": "array"}}]}, "tools[1].input_schema",
     "array"),
    (MESSAGES, {"tools": [CLAUDE_TOOL, {"name": "a", "input_schema": {"type": "object", "properties": {"a b": {}}}}],
                "tool_choice": {"type": "any"}}, "tools[1].input_schema", "'a b'"),
    (RESPONSES, {"tools": [FLAT_TOOL, flat({"type": "oops"}, "a")]}, "tools[1].parameters", "oops"),
    (RESPONSES, {"tools": [FLAT_TOOL, {"type": "namespace", "name": "n", "description": "d",
                                       "tools": [FLAT_TOOL, flat({"type": "oops"}, "a")]}]},
     "tools[1].tools[1].parameters", "oops"),
    (RESPONSES, {"tools": [FLAT_TOOL, {"type": "namespace", "name": "n", "description": "d", "tools": [
        flat({"type": "object", "properties": {"a b": {}}}, "a")]}], "tool_choice": "required"},
     "tools[1].tools[0].parameters", "'a b'"),
    # Token ids beyond the vocabulary.
    ("/v1/completions", {"prompt": [1, 2, 3, 129280]}, "prompt[3]", "got 129280"),
    ("/v1/completions", {"prompt": [[1], [2, 129280]]}, "prompt[1][1]", "got 129280"),
    ("/v1/completions", {"stop_token_ids": [5, 129280]}, "stop_token_ids[1]", "got 129280"),
    (MESSAGES, {"stop_token_ids": [129280]}, "stop_token_ids[0]", "got 129280"),
    ("/detokenize", {"tokens": [1, 129280]}, "tokens[1]", "got 129280"),
    # What may stand in a field, all of it.
    ("/v1/completions", {"prompt": 5}, "prompt",
     "expected a text, a list of texts, a list of integers or a list of lists of integers, got 5"),
    ("/v1/completions", {"prompt": [-1]}, "prompt[0]", "expected greater than or equal to 0, got -1"),
    ("/v1/completions", {"prompt": [1 << 40]}, "prompt[0]", "expected less than 2147483648"),
    ("/v1/completions", {"prompt": [1, "x"]}, "prompt[1]", "expected an integer, got 'x'"),
    ("/v1/completions", {"prompt": ["x", 1]}, "prompt[1]", "expected a text, got 1"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt[0]", "expected a text, an integer or a list, got 1.5"),
    *((path, body, param, "expected a text or a list of objects, got 5") for path, body, param in [
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (MESSAGES, {"system": 5}, "system"),
        (RESPONSES, {"input": 5}, "input")]),
    *((path, {"stop": {}}, "stop", "expected a text or a list of texts, got {}")
      for path in (CHAT, RESPONSES, "/v1/completions")),
    *((path, body, param, "expected a text or an integer, got True") for path, body, param in [
        (CHAT, {"reasoning_effort": True}, "reasoning_effort"),
        (MESSAGES, {"output_config": {"effort": True}}, "output_config.effort"),
        (RESPONSES, {"reasoning": {"effort": True}}, "reasoning.effort")]),
    *((path, {"tool_choice": 5}, "tool_choice", "expected 'auto', 'none', 'required' or an object, got 5")
      for path in (CHAT, RESPONSES)),
    *((path, {"tool_choice": {}}, "tool_choice.type", "required") for path in (CHAT, MESSAGES, RESPONSES)),
    (MESSAGES, {"tool_choice": {"type": "required"}}, "tool_choice.type",
     "expected 'auto', 'any', 'tool' or 'none', got 'required'"),
    (CHAT, {"tool_choice": {"type": "any"}}, "tool_choice.type", "'required', 'function', 'custom' or 'allowed_tools'"),
    (MESSAGES, {"tool_choice": "auto"}, "tool_choice", "expected an object, got 'auto'"),
    *((path, {"n": n}, "n", f"expected at most 16, got {n}") for path in (CHAT, "/v1/completions") for n in (17, 1000)),
    # Types of what has no effect, or a small one.
    *((CHAT, {"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}", "expected true or false, got 'x'")
      for name in ("thinking", "enable_thinking")),
    *((path, {"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "true or false")
      for path in (CHAT, "/v1/completions")),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}},
     "tool_choice.disable_parallel_tool_use", "true or false"),
    *((path, {name: 5}, name, words) for path in (CHAT, RESPONSES) for name, words in [
        ("user", "expected a text, got 5"), ("store", "true or false"), ("metadata", "expected an object")]),
    (MESSAGES, {"metadata": 5}, "metadata", "expected an object"),
    ("/v1/completions", {"user": 5}, "user", "expected a text, got 5"),
    (RESPONSES, {"include": 5}, "include", "expected a list, got 5"),
    (CHAT, {"echo": True}, "echo", "expected false or nothing"),
    # What is ours.
    *((path, body, param, "expected a JSON Schema, got none") for path, body, param in [
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ("/v1/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema")]),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
    (CHAT, {"stop": ["x"] * 65}, "stop", "at most 64 texts, got 65"),
    ("/v1/completions", {"stop": ["x"] * 65}, "stop", "at most 64 texts, got 65"),
    (MESSAGES, {"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64 texts, got 65"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences", "empty"),
    (CHAT, {"reasoning_effort": 101}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max or"),
    (CHAT, {"reasoning_effort": "zz"}, "reasoning_effort", "high, xhigh, max or a number 1 to 100"),
    (MESSAGES, {"output_config": {"effort": 0}}, "output_config.effort", "1 to 100"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "response_format",
     "allows no document; it may refer to itself without an end"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "oops"}}}}, "text.format",
     "oops"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "oops"}}}},
     "output_config.format", "oops"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
def test_errors_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    found = http.post(path, json={**NEEDED.get(path, {}), **body})
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert len(error["message"]) < 300
    assert error["message"].startswith(f"{param}: ")
    assert f"'{param}'" not in error["message"]


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
    kept = {"store": True, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "user": "me"}
    assert http.post(RESPONSES, json={"input": items, "tools": [FLAT_TOOL], **kept}).status_code == 200


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
