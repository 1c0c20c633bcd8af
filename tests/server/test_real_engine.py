"""The server on the real engine with the small default model: what its cache does is seen, and changes no answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from leadline.engine.request import Delta
from leadline.engine.sampler import Logprob
from leadline.server.answers import CompletionAnswers, Usage
from tests.server.serving import NAME, Running
from tests.server.test_clients import TOOL, data_url
from tests.support.fake_text import byte_tokenizer
from tests.support.load import metrics

pytestmark = pytest.mark.tiny

GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}
LONG_SYSTEM = " ".join(f"Rule {i}: sound the depth before mark {i * 7 % 101} and call it out." for i in range(78))


@pytest.fixture
def talk(real: Running) -> Any:
    """Asks for a chat, through the official client, as a stream or not."""
    with openai.OpenAI(base_url=real.url + "/v1", api_key="-", max_retries=0, timeout=120) as client:
        yield lambda messages, **fields: client.chat.completions.create(messages=messages, **GREEDY, **fields)


def said(answer: Any) -> dict[str, Any]:
    """What an answer says, in all its fields."""
    message = answer.choices[0].message.model_dump()
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls") or ()]
    return {**message, "finish_reason": answer.choices[0].finish_reason}


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def forget(real: Running) -> None:
    """Make the next prompt a cold one; nothing runs in these tests while this is called."""
    real.until(lambda: not real.engine.stats().slots_used)
    real.engine._core.prefix.clear()


def test_f14_a_short_prompt_hits_the_second_time(real: Running, talk: Any) -> None:
    forget(real)
    before = metrics(httpx.get(real.url + "/metrics").text)
    messages = [{"role": "user", "content": "How deep is it here? " * 40}]
    cold, warm = talk(messages), talk(messages)
    length = cold.usage.prompt_tokens
    assert 900 < length < 1100
    assert (cached(cold), cached(warm)) == (0, (length - 1) // 128 * 128)
    assert said(cold) == said(warm)
    streamed = list(talk(messages, stream=True, stream_options={"include_usage": True}))
    assert cached(streamed[-1]) == cached(warm)
    after = metrics(httpx.get(real.url + "/metrics").text)
    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    assert moved["vllm:prefix_cache_hits_total"] == 2 * cached(warm)
    assert moved["vllm:prefix_cache_queries_total"] == moved["vllm:prompt_tokens_total"] == 3 * length
    assert moved["vllm:generation_tokens_total"] == 3 * warm.usage.completion_tokens
    assert after["leadline:snapshots"] > 0


def test_cached_tokens_in_all_protocols(real: Running, talk: Any) -> None:
    text = "What does the lead line say? " * 10
    talk([{"role": "user", "content": text}])
    fields = {"model": NAME, "temperature": 0}
    messages = {**fields, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    usage = httpx.post(real.url + "/v1/messages", json=messages, timeout=60).json()["usage"]
    assert usage["cache_read_input_tokens"] >= 128
    answer = httpx.post(real.url + "/v1/responses", json={**fields, "input": text, "max_output_tokens": 2}, timeout=60)
    assert answer.json()["usage"]["input_tokens_details"]["cached_tokens"] == usage["cache_read_input_tokens"]
    for count in (0, 256):
        done = httpx.post(real.url + "/v1/completions", json={**fields, "prompt": text, "max_tokens": 2}, timeout=60)
        assert done.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == count


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257])
def test_prompts_around_a_border_hit_the_second_time(real: Running, length: int) -> None:
    forget(real)
    body = {"prompt": [3 + i * i % 250 for i in range(length)], "max_tokens": 6, "temperature": 0, "logprobs": 0}
    cold, warm = (httpx.post(real.url + "/v1/completions", json=body, timeout=60).json() for _ in range(2))
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 128 * 128


def test_turns_of_a_chat_start_where_the_last_one_ended(talk: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me of the harbour. " * 12}]
    shared = 0  # whole pages of the prompt before, except its last token: that begins the reasoning, now past
    for _ in range(3):
        answer = talk(messages)
        assert cached(answer) >= shared
        shared = (answer.usage.prompt_tokens - 1) // 128 * 128
        assert shared > 0
        message = answer.choices[0].message
        messages += [
            {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content},
            {"role": "user", "content": "And then? " * 20},
        ]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_f15_warm_turns_of_an_agent_equal_cold_ones(real: Running, talk: Any, choice: str) -> None:
    tools = [TOOL | {"function": TOOL["function"] | {"name": f"sound_{i}"}} for i in range(10)]
    system = {"role": "system", "content": LONG_SYSTEM}
    prompts: list[Any] = [[system, {"role": "user", "content": "Sound the depth."}]]
    for turn in range(9):
        use: dict[str, Any] = {"id": f"c{turn}", "type": "function"}
        use["function"] = {
            "name": f"sound_{turn}",
            "arguments": json.dumps({"a": f'<{turn}> & "深" 🤔'}, ensure_ascii=False),
        }
        prompts.append(
            [
                *prompts[-1],
                {"role": "assistant", "content": "", "tool_calls": [use]},
                {"role": "tool", "tool_call_id": f"c{turn}", "content": json.dumps({"fathoms": turn * 3.5})},
            ]
        )
    forget(real)
    warm = [talk(prompt, tools=tools, tool_choice=choice) for prompt in prompts]
    assert all(cached(answer) > 6000 for answer in warm[1:])
    forget(real)
    cold = talk(prompts[-1], tools=tools, tool_choice=choice)
    assert cached(cold) == 0
    assert said(cold) == said(warm[-1])
    for answer in warm:
        for part in said(answer)["tool_calls"]:
            json.loads(part["arguments"])


def test_f36_images_are_counted_in_usage_and_log(talk: Any, caplog: pytest.LogCaptureFixture) -> None:
    def ask(*widths: int) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": data_url(width, 120)}} for width in widths]
        return talk([{"role": "user", "content": [*parts, {"type": "text", "text": "secret words"}]}])

    with caplog.at_level(logging.INFO, "leadline.server"):
        one, two, again = ask(200), ask(200, 90), ask(200, 90)
    counts = [answer.usage.model_dump()["prompt_tokens_details"] for answer in (one, two, again)]
    assert [count["images"] for count in counts] == [1, 2, 2]
    assert 0 < counts[0]["image_tokens"] < counts[1]["image_tokens"] == counts[2]["image_tokens"]
    assert cached(again) == (again.usage.prompt_tokens - 1) // 128 * 128
    assert said(two) == said(again)
    lines = [record.getMessage() for record in caplog.records]
    for answer, count in zip((one, two, again), counts, strict=True):
        (line,) = (line for line in lines if f"request={answer.id.removeprefix('chatcmpl-')} " in line)
        assert f" images={count['images']} image_tokens={count['image_tokens']} " in line
        assert f" cached_tokens={cached(answer)} " in line
    assert "secret" not in caplog.text


def test_tokens_lie_in_the_text_that_they_gave() -> None:
    """Equal in a stream and as a whole, also where a token is hidden or only begins a character."""
    tokenizer, _ = byte_tokenizer()
    steps = [([70], "C"), ([200], ""), ([71], "éD"), ([5], ""), ([72, 73], "EF"), ([0, 74], "G")]
    answers = CompletionAnswers(tokenizer, "cmpl-1", "m", Usage(1), 1)
    offsets = []
    for ids, text in steps:
        logprobs = [[Logprob(token_id, -1.0, 1)] for token_id in ids]
        delta = Delta(request=0, sample=0, token_ids=ids, text=text, logprobs=logprobs)
        (event,) = answers.feed(0, delta)
        assert not isinstance(event.data, str)
        offsets += event.data["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 3, 3, 4, 5, 6]
    assert answers.document()["choices"][0]["logprobs"]["text_offset"] == offsets
