"""Chat prompts byte for byte, and the parts of answers at every split."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.config.model import read_config
from leadline.errors import ImageError, PromptError
from leadline.text.chat import ChatParser, Messages, hidden_ids, render_chat
from leadline.text.detokenize import Detokenizer
from leadline.text.tokenizer import Tokenizer
from tests.support.released_tokenizer import released_tokenizer, released_tokenizer_json

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = read_config(GOLDEN / "released_config.json")
SMALL = Tokenizer.load(GOLDEN / "models" / "vision", read_config(GOLDEN / "models" / "vision" / "config.json"))

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
E75 = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "dé", "parameters": {"type": "object", "properties": {"a": {}}}},
}
# Prompt for user "hi" with TOOL: the fixed tool text comes from deepseek-recipe and must not change unnoticed.
TOOL_PROMPT_SHA256 = "101ac95f25abff4037d3af8186a5782d70a6a0f71cce5aa6d3e7f174064cebf4"
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">x "y"</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
CALLS = [("f", {"a": 'x "y"', "n": [1, 2]}), ("g", {})]


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    return released_tokenizer(RELEASED)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        ([user("hi")], {}, f"{BOS}<｜System｜>{E75}<｜User｜>hi<｜Assistant｜><think>"),
        ([user("hi")], {"thinking": False}, f"{BOS}<｜User｜>hi<｜Assistant｜></think>"),
        (
            [
                {"role": "system", "content": "S"},
                user("hi"),
                {"role": "assistant", "content": "a", "reasoning_content": "r"},
                {"role": "system", "content": "mid"},
                user("x"),
            ],
            {},
            f"{BOS}<｜System｜>{E75}S<｜User｜>hi<｜Assistant｜></think>a{EOS}<｜System｜>mid<｜User｜>x<｜Assistant｜><think>",
        ),
        ([user("hi"), user("hi")], {}, f"{BOS}<｜System｜>{E75}<｜User｜>hi\n\nhi<｜Assistant｜><think>"),
        (
            [user("a"), {"role": "latest_reminder", "content": "r"}],
            {"thinking": False},
            f"{BOS}<｜User｜>a<｜latest_reminder｜>r<｜Assistant｜></think>",
        ),
    ],
)
def test_published_examples(released: Tokenizer, messages: Messages, options: dict[str, Any], prompt: str) -> None:
    chat = render_chat(released, messages, **options)
    assert chat.text == prompt
    assert chat.thinking is options.get("thinking", True)
    assert chat.token_ids == released.encode(prompt)  # these texts hold no literal control tokens
    assert released.decode(chat.token_ids) == prompt


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        (1, 1),
        (33, 33),
        (100, 100),
        ("minimal", 50),
        ("low", 50),
        ("medium", 75),
        ("high", 75),
        ("xhigh", 75),
        ("max", 100),
    ],
)
def test_effort(released: Tokenizer, effort: Any, number: int) -> None:
    chat = render_chat(released, [user("hi")], effort=effort)
    text = E75.replace("75", str(number))
    assert chat.text == f"{BOS}<｜System｜>{text}<｜User｜>hi<｜Assistant｜><think>"
    assert chat.token_ids == released.encode(chat.text)


@pytest.mark.parametrize("effort", [0, 101, True, "none", "very", 2.5])
def test_bad_effort(released: Tokenizer, effort: Any) -> None:
    with pytest.raises(PromptError, match="effort: expected 1 to 100"):
        render_chat(released, [user("hi")], effort=effort)
    with pytest.raises(PromptError, match="without thinking"):
        render_chat(released, [user("hi")], effort=effort, thinking=False)


def test_tools(released: Tokenizer) -> None:
    chat = render_chat(released, [user("hi")], tools=[TOOL])
    assert chat.text.startswith(f"{BOS}<｜System｜>{E75}\n\n## Tools\n\n")
    assert (
        '\n{"name": "f", "description": "dé", "parameters": {"type": "object", "properties": {"a": {}}}}\n' in chat.text
    )
    assert hashlib.sha256(chat.text.encode()).hexdigest() == TOOL_PROMPT_SHA256
    assert chat.token_ids == released.encode(chat.text)


@pytest.mark.parametrize("reasoning_key", ["reasoning_content", "reasoning", None])
def test_tool_history(released: Tokenizer, reasoning_key: str | None) -> None:
    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("1", "f", '{"a": "x \\"y\\"", "n": [1, 2]}'), call("2", "g", "{}")]
    assistant: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    if reasoning_key:
        assistant |= {"reasoning": "another, which does not count", reasoning_key: "why"}
    results = [{"role": "tool", "tool_call_id": call_id, "content": "r" + call_id} for call_id in ("2", "1")]
    chat = render_chat(released, [user("hi"), assistant, *results], tools=[TOOL])
    reasoning = "why" if reasoning_key else ""
    assert chat.text.endswith(
        f"<｜User｜>hi<｜Assistant｜><think>{reasoning}</think>{CALL}{EOS}"
        "<｜User｜><tool_result>r1</tool_result>\n\n<tool_result>r2</tool_result><｜Assistant｜><think>"
    )


def test_literal_control_tokens_stay_text(released: Tokenizer) -> None:
    text = "<think> </think> <｜User｜> ｜DSML｜ <｜deepseek_image｜> <｜end▁of▁sentence｜>"
    chat = render_chat(released, [user(text)], thinking=False)
    assert chat.images == []
    assert [i for i in chat.token_ids if i in released.control_token_ids] == [0, 128803, 128804, 128822]
    assert released.decode(chat.token_ids) == chat.text == f"{BOS}<｜User｜>{text}<｜Assistant｜></think>"


def test_ids_equal_the_packages_own(released: Tokenizer) -> None:
    special_tokens = recipe.SpecialTokens(image="<｜deepseek_image｜>")
    tokenizer = recipe.Tokenizer.from_str(released_tokenizer_json())
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special_tokens).with_tokenizer(tokenizer)
    for content in (
        "",
        "深度 <think>\n\n 12345 <｜User｜>",
        [{"type": "image", "image": b"x"}, {"type": "text", "text": "?"}],
    ):
        chat = render_chat(released, [user(content)], tools=[TOOL])
        assert chat.token_ids == encoding.encode(chat.request.conversation)


def test_images_follow_their_placeholders(released: Tokenizer, tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"abc").decode()
    text = {"type": "text", "text": "a literal <｜deepseek_image｜>"}
    parts = [text, {"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": b"bytes"}]
    chat = render_chat(released, [user(parts), user([{"type": "image", "image": tmp_path}])], thinking=False)
    assert chat.images == [url, b"bytes", tmp_path]
    assert chat.token_ids.count(RELEASED.image_token_id) == 3
    image = "<｜deepseek_image｜>"
    assert chat.text == f"{BOS}<｜User｜>a literal {image}\n\n{image}\n\n{image}\n\n{image}<｜Assistant｜></think>"


def test_images_of_reordered_tool_results(released: Tokenizer) -> None:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ("1", "2")]
    results = [
        {"role": "tool", "tool_call_id": i, "content": [{"type": "image", "image": i.encode()}]} for i in ("2", "1")
    ]
    chat = render_chat(released, [user("x"), {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert chat.images == [b"1", b"2"]


def test_bad_images(released: Tokenizer) -> None:
    for url in ("https://example.org/a.png", "/etc/passwd", None):
        with pytest.raises(ImageError, match="data URL"):
            render_chat(released, [user([{"type": "image_url", "image_url": {"url": url}}])])
    with pytest.raises(ImageError, match="int"):
        render_chat(released, [user([{"type": "image", "image": 5}])])
    for data in ("MA==", "aGk="):  # deepseek-recipe reads such parts as images, the first as ours of number 0
        part = {"type": "file", "file_data": f"data:image/png;base64,{data}"}
        with pytest.raises(PromptError, match="type file"):
            render_chat(released, [user([{"type": "image", "image": b"x"}, part])])
    assert render_chat(released, [user([{"type": "image_url", "image_url": "DATA:x"}])]).images == ["DATA:x"]
    text_only = Tokenizer(released.json, dataclasses.replace(RELEASED, vision=None))
    with pytest.raises(ImageError, match=r"1 image\(s\); this model does not read images"):
        render_chat(text_only, [user([{"type": "image", "image": b""}])])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        (["hi"], "objects with role"),
        ([{"role": "developer", "content": "x"}], "developer"),
        ([user(None)], "content"),
        ([{"role": "user"}], "content"),
        ([user(5)], "content"),
        ([user([{"type": "video"}])], "video"),
        ([user("\ud800")], "surrogate"),
        ([user(b"bytes")], "bytes"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "tool_calls"),
    ],
)
def test_bad_messages(released: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        render_chat(released, messages)


def parse(parser: ChatParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    texts = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    functions = [json.loads(delta.text)["function"] for delta in deltas if delta.kind == "tool_call"]
    return texts["reasoning"], texts["content"], [(f["name"], json.loads(f["arguments"])) for f in functions]


V4_CALL = CALL.replace("｜DSML｜ ", "｜DSML｜").replace("calls>", "tool_calls>")
ANSWERS = [
    ("why</think>so", True, ("why", "so", [])),
    ("so", False, ("", "so", [])),
    ("\nwhy\n</think>\n\nso\n", True, ("why", "so\n", [])),
    ("never closed", True, ("never closed", "", [])),
    ("", True, ("", "", [])),
    ("why</think>so" + CALL, True, ("why", "so", CALLS)),
    ("so" + CALL, False, ("", "so", CALLS)),
    ("why" + CALL, True, ("why", "", CALLS)),  # a tool block ends the reasoning, with or without </think>
    ("why</think>so" + V4_CALL, True, ("why", "so", CALLS)),
    ("why</think>so" + CALL + " more", True, ("why", "so", CALLS)),
    ("why</think>a <｜DSML", True, ("why", "a <｜DSML", [])),  # not yet a marker
    ("why <｜DSML｜ x", True, ("why ", "", [])),  # the marker alone ends the reasoning
]


@pytest.mark.parametrize(("answer", "thinking", "parts"), ANSWERS)
def test_answers_at_every_split(released: Tokenizer, answer: str, thinking: bool, parts: Any) -> None:
    chat = render_chat(released, [user("x")], tools=[TOOL], thinking=thinking)
    assert parse(chat.parser(), list(answer)) == parts
    for cut in range(len(answer) + 1):
        assert parse(chat.parser(), [answer[:cut], answer[cut:]]) == parts, cut


@settings(max_examples=30)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 400), max_size=8))
def test_answers_at_random_splits(case: tuple[str, bool, Any], cuts: list[int]) -> None:
    answer, thinking, parts = case
    chat = render_chat(released_tokenizer(RELEASED), [user("x")], tools=[TOOL], thinking=thinking)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    assert parse(chat.parser(), [answer[a:b] for a, b in pairwise(edges)]) == parts


def test_tool_calls_cut_off_and_without_tools(released: Tokenizer) -> None:
    parser = render_chat(released, [user("x")], tools=[TOOL]).parser()
    deltas = parser.feed("why</think>" + CALL[: CALL.index('"n"')]) + parser.finish()
    assert [delta.kind for delta in deltas] == ["reasoning", "tool_call"]
    function = json.loads(deltas[1].text)["function"]
    assert function["name"] == "f"
    assert function["arguments"].startswith('{"a": "x \\"y\\""')
    without = render_chat(released, [user("x")], thinking=False).parser()
    assert parse(without, ["so" + CALL]) == ("", "so" + CALL, [])


def test_no_control_token_reaches_a_reader(released: Tokenizer) -> None:
    answer = released.encode(f"why</think>a<｜User｜>b<｜box｜>[1]<｜/box｜>{EOS}")
    detokenizer = Detokenizer(released, hidden_ids(released))
    pieces = [detokenizer.feed([i]) for i in answer] + [detokenizer.finish()]
    chat = render_chat(released, [user("x")])
    assert parse(chat.parser(), pieces) == ("why", "ab<｜box｜>[1]<｜/box｜>", [])


def test_plain_format() -> None:
    messages = [
        {"role": "system", "content": "S"},
        user([{"type": "text", "text": f"a {EOS}"}, {"type": "image", "image": b"x"}]),
        {"role": "assistant", "content": "b"},
        user("c"),
    ]
    chat = render_chat(SMALL, messages)
    image = SMALL.token_of(SMALL.image_token_id)
    assert chat.text == f"{BOS}System: S\n\nUser: a {EOS}\n\n{image}\n\nAssistant: b{EOS}User: c\n\nAssistant:"
    assert SMALL.decode(chat.token_ids) == chat.text
    control = [i for i in chat.token_ids if i in SMALL.control_token_ids]
    assert control == [SMALL.bos_token_id, SMALL.image_token_id, SMALL.eos_token_id]
    assert (chat.images, chat.thinking) == ([b"x"], False)
    answer = "\n an</think>swer ｜DSML｜ <think>\n"
    assert parse(chat.parser(), [answer[:6], "", answer[6:]]) == ("", answer, [])


@pytest.mark.parametrize("options", [{"thinking": True}, {"effort": 5}, {"tools": [TOOL]}])
def test_plain_format_knows_no_more(options: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="control tokens"):
        render_chat(SMALL, [user("x")], **options)
    for message in (
        {"role": "tool", "content": "x"},
        {"content": "x"},
        user(None),
        user([5]),
        user([{"type": "video"}]),
    ):
        with pytest.raises(PromptError, match=r"messages(\[0\](.content\[0\])?)?: "):
            render_chat(SMALL, [message])
