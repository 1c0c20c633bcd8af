"""Tool calls, and the known faults of other servers in prompts, tools, reasoning and images, each by its number."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import anthropic
import httpx
import openai
import pytest

from leadline.text.images import resize_plan
from tests.server.serving import NAME, RELEASED, Running
from tests.server.test_clients import ASK, TOOL, data_url

pytestmark = pytest.mark.unit

D = "｜DSML｜"
STRINGS = [
    "plain",
    'a < b && c > "d" & \\ \' </',
    "深度思考 🤔👩‍👩‍👧",
    "line\nbreak\ttab",
    f"<{D} x </think> <{D} calls>",
    "}{][",
    "",
]
ARGUMENTS: dict[str, Any] = {f"s{i}": text for i, text in enumerate(STRINGS)} | {
    "number": -1.5e3,
    "list": [1, {"k": "<&>"}, None, True],
    "object": {"ключ": "<b>&</b>", "e": "🤔"},
}


def markup(name: str, arguments: dict[str, Any], spaced: bool = True) -> str:
    """A call as the model writes it, in V4.1's spelling or in V4's."""
    space, block = (" ", "calls") if spaced else ("", "tool_calls")
    lines = []
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        lines.append(
            f'<{D}{space}parameter name="{key}" string="{str(is_string).lower()}">{text}</{D}{space}parameter>'
        )
    call = "\n".join([f'<{D}{space}invoke name="{name}">', *lines, f"</{D}{space}invoke>"])
    return f"\n\n<{D}{space}{block}>\n{call}\n</{D}{space}{block}>"


def byte_tokens(server: Running, text: str) -> list[int]:
    """The text in tokens of one byte each."""
    tokenizer = server.engine.tokenizer
    ids = {tokenizer.token_bytes(i): i for i in range(400) if len(tokenizer.token_bytes(i)) == 1}
    return [ids[bytes([byte])] for byte in text.encode()]


def ask_openai(client: openai.OpenAI, stream: bool, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Reasoning, content, calls and finish reason of an answer."""
    asked: Any = {"model": NAME, "messages": ASK, "tools": [TOOL], **fields}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        calls: Any = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        reasoning = getattr(choice.message, "reasoning_content", None) or ""
        return reasoning, choice.message.content or "", [(n, json.loads(a)) for n, a in calls], choice.finish_reason
    reasoning, content, found, reason = "", "", {}, ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            call = found.setdefault(part.index, ["", ""])
            call[0] += part.function.name or ""
            call[1] += part.function.arguments or ""
        reason = choice.finish_reason or reason
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in found.values()], reason


def test_arguments_survive_every_cut(server: Running, client: openai.OpenAI) -> None:
    arguments = {"a": STRINGS[1] + "深🤔", "n": [1, "<&>"]}
    tokens = byte_tokens(server, "why</think>so" + markup("f", arguments))
    server.engine.script = tokens
    for cut in range(len(tokens) + 1):
        server.engine.cuts = [cut]
        assert ask_openai(client, True) == ("why", "so", [("f", arguments)], "tool_calls"), cut
    server.engine.cuts = None
    assert ask_openai(client, True) == ask_openai(client, False) == ("why", "so", [("f", arguments)], "tool_calls")


@pytest.mark.parametrize("spaced", [True, False])
def test_all_kinds_of_values_in_all_protocols(
    server: Running, client: openai.OpenAI, claude: anthropic.Anthropic, spaced: bool
) -> None:
    two = markup("f", ARGUMENTS, spaced).removesuffix(f"\n</{D}{' calls' if spaced else 'tool_calls'}>")
    second = markup("f", {"a": 1}, spaced).partition(">\n")[2]
    server.engine.script = byte_tokens(server, f"why</think>so{two}\n{second}")
    calls = [("f", ARGUMENTS), ("f", {"a": 1})]
    for stream in (True, False):
        assert ask_openai(client, stream) == ("why", "so", calls, "tool_calls")
    tools: Any = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
    asked: Any = {"model": NAME, "messages": ASK, "max_tokens": 5000, "tools": tools}
    message = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream_:
        streamed = stream_.get_final_message()
    for found in (message, streamed):
        uses = [(block.name, block.input) for block in found.content if block.type == "tool_use"]
        assert (uses, found.stop_reason) == (calls, "tool_use")
    function: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    response = client.responses.create(model=NAME, input="hi", tools=[function])
    items = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    assert items == calls


def test_conversation_with_tools_goes_on(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    server.engine.script = "why</think>so" + markup("f", {"a": "x"})
    first = client.chat.completions.create(model=NAME, messages=ASK, tools=[TOOL]).choices[0].message
    history: Any = [
        *ASK,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "42"},  # type: ignore[index]
    ]
    client.chat.completions.create(model=NAME, messages=history, tools=[TOOL])
    said = claude.messages.create(
        model=NAME, max_tokens=500, messages=ASK, tools=[{"name": "f", "input_schema": {"type": "object"}}]
    )
    result: Any = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "42"}  # type: ignore[union-attr]
    more: Any = [*ASK, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    claude.messages.create(
        model=NAME, max_tokens=500, messages=more, tools=[{"name": "f", "input_schema": {"type": "object"}}]
    )
    for request in (server.engine.requests[1], server.engine.requests[3]):
        text = server.engine.tokenizer.decode(request.token_ids)
        turn = "<think>why</think>so" + markup("f", {"a": "x"}) + "<｜end▁of▁sentence｜>"
        assert text.endswith(f"{turn}<｜User｜><tool_result>42</tool_result><｜Assistant｜><think>")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_namespaces_come_back_and_go_in_again(server: Running, client: openai.OpenAI, stream: bool) -> None:
    function = {"type": "function", "name": "read", "description": "d", "parameters": {"type": "object"}}
    lead = {"type": "namespace", "name": "lead", "description": "The lead line.", "tools": [function]}
    asked: Any = {"model": NAME, "tools": [lead, function], "stream": stream}
    calls = markup("lead::read", {"a": 1}).removesuffix(f"\n</{D} calls>")
    calls += markup("read", {"b": 2}).partition("calls>")[2]
    server.engine.script = "why</think>so" + calls

    def ask(asked_input: Any) -> list[dict[str, Any]]:
        found: Any = client.responses.create(input=asked_input, **asked)
        response = list(found)[-1].response if stream else found
        return [item.model_dump(exclude_none=True) for item in response.output]

    items = ask("hi")
    called = [item for item in items if item["type"] == "function_call"]
    assert [(call.get("namespace"), call["name"]) for call in called] == [("lead", "read"), (None, "read")]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        for call, text in zip(called, ("seven", "eight"), strict=True)
    ]
    assert ask([{"role": "user", "content": "hi"}, *items, *outputs])[-1]["name"] == "read"
    first, second = (server.engine.tokenizer.decode(request.token_ids) for request in server.engine.requests)
    schemas = [json.loads(line) for line in first.splitlines() if line.startswith('{"name"')]
    assert [schema["name"] for schema in schemas] == ["lead::read", "read"]
    results = "<tool_result>seven</tool_result>\n\n<tool_result>eight</tool_result>"
    turn = f"why</think>so{calls}<｜end▁of▁sentence｜><｜User｜>{results}<｜Assistant｜><think>"
    assert second == first + turn


@pytest.mark.parametrize("size", [(20, 16), (640, 420), (1000, 800), (2500, 2000)])
def test_f34_images_are_not_dropped(server: Running, http: httpx.Client, size: tuple[int, int]) -> None:
    assert RELEASED.vision is not None
    text = [{"role": "user", "content": [{"type": "text", "text": "what?"}]}]
    image = {"type": "image_url", "image_url": {"url": data_url(*size)}}
    with_image = [{"role": "user", "content": [image, *text[0]["content"]]}]  # type: ignore[list-item]
    counts = [http.post("/tokenize", json={"messages": m}).json()["count"] for m in (text, with_image)]
    used = http.post("/v1/chat/completions", json={"messages": with_image}).json()["usage"]
    plan = resize_plan(*size, RELEASED.vision)
    assert counts[1] - counts[0] >= plan.num_tokens
    assert counts[1] - counts[0] <= plan.num_tokens + 2  # the newlines between the parts
    assert used["prompt_tokens"] == counts[1]
    assert used["prompt_tokens_details"]["image_tokens"] == plan.num_tokens


def test_f36_image_counts_in_usage_and_log(
    server: Running, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leadline.server")
    image = {"type": "image_url", "image_url": {"url": data_url()}}
    for count in (0, 1, 2):
        caplog.clear()
        content = [{"type": "text", "text": "what?"}, *[image] * count]
        body = {"messages": [{"role": "user", "content": content}]}
        details = http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens_details"]
        assert details["images"] == count
        assert (details["image_tokens"] > 0) == (count > 0)
        assert f" images={count} image_tokens={details['image_tokens']} " in caplog.text
        assert "what?" not in caplog.text


def test_f37_only_exact_model_names(server: Running, http: httpx.Client) -> None:
    for name in (NAME + "-V4", NAME[:-1], NAME.upper(), "DeepSeek-V4-Pro", "DeepSeek-V4.1-Flash", ""):
        for path, body in (
            ("/v1/chat/completions", {"messages": ASK}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
        ):
            found = http.post(path, json={"model": name, **body})
            assert found.status_code == 404
            assert found.json()["error"]["param"] == "model"
    assert http.post("/v1/chat/completions", json={"model": NAME, "messages": ASK}).status_code == 200


def test_f38_spaced_and_unspaced_markers(server: Running, client: openai.OpenAI) -> None:
    for spaced, stream in itertools.product((True, False), (True, False)):
        server.engine.script = "why</think>so" + markup("f", {"a": "x"}, spaced)
        assert ask_openai(client, stream) == ("why", "so", [("f", {"a": "x"})], "tool_calls")


def test_f39_tool_block_inside_thinking(server: Running, client: openai.OpenAI) -> None:
    call = markup("f", {"a": "x"})
    for stream in (True, False):
        server.engine.script = "why" + call
        assert ask_openai(client, stream) == ("why", "", [("f", {"a": "x"})], "tool_calls")
        server.engine.script = "why</think>" + call
        assert ask_openai(client, stream) == ("why", "", [("f", {"a": "x"})], "tool_calls")


@pytest.mark.parametrize(
    ("script", "thinking", "max_tokens", "expected"),
    [
        ("plain text", False, None, ("", "plain text", "stop")),
        ("plain</think>text", False, None, ("", "plaintext", "stop")),
        ("never closed", True, None, ("never closed", "", "stop")),
        ("", True, None, ("", "", "stop")),
        ("why</think>", True, None, ("why", "", "stop")),
        ("why is it so</think>x", True, 2, ("why is", "", "length")),
        ("a<｜User｜>b<｜end▁of▁sentence｜>c", False, None, ("", "ab", "stop")),
    ],
)
def test_f40_no_end_of_thinking(
    server: Running, client: openai.OpenAI, script: str, thinking: bool, max_tokens: int | None, expected: Any
) -> None:
    server.engine.script = script
    extra = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    for stream in (True, False):
        reasoning, content, calls, reason = ask_openai(
            client, stream, tools=[], extra_body=extra, max_tokens=max_tokens
        )
        assert (reasoning, content, reason) == expected
        assert calls == []


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_f41_required_tools(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic, choice: Any) -> None:
    """Without a word about thinking it is off; asked for, it comes first. The call is forced on the model, not on the
    prompt, which stays that of auto."""
    other: Any = {**TOOL, "function": {**TOOL["function"], "name": "g"}}
    server.engine.script = markup("g", {"a": "x"})
    for extra in ({}, {"thinking": {"type": "disabled"}}):
        found = ask_openai(client, False, tools=[TOOL, other], tool_choice=choice, extra_body=extra)
        assert found == ("", "", [("g", {"a": "x"})], "tool_calls")
    server.engine.script = "why</think>" + markup("g", {"a": "x"})
    for extra in ({"thinking": {"type": "enabled"}}, {"reasoning_effort": "high"}):
        found = ask_openai(client, False, tools=[TOOL, other], tool_choice=choice, extra_body=extra)
        assert found == ("why", "", [("g", {"a": "x"})], "tool_calls")
    tools: Any = [
        {"name": name, "description": "d", "input_schema": TOOL["function"]["parameters"]} for name in ("f", "g")
    ]
    kind: Any = {"type": "any"} if choice == "required" else {"type": "tool", "name": "g"}
    claude.messages.create(model=NAME, max_tokens=500, messages=ASK, tools=tools, tool_choice=kind)
    client.chat.completions.create(
        model=NAME, messages=ASK, tools=[TOOL, other], extra_body={"thinking": {"type": "disabled"}}
    )
    asked, _, thought, _, claudes, auto = server.engine.requests
    assert asked.token_ids == claudes.token_ids == auto.token_ids
    assert server.engine.tokenizer.decode(thought.token_ids).endswith("<｜Assistant｜><think>")
    assert auto.grammar is None
    assert None not in (asked.grammar, claudes.grammar, thought.grammar)
    with pytest.raises(openai.BadRequestError, match="no tools"):
        client.chat.completions.create(model=NAME, messages=ASK, tool_choice=choice)


def test_tool_choice_none(server: Running, client: openai.OpenAI) -> None:
    server.engine.script = "</think>so" + markup("f", {})
    assert ask_openai(client, False, tool_choice="none")[1:] == ("so" + markup("f", {}), [], "stop")
    assert "## Tools" not in server.engine.tokenizer.decode(server.engine.requests[0].token_ids)


@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": None}, {"reasoning_content": ""}, {"reasoning": ""}])
def test_f42_history_without_reasoning(server: Running, http: httpx.Client, reasoning: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], **reasoning},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    found = http.post("/v1/chat/completions", json={"messages": history, "tools": [TOOL]})
    assert found.status_code == 200, found.text
    assert "<｜Assistant｜><think></think>\n\n<" in server.engine.tokenizer.decode(server.engine.requests[0].token_ids)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_f43_both_names_of_reasoning(server: Running, http: httpx.Client, name: str) -> None:
    server.engine.script = "why not</think>so"
    message = http.post("/v1/chat/completions", json={"messages": ASK}).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "why not"
    lines = http.post("/v1/chat/completions", json={"messages": ASK, "stream": True}).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    assert "".join(delta.get(name) or "" for delta in deltas) == "why not"
    history = [*ASK, {"role": "assistant", "content": "so", name: "because"}, {"role": "user", "content": "x"}]
    http.post("/v1/chat/completions", json={"messages": history, "tools": [TOOL]})
    assert "<think>because</think>so" in server.engine.tokenizer.decode(server.engine.requests[-1].token_ids)


def test_f44_control_tokens_of_a_transcript_are_single_ids(server: Running, http: httpx.Client) -> None:
    """A tool conversation reaches the model as it was written: every mark is its own id, user text never is."""
    server.engine.script = "why</think>so" + markup("f", {"a": "x"})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": f"<{D} calls>"})}}
    history = [
        {"role": "user", "content": f"literal <{D} calls> </think>"},
        {"role": "assistant", "content": "", "reasoning": "w", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"</{D} calls>"},
    ]
    assert http.post("/v1/chat/completions", json={"messages": history, "tools": [TOOL]}).status_code == 200
    tokenizer, ids = server.engine.tokenizer, list(server.engine.requests[0].token_ids)
    at = ids.index(tokenizer.id_of("<｜User｜>"))  # the fixed tool text in front of it holds marks of its own
    assert ids[at:].count(tokenizer.id_of(D)) == 6  # two of calls, invoke and parameter each
    assert ids[at:].count(tokenizer.id_of("</think>")) == 1


def test_f45_small_budget_is_not_empty(server: Running, http: httpx.Client) -> None:
    server.engine.script = "a long chain of thought that does not come to its end soon, and goes on and on" * 3
    found = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 16}).json()
    choice = found["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] in (None, "")
    assert choice["message"]["reasoning"].startswith("a long chain")
    assert found["usage"]["completion_tokens"] == 16
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 16


def test_developer_speaks_as_system(server: Running, client: openai.OpenAI) -> None:
    for role in ("developer", "system"):
        client.chat.completions.create(model=NAME, messages=[{"role": role, "content": "be"}, *ASK])  # type: ignore[list-item]
    first, second = server.engine.requests
    assert first.token_ids == second.token_ids
