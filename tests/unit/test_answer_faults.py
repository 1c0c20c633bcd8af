"""Faults of other engines around reasoning, tools and images, from the tokens of a model to the parts of an answer."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from leadline.config.model import ModelConfig, read_config
from leadline.config.sampling import SamplingParams
from leadline.errors import ConfigError, ImageError
from leadline.llm import LLM
from leadline.outputs import CompletionOutput
from leadline.text.chat import render_chat
from leadline.text.images import expand_images, load_image, prepare_image
from leadline.text.tokenizer import CONTROL_TOKENS
from tests.support.released_tokenizer import released_tokenizer
from tests.support.scripted_llm import scripted_llm

pytestmark = pytest.mark.unit

RELEASED = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
HELLO = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def answer(text: str, params: SamplingParams = GREEDY, speculate: bool = False, **options: Any) -> CompletionOutput:
    llm = scripted_llm(RELEASED, text, speculate=speculate, max_cache_tokens=4096)
    (output,) = llm.chat(HELLO, params, **options)
    return output.outputs[0]


def parts(output: CompletionOutput) -> tuple[str, str, list[tuple[str, str]], str | None]:
    calls = [json.loads(call)["function"] for call in output.tool_calls]
    named = [(call["name"], json.loads(call["arguments"])["a"]) for call in calls]
    return output.reasoning, output.text, named, output.finish_reason


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v41_text", "deepseek_v411", "deepseek_v4.1", "v41"])
def test_f37_names_are_matched_exactly(model_type: str) -> None:
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.from_dict(RELEASED.to_dict() | {"model_type": model_type})


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("spelling", ["V4.1", "V4"])
def test_f38_both_spellings_of_tool_markers(spelling: str, speculate: bool) -> None:
    call = CALL if spelling == "V4.1" else CALL.replace("｜DSML｜ ", "｜DSML｜").replace("calls>", "tool_calls>")
    output = answer("why</think>so" + call, speculate=speculate, tools=[TOOL])
    assert parts(output) == ("why", "so", [("f", "x")], "stop")


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("close", ["</think>", ""], ids=["closed", "open"])
def test_f39_tool_block_inside_thinking(close: str, speculate: bool) -> None:
    output = answer("why" + close + CALL, speculate=speculate, tools=[TOOL])
    assert parts(output) == ("why", "", [("f", "x")], "stop")


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize(
    ("text", "thinking", "max_tokens", "expected"),
    [
        ("so", False, None, ("", "so", [], "stop")),
        ("why</think>so", True, None, ("why", "so", [], "stop")),
        ("no end of it", True, None, ("no end of it", "", [], "stop")),
        ("why</think>", True, None, ("why", "", [], "stop")),
        ("<think>why</think>so", True, None, ("why", "so", [], "stop")),
        ("", True, None, ("", "", [], "stop")),
        ("one two three four five", True, 3, ("one two three", "", [], "length")),
        ("why</think>one two three", True, 4, ("why", "one two", [], "length")),
        ("a<｜User｜>b<｜latest_reminder｜></think>c<｜System｜>d", True, None, ("ab", "cd", [], "stop")),
        ("</think>so<think>more</think>", False, None, ("", "somore", [], "stop")),
    ],
    ids=[
        "off",
        "on",
        "never closed",
        "closed at the end",
        "opened twice",
        "nothing",
        "cut inside",
        "cut behind",
        "control",
        "marks",
    ],
)
def test_f40_no_end_of_thinking(
    text: str, thinking: bool, max_tokens: int | None, expected: tuple[Any, ...], speculate: bool
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    output = answer(text, params, speculate, thinking=thinking)
    assert parts(output) == expected
    control = [token for token in CONTROL_TOKENS if token in output.reasoning + output.text]
    assert control == []


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafts"])
def test_f45_small_budgets_show_their_reasoning(speculate: bool) -> None:
    thought = "Let me think about what the user may want when all that was said is one word of greeting, which"
    output = answer(thought + " is hello.</think>Hello!", SamplingParams(temperature=0, max_tokens=16), speculate)
    assert len(output.token_ids) == 16
    assert output.finish_reason == "length"
    assert output.text == ""
    assert output.reasoning
    assert thought.startswith(output.reasoning)
    assert released_tokenizer(RELEASED).encode(output.reasoning) == output.token_ids


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(out, "PNG")
    return out.getvalue()


def test_f34_every_image_has_its_prompt_tokens() -> None:
    assert RELEASED.vision is not None
    tokenizer = released_tokenizer(RELEASED)
    text_only = len(render_chat(tokenizer, HELLO).token_ids)
    counts = []
    for size in ((640, 420), (20, 16), (1000, 800), (2500, 2000)):
        parts_of_message = [{"type": "image", "image": png(*size)}, {"type": "text", "text": "hello"}]
        chat = render_chat(tokenizer, [{"role": "user", "content": parts_of_message}])
        images = [prepare_image(load_image(source), RELEASED.vision) for source in chat.images]
        ids, types = expand_images(chat.token_ids, [image.plan for image in images], RELEASED.image_token_id)
        assert len(images) == 1
        assert int((types >= 0).sum()) == images[0].plan.num_tokens
        assert len(ids) == text_only + 1 + images[0].plan.num_tokens  # parts of a message are joined by "\n\n"
        counts.append(images[0].plan.num_tokens)
    assert counts == [189, 194, 502, 1010]  # a very small image is scaled up like one of 544 x 544 pixels


def test_f34_a_text_only_model_refuses_images() -> None:
    config = dataclasses.replace(RELEASED, vision=None)
    llm: LLM = scripted_llm(config, "so")
    message = {"role": "user", "content": [{"type": "image", "image": png(20, 16)}]}
    with pytest.raises(ImageError, match="does not read images"):
        llm.chat([message])
