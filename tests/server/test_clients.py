"""The official clients on every path, in streams and not, through every way an answer can end."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from tests.server.serving import NAME, Running

pytestmark = pytest.mark.unit

ASK: list[Any] = [{"role": "user", "content": "hi"}]
ANSWER = "let me see 🤔</think>Grüße, 世界! one two STOP three"
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}},
}
# name, extra fields, what ends the answer
ENDS: list[tuple[str, dict[str, Any]]] = [
    ("eos", {}),
    ("stop string", {"stop": ["STOP", "zzz"]}),
    ("stop across tokens", {"stop": "two STO"}),
    ("length", {"max_tokens": 9}),
    ("length in the reasoning", {"max_tokens": 2}),
    ("stop id", {"extra_body": {"stop_token_ids": [-1]}}),  # the id of the last token is put in by the test
    ("ignored eos", {"extra_body": {"ignore_eos": True}}),
]


def picture(width: int = 40, height: int = 30) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(out, "PNG")
    return out.getvalue()


def data_url(width: int = 40, height: int = 30) -> str:
    return "data:image/png;base64," + base64.b64encode(picture(width, height)).decode()


def _options(server: Running, options: dict[str, Any]) -> dict[str, Any]:
    if "stop_token_ids" in options.get("extra_body", {}):
        return {"extra_body": {"stop_token_ids": [server.engine.tokenizer.encode(ANSWER)[-1]]}}
    return dict(options)


@pytest.mark.parametrize(("name", "options"), ENDS)
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream_equals_document(
    server: Running, client: openai.OpenAI, name: str, options: dict[str, Any], thinking: bool, n: int
) -> None:
    server.engine.script = ANSWER if thinking else ANSWER.partition("</think>")[2]
    options = _options(server, options)
    extra = {**options.pop("extra_body", {}), "thinking": {"type": "enabled" if thinking else "disabled"}}
    asked: Any = {"model": NAME, "messages": ASK, "n": n, "logprobs": True, "top_logprobs": 1, "extra_body": extra}
    document = client.chat.completions.create(**asked, **options)
    choices: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "reasoning_content": "", "logprobs": [], "finish": None} for _ in range(n)
    ]
    usage = None
    stream = client.chat.completions.create(**asked, **options, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            choice, delta = choices[part.index], part.delta
            choice["content"] += delta.content or ""
            choice["reasoning"] += getattr(delta, "reasoning", None) or ""
            choice["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            choice["finish"] = part.finish_reason or choice["finish"]
            if part.logprobs is not None:
                choice["logprobs"] += [entry.token for entry in part.logprobs.content or ()]
    assert usage == document.usage
    assert len(document.choices) == n
    for choice, whole in zip(choices, document.choices, strict=True):
        assert choice["content"] == (whole.message.content or "")
        assert choice["reasoning"] == choice["reasoning_content"] == (getattr(whole.message, "reasoning", None) or "")
        assert choice["finish"] == whole.finish_reason
        listed = [] if whole.logprobs is None else [entry.token for entry in whole.logprobs.content or ()]
        assert choice["logprobs"] == listed
    first = document.choices[0]
    assert first.finish_reason == ("length" if name.startswith(("length", "ignored")) else "stop")
    if name == "stop string":
        assert first.message.content == "Grüße, 世界! one two "
        assert first.model_dump()["stop_reason"] == "STOP"
    if name == "stop id":
        assert first.message.content == "Grüße, 世界! one two STOP"
    if name == "eos":
        assert first.message.content == "Grüße, 世界! one two STOP three"


@pytest.mark.parametrize(("name", "options"), ENDS)
def test_completion_stream_equals_document(
    server: Running, client: openai.OpenAI, name: str, options: dict[str, Any]
) -> None:
    server.engine.script = ANSWER
    options = {"max_tokens": 100, **_options(server, options)}
    prompts = ["a", "b"]
    asked: Any = {"model": NAME, "prompt": prompts, "n": 2, "logprobs": 1}
    document = client.completions.create(**asked, **options)
    texts, tokens = [""] * 4, [[], [], [], []]  # type: ignore[var-annotated]
    reasons: list[Any] = [None] * 4
    for chunk in client.completions.create(**asked, **options, stream=True, stream_options={"include_usage": True}):
        for part in chunk.choices:
            texts[part.index] += part.text
            reasons[part.index] = part.finish_reason or reasons[part.index]
            assert part.logprobs is not None
            tokens[part.index] += part.logprobs.tokens or []
        usage = chunk.usage
    assert usage == document.usage
    assert texts == [choice.text for choice in document.choices]
    assert reasons == [choice.finish_reason for choice in document.choices]
    assert tokens == [choice.logprobs.tokens for choice in document.choices if choice.logprobs is not None]


def test_completion_prompts(server: Running, client: openai.OpenAI) -> None:
    for prompt, count in (("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)):
        found = client.completions.create(model=NAME, prompt=prompt)  # type: ignore[arg-type]
        assert [choice.text for choice in found.choices] == ["ok"] * count
    assert [list(request.token_ids) for request in server.engine.requests[-2:]] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("eos", {}, "end_turn"),
        ("stop", {"stop_sequences": ["STOP"]}, "stop_sequence"),
        ("length", {"max_tokens": 9}, "max_tokens"),
    ],
)
def test_messages_stream_equals_document(
    server: Running, claude: anthropic.Anthropic, name: str, options: dict[str, Any], reason: str
) -> None:
    server.engine.script, server.engine.cached = ANSWER, 5
    asked: Any = {"model": NAME, "max_tokens": 100, "messages": ASK, "system": "be brief", **options}
    document = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    # The client's stream helper takes over only the counts that it knows by name.
    without_id = {"id": True, "content": {"__all__": {"signature"}}, "usage": {"reasoning_tokens"}}
    assert streamed.model_dump(exclude=without_id) == document.model_dump(exclude=without_id)  # type: ignore[arg-type]
    assert document.stop_reason == reason
    assert document.stop_sequence == ("STOP" if name == "stop" else None)
    assert [block.type for block in document.content] == ["thinking", "text"]
    assert document.usage.cache_read_input_tokens == 5
    whole = len(server.engine.requests[0].token_ids)
    assert document.usage.input_tokens + 5 == whole
    counted = claude.messages.count_tokens(model=NAME, messages=ASK, system="be brief")
    assert counted.input_tokens == whole


@pytest.mark.parametrize(("name", "status"), [("eos", "completed"), ("length", "incomplete")])
def test_responses_stream_equals_document(server: Running, client: openai.OpenAI, name: str, status: str) -> None:
    server.engine.script = ANSWER
    asked: Any = {"model": NAME, "input": "hi", "instructions": "brief", "temperature": 0.5}
    if name == "length":
        asked["max_output_tokens"] = 9
    document = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    streamed = events[-1].response  # type: ignore[union-attr]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert document.status == streamed.status == status
    assert streamed.output_text == document.output_text
    assert streamed.usage == document.usage
    assert document.instructions == "brief"
    assert document.temperature == 0.5
    assert server.engine.requests[0].params.temperature == 0.5
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == document.output_text
    if name == "eos":
        assert document.output_text == ANSWER.partition("</think>")[2]


def test_sampling_values_are_the_requests_own(server: Running, client: openai.OpenAI) -> None:
    extra = {"top_k": 7, "min_p": 0.1, "min_tokens": 1, "ignore_eos": False, "stop_token_ids": [9], "priority": -2}
    client.chat.completions.create(
        model=NAME,
        messages=ASK,
        temperature=0.0,
        top_p=0.5,
        seed=11,
        stop="x",
        max_completion_tokens=3,
        extra_body=extra,
    )
    (request,) = server.engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.0, 0.5, 7, 0.1, 11)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (3, 1, ("x",), (9,))
    assert request.priority == -2
    client.chat.completions.create(model=NAME, messages=ASK)
    defaults = server.engine.requests[-1].params
    assert (defaults.temperature, defaults.top_p, defaults.max_tokens) == (1.0, 1.0, None)


@pytest.mark.parametrize(("effort", "number"), [("low", 50), ("high", 75), ("max", 100), (33, 33)])
def test_effort(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic, effort: Any, number: int) -> None:
    client.chat.completions.create(model=NAME, messages=ASK, extra_body={"reasoning_effort": effort})
    client.responses.create(model=NAME, input="hi", reasoning={"effort": effort})
    claude.messages.create(model=NAME, messages=ASK, max_tokens=9, extra_body={"output_config": {"effort": effort}})
    for request in server.engine.requests:
        assert f"Reasoning Effort: {number} (" in server.engine.tokenizer.decode(request.token_ids)


def test_thinking_off(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for extra in (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        client.chat.completions.create(model=NAME, messages=ASK, extra_body=extra)
    client.responses.create(model=NAME, input="hi", reasoning={"effort": "none"})
    claude.messages.create(model=NAME, messages=ASK, max_tokens=9, thinking={"type": "disabled"})
    for request in server.engine.requests:
        assert server.engine.tokenizer.decode(request.token_ids).endswith("hi<｜Assistant｜></think>")


def test_images_in_all_protocols(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    url = data_url()
    parts: Any = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    chat = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])
    source: Any = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    message = claude.messages.create(
        model=NAME, max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
    )
    item: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}
    response = client.responses.create(model=NAME, input=[item])
    for request in server.engine.requests:
        types = request.token_types
        assert types is not None
        assert len(types) == len(request.token_ids) == len(request.cache_ids)
        inside = [i for i, kind in zip(request.cache_ids, types.tolist(), strict=True) if kind >= 0]
        assert len(set(inside)) == len(inside)
        assert max(inside) < 0
        assert min(inside) >= -(1 << 62)
    image_tokens = int((server.engine.requests[0].token_types >= 0).sum())
    details = [
        chat.usage.prompt_tokens_details.model_dump(),  # type: ignore[union-attr]
        message.usage.model_dump(),
        response.usage.input_tokens_details.model_dump(),  # type: ignore[union-attr]
    ]
    for found in details:
        assert (found["images"], found["image_tokens"]) == (1, image_tokens)


def test_json_answers_carry_a_grammar(server: Running, client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    server.engine.script = '</think>{"a": 1}'
    found = client.chat.completions.create(model=NAME, messages=ASK, response_format={"type": "json_object"})
    assert found.choices[0].message.content == '{"a": 1}'
    named: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    client.chat.completions.create(model=NAME, messages=ASK, response_format=named)
    client.responses.create(model=NAME, input="hi", text={"format": {"type": "json_object"}})
    client.responses.create(
        model=NAME, input="hi", text={"format": {"type": "json_schema", "name": "x", "schema": schema}}
    )
    extra = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    claude.messages.create(model=NAME, messages=ASK, max_tokens=9, extra_body=extra)
    client.completions.create(model=NAME, prompt="x", extra_body={"response_format": {"type": "json_object"}})
    assert all(request.grammar is not None for request in server.engine.requests)
    texts = [server.engine.tokenizer.decode(request.token_ids) for request in server.engine.requests]
    assert ["## Response Format:" in text for text in texts] == [False, True, False, True, False, False]


def test_models_and_tokenize(client: openai.OpenAI, server: Running, http: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("leadline")
    text = "Grüße, <think> 世界"
    tokens = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["tokens"][0] == server.engine.tokenizer.bos_token_id
    assert http.post("/detokenize", json={"tokens": tokens["tokens"][1:]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": ASK, "tools": [TOOL]}).json()["tokens"]
    client.chat.completions.create(model=NAME, messages=ASK, tools=[TOOL])
    assert chat == list(server.engine.requests[-1].token_ids)


def test_small_vocabulary_is_served_everywhere(plain_server: Running) -> None:
    plain_server.engine.script = "\nplain </think> text"
    client = openai.OpenAI(base_url=plain_server.url + "/v1", api_key="-", max_retries=0)
    claude = anthropic.Anthropic(base_url=plain_server.url, api_key="-", max_retries=0)
    text = plain_server.engine.tokenizer.decode(plain_server.engine.tokenizer.encode("\nplain </think> text"))
    with client, claude:
        parts: Any = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": data_url()}}]
        chat = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])
        assert chat.choices[0].message.content == text
        assert getattr(chat.choices[0].message, "reasoning_content", None) is None
        message = claude.messages.create(model=NAME, max_tokens=99, messages=ASK)
        assert message.content[0].text == text  # type: ignore[union-attr]
        assert client.responses.create(model=NAME, input="hi").output_text == text
        assert client.completions.create(model=NAME, prompt="hi", max_tokens=99).choices[0].text == text
        for extra in ({"tools": [TOOL]}, {"reasoning_effort": 5}, {"thinking": {"type": "enabled"}}):
            with pytest.raises(openai.BadRequestError, match="control tokens"):
                client.chat.completions.create(model=NAME, messages=ASK, extra_body=extra)
        with pytest.raises(anthropic.BadRequestError, match="control tokens"):
            claude.messages.create(
                model=NAME, max_tokens=9, messages=ASK, tools=[{"name": "f", "input_schema": {"type": "object"}}]
            )
