"""Masks for tool calls: every walk under them is a call that the parser reads and the tool's schema allows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

from leadline.config.model import read_config
from leadline.errors import RequestError
from leadline.text.chat import render_chat
from leadline.text.grammar import Grammar, Matcher
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_grammar import Tool
from tests.support.fake_text import byte_tokenizer
from tests.support.released_tokenizer import released_tokenizer

pytestmark = pytest.mark.unit

RELEASED = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
D = "｜DSML｜"
OPEN, CLOSE = f"\n\n<{D} calls>\n", f"\n</{D} calls>"
FREE_TOKENS = 150  # of a walk; then it takes what leads to the end soonest
MOST_TOKENS = 1200

COLOUR = {"enum": ["red", 'gr"<ün', "a</b>"]}
TOOLS = [
    Tool(
        "search-it_9",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "any text"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "colour": {"$ref": "#/$defs/colour"},
                "maybe": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"type": "null"}]},
                "mixed": {"enum": ["one", 2, None]},
                "list": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "maxItems": 3},
                "путь/a.b": {"type": "string", "pattern": r"^/[a-z]{1,4}/\d+$"},
                "inside": {"type": "string", "pattern": "x[.]y"},
                "pair": {"allOf": [{"type": ["boolean", "number"]}]},
                "both": {"allOf": [{"minLength": 2}, {"type": "string", "maxLength": 4}]},
                "any": {},
            },
            "required": ["limit", "colour"],
            "$defs": {"colour": COLOUR},
            "additionalProperties": False,
        },
    ),
    Tool("all_optional", {"type": "object", "properties": {"a": {"const": "x"}, "b": {"const": [1]}, "c": True}}),
    Tool("none", {"type": "object", "properties": {}}),
    Tool("free", {"type": "object"}),
    Tool("numbers", {"type": "object", "additionalProperties": {"type": "integer"}}),
    Tool("unnamed", {"type": "object", "required": ["k"], "properties": {}}),
    Tool("whole", {"$ref": "#/$defs/it", "$defs": {"it": {"type": "object", "properties": {"v": {"type": "null"}}}}}),
    Tool(
        "beside",  # keywords beside others
        {
            "properties": {
                "ref": {"$ref": "#/$defs/text", "maxLength": 3},
                "any": {"maxLength": 3, "anyOf": [{"type": "string"}, {"type": "null"}]},
                "one": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
                "whole": {"type": "integer", "enum": [1, "two"]},
            },
            "$defs": {"text": {"type": "string", "minLength": 1}},
        },
    ),
    Tool("nothing said"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return released_tokenizer(RELEASED)


@pytest.fixture(scope="module")
def mark_id(tokenizer: Tokenizer) -> int:
    found = tokenizer.id_of(D)
    assert found is not None
    return found


def parameter(name: str, value: Any, is_text: bool | None = None) -> str:
    is_text = isinstance(value, str) if is_text is None else is_text
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    return f'\n<{D} parameter name="{name}" string="{str(is_text).lower()}">{text}</{D} parameter>'


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the format writes it; without arguments it has an empty line."""
    inside = "".join(parameter(*item) for item in arguments.items()) or "\n"
    return f'<{D} invoke name="{name}">{inside}\n</{D} invoke>'


def block(*calls: str) -> str:
    return OPEN + "\n".join(calls) + CLOSE


def first_refused(matcher: Matcher, ids: Sequence[int]) -> int | None:
    """The first of the tokens that the mask forbids, the others taken over."""
    for number, token_id in enumerate(ids):
        mask_V = matcher.mask()
        if mask_V is not None and not mask_V[token_id]:
            return number
        matcher.advance(token_id)
    return None


def is_allowed(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    return first_refused(grammar.matcher(False), [*tokenizer.encode(text), tokenizer.eos_token_id]) is None


def walk(tokenizer: Tokenizer, grammar: Grammar, rng: random.Random) -> str:
    """Uniform choices among the allowed ids; the text before the end token."""
    closing = [tokenizer.eos_token_id, *(tokenizer.encode(text)[0] for text in (D, "</", '"', "}", "]", "0", "/", "a"))]
    matcher, ids = grammar.matcher(False), list[int]()
    for step in range(MOST_TOKENS):
        mask_V = matcher.mask()
        assert mask_V is not None
        choices = mask_V.nonzero().flatten()
        assert len(choices)
        token_id = int(choices[rng.randrange(len(choices))])
        # A text would go on for ever: of 129,280 tokens hardly one ends it.
        if step >= FREE_TOKENS or (len(choices) > 1000 and rng.random() < 0.2):
            token_id = next((token for token in closing if mask_V[token]), token_id)
        matcher.advance(token_id)
        if token_id == tokenizer.eos_token_id:
            return tokenizer.decode(ids)
        ids.append(token_id)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens")


def read(tokenizer: Tokenizer, text: str) -> list[tuple[str, Any]]:
    """The calls that the parser finds; it must find nothing else."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    parser = render_chat(tokenizer, [{"role": "user", "content": "x"}], tools=tools, thinking=False).parser()
    deltas = [*parser.feed(text), *parser.finish()]
    assert all(delta.kind == "tool_call" for delta in deltas), deltas
    functions = [json.loads(delta.text)["function"] for delta in deltas]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("tool", TOOLS[:-1], ids=lambda tool: tool.name)
def test_any_walk_under_the_mask_is_a_valid_call(tokenizer: Tokenizer, tool: Tool) -> None:
    grammar = Grammar.tool_calls(tokenizer, [tool], many=False)
    for seed in range(6):
        text = walk(tokenizer, grammar, random.Random(seed))
        ((name, arguments),) = read(tokenizer, text)
        assert name == tool.name
        jsonschema_rs.validate(dict(tool.parameters or {}), arguments)
        known = (tool.parameters or {}).get("properties")
        assert known is None or tool.name == "unnamed" or arguments.keys() <= known.keys()


def test_several_calls_of_several_tools(tokenizer: Tokenizer) -> None:
    tools = TOOLS[1:3]
    found = [read(tokenizer, walk(tokenizer, Grammar.tool_calls(tokenizer, tools), random.Random(i))) for i in range(8)]
    assert {len(calls) for calls in found} > {1}
    assert {name for calls in found for name, _ in calls} == {tool.name for tool in tools}
    one = [
        read(tokenizer, walk(tokenizer, Grammar.tool_calls(tokenizer, tools, many=False), random.Random(i)))
        for i in range(8)
    ]
    assert {len(calls) for calls in one} == {1}


GOOD = {"limit": 3, "colour": "red"}
HARD = 'a < b && c > "d" & \\ \' </ 深度思考 🤔👩‍👩‍👧 line\nbreak\t}{][ <invoke name="x"> ｜ DSML </'


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("search-it_9", GOOD, True),
        ("search-it_9", {"query": HARD, **GOOD, "maybe": None, "any": HARD}, True),
        ("search-it_9", {"query": "", **GOOD, "mixed": "one", "list": ["red", 'gr"<ün'], "any": [HARD]}, True),
        ("search-it_9", {**GOOD, "mixed": None, "путь/a.b": "/abc/12", "inside": "..x.y..", "pair": True}, True),
        ("search-it_9", {"limit": 3}, False),
        ("search-it_9", {"colour": "red", "limit": 3}, False),  # parameters come in the order of the schema
        ("search-it_9", {**GOOD, "limit": 51}, False),
        ("search-it_9", {**GOOD, "colour": "blue"}, False),
        ("search-it_9", {**GOOD, "maybe": "x"}, False),
        ("search-it_9", {**GOOD, "mixed": "two"}, False),
        ("search-it_9", {**GOOD, "mixed": 3}, False),
        ("search-it_9", {**GOOD, "list": ["blue"]}, False),
        ("search-it_9", {**GOOD, "путь/a.b": "/abc/१"}, False),  # a digit, but none of ASCII
        ("search-it_9", {**GOOD, "путь/a.b": "x/abc/1"}, False),
        ("search-it_9", {**GOOD, "inside": "xzy"}, False),
        ("search-it_9", {**GOOD, "other": 1}, False),
        ("other", {}, False),
        ("all_optional", {}, True),
        ("all_optional", {"b": [1]}, True),
        ("all_optional", {"a": "x", "c": HARD}, True),
        ("all_optional", {"b": [1], "a": "x"}, False),
        ("none", {}, True),
        ("none", {"a": 1}, False),
        ("free", {"x": HARD, "y": [1, {}]}, True),
        ("numbers", {"x": 1}, True),
        ("numbers", {"x": "1"}, False),
        ("nothing said", {"x": None}, True),
        ("beside", {"ref": "abc", "any": "abc", "one": "abc", "whole": 1}, True),
        ("beside", {"any": None, "one": 4}, True),
        ("beside", {"ref": "abcd"}, False),
        ("beside", {"ref": ""}, False),
        ("beside", {"any": "abcd"}, False),
        ("beside", {"one": [1]}, False),
        ("beside", {"one": "abcd"}, False),
        ("beside", {"whole": "two"}, False),
    ],
)
def test_what_may_be_called(tokenizer: Tokenizer, name: str, arguments: dict[str, Any], expected: bool) -> None:
    grammar = Grammar.tool_calls(tokenizer, TOOLS)
    text = block(call("none", {}), call(name, arguments))
    assert is_allowed(grammar, tokenizer, text) is expected
    if expected:
        assert read(tokenizer, text) == [("none", {}), (name, arguments)]


@pytest.mark.parametrize("name", ["all_optional", "free"])
def test_a_parameter_comes_once(tokenizer: Tokenizer, name: str) -> None:
    """Where the schema names it; names that the request does not know cannot all be remembered."""
    once, twice = (
        f'{OPEN}<{D} invoke name="{name}">{parameter("a", "x")}{parameter("b", [1]) * count}\n</{D} invoke>{CLOSE}'
        for count in (1, 2)
    )
    grammar = Grammar.tool_calls(tokenizer, TOOLS)
    assert is_allowed(grammar, tokenizer, once)
    assert is_allowed(grammar, tokenizer, twice) is (name == "free")


def test_the_answer_is_the_block_and_nothing_else(tokenizer: Tokenizer, mark_id: int) -> None:
    grammar = Grammar.tool_calls(tokenizer, TOOLS)
    right = block(call("none", {}))
    assert is_allowed(grammar, tokenizer, right)
    for text in ("", "so" + right, right + "so", right * 2, OPEN + CLOSE, right[1:], call("none", {}), "{}"):
        assert not is_allowed(grammar, tokenizer, text)
    matcher = grammar.matcher(False)
    assert first_refused(matcher, tokenizer.encode(right)) is None
    assert matcher.is_done
    mask_V = matcher.mask()
    assert mask_V is not None
    assert mask_V.nonzero().flatten().tolist() == [tokenizer.eos_token_id]


@pytest.mark.parametrize("tool", ["search-it_9", "both"])
def test_a_text_never_holds_the_mark(tokenizer: Tokenizer, mark_id: int, tool: str) -> None:
    """Neither as its token nor spelled: either way a reader would take it for the end of the text."""
    name, value = ("query", {"type": "string"}) if tool != "both" else ("both", {"type": "string", "maxLength": 500})
    grammar = Grammar.tool_calls(tokenizer, [Tool("f", {"properties": {name: value}, "required": [name]})])
    start = tokenizer.encode(f'{OPEN}<{D} invoke name="f">\n<{D} parameter name="{name}" string="true">x')
    spelled = tokenizer.encode(f"</{D}", control_tokens=False)
    assert mark_id not in spelled
    assert first_refused(grammar.matcher(False), [*start, *spelled]) is not None
    matcher = grammar.matcher(False)
    assert first_refused(matcher, start) is None
    mask_V = matcher.mask()
    assert mask_V is not None
    assert not mask_V[sorted(tokenizer.control_token_ids)].any()
    assert int(mask_V.sum()) > 100_000
    assert first_refused(matcher, tokenizer.encode(f"y</{D} parameter")) is None


def test_reasoning_holds_neither_the_mark_nor_the_end(tokenizer: Tokenizer, mark_id: int) -> None:
    eos, think_end = tokenizer.eos_token_id, tokenizer.id_of("</think>")
    assert think_end is not None
    for document, forbidden in ((None, {mark_id, eos}), ({}, {mark_id})):
        matcher = Grammar.tool_calls(tokenizer, TOOLS, document=document).matcher(True)
        mask_V = matcher.mask()
        assert mask_V is not None
        assert set((~mask_V).nonzero().flatten().tolist()) == forbidden
        assert matcher.is_free
        for token_id in forbidden:
            with pytest.raises(RequestError, match="cannot follow"):
                matcher.advance(token_id)
        thought, answer = [*tokenizer.encode("Hm."), think_end], [*tokenizer.encode(block(call("none", {}))), eos]
        assert first_refused(matcher, thought[:-1]) is None
        assert matcher.is_free
        assert first_refused(matcher, [think_end, *answer]) is None
        assert not matcher.is_free
        assert matcher.is_done


def test_a_document_instead_of_the_calls(tokenizer: Tokenizer) -> None:
    grammar = Grammar.tool_calls(tokenizer, TOOLS, document={"type": "object", "required": ["a"], "properties": {}})
    right = block(call("none", {}))
    for text, expected in (
        (right, True),
        ('{"a": "深"}', True),
        ("{}", False),
        ("[]", False),
        ('{"a": 1}' + right, False),
    ):
        assert is_allowed(grammar, tokenizer, text) is expected


def test_a_document_must_be_followed_whole(tokenizer: Tokenizer) -> None:
    """Unlike the schemas of tools, where what a mask cannot follow is passed over."""
    unique = {"type": "array", "uniqueItems": True}
    Grammar.tool_calls(tokenizer, [Tool("f", {"properties": {"a": unique}})])
    with pytest.raises(RequestError, match="uniqueItems"):
        Grammar.tool_calls(tokenizer, TOOLS, document=unique)


def choices(depth: int) -> dict[str, Any]:
    """2 ** depth ways through references, in few words."""
    return {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)} | {f"d{depth}": {}}


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": 3}, "properties as an object"),
        ({"required": "a"}, "required as a list"),
        ({"required": [["a"]]}, "names in required"),
        ({"properties": {"a": 3}}, "as an object, got 3"),
        ({"properties": {"a": {"type": "nonsense"}}, "required": ["a"]}, "Invalid type: nonsense"),
        ({"properties": {"a": {"minimum": 5, "maximum": 1, "type": "integer"}}, "required": ["a"]}, "Unsatisfiable"),
        ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "Unsatisfiable"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, r"expected a \$ref into"),
        ({"properties": {"a": {"$ref": "http://example.com/schema"}}}, r"expected a \$ref into"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "below #/"),
        ({"$ref": "#"}, "followed"),
        ({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": choices(40)}, "at most 10000"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]}, "invalid regex"),
        ({"properties": {"a": {"type": "string", "minLength": "x"}}, "required": ["a"]}, "invalid regex"),
        ({"properties": {"a": {"const": float("nan")}}}, "followed"),
        ({"properties": {'a"b': {}}}, "cannot carry"),
        ({"properties": {"a b": {}}}, "cannot carry"),
        ({"properties": {"a\\b": {}}}, "cannot carry"),
        ({"properties": {"": {}}}, "cannot carry"),
        ({"properties": {"a": {"const": f"</{D} parameter>"}}}, "cannot carry"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_schemas_are_refused(tokenizer: Tokenizer, parameters: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"^tools: .*{reason}") as refused:
        Grammar.tool_calls(tokenizer, [Tool("good"), Tool("bad", parameters)])
    assert len(str(refused.value)) < 400
    assert "calls:" not in str(refused.value)  # nothing of the grammar's own text


def test_long_texts_and_many_tools_are_within_the_limits(tokenizer: Tokenizer) -> None:
    value = {"type": "string", "minLength": 3, "maxLength": 1_000_000}
    schema = {"type": "object", "properties": {f"p{i}": value for i in range(12)}, "required": ["p3"]}
    grammar = Grammar.tool_calls(tokenizer, [Tool(f"tool_{i}", schema) for i in range(100)])
    for text in ("abc" * 500, "深" * 1000):
        assert is_allowed(grammar, tokenizer, block(call("tool_99", {"p3": text})))
    assert not is_allowed(grammar, tokenizer, block(call("tool_99", {"p3": "ab"})))


def test_what_a_tool_grammar_needs(tokenizer: Tokenizer) -> None:
    for vocabulary, tools in ((tokenizer, []), (byte_tokenizer()[0], TOOLS)):
        with pytest.raises(RequestError, match=r"^tools: expected at least one"):
            Grammar.tool_calls(vocabulary, tools)


def test_masks_are_masks(tokenizer: Tokenizer) -> None:
    mask_V = Grammar.tool_calls(tokenizer, TOOLS).matcher(False).mask()
    assert mask_V is not None
    assert mask_V.dtype == torch.bool
    assert mask_V.shape == (tokenizer.vocab_size,)
