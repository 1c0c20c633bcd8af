"""Grammar masks: every walk under them ends in valid JSON, and taking tokens back leaves no trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.config.model import read_config
from leadline.errors import RequestError
from leadline.text.grammar import Grammar, Matcher
from leadline.text.tokenizer import Tokenizer
from tests.support.fake_text import byte_tokenizer
from tests.support.released_tokenizer import released_tokenizer

pytestmark = pytest.mark.unit

RELEASED = read_config(Path(__file__).parent.parent / "golden" / "released_config.json")
FREE_TOKENS = 80  # of a walk; then it takes what leads to the end soonest
MOST_TOKENS = 600

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "point": {"$ref": "#/$defs/pair"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "home"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_person(value: Any) -> bool:
    home = value["home"]
    return (
        {"name", "home"} <= value.keys() <= {"name", "age", "home"}
        and isinstance(value["name"], str)
        and ("age" not in value or (type(value["age"]) is int and 0 <= value["age"] <= 150))
        and {"city"} <= home.keys() <= {"city", "point"}
        and isinstance(home["city"], str)
        and ("point" not in home or (len(home["point"]) == 2 and all(map(is_number, home["point"]))))
    )


SCHEMAS: dict[str, tuple[dict[str, Any] | None, Callable[[Any], bool]]] = {
    "any object": (None, lambda v: isinstance(v, dict)),
    "anything": ({}, lambda v: True),
    "nested, optional keys": (PERSON, is_person),
    "array of choices": (
        {"type": "array", "items": {"enum": ["red", "grün", 3, None]}, "minItems": 1, "maxItems": 5},
        lambda v: 1 <= len(v) <= 5 and all(item in ("red", "grün", 3, None) for item in v),
    ),
    "number": ({"type": "number"}, is_number),
    "short text": ({"type": "string", "maxLength": 4}, lambda v: isinstance(v, str) and len(v) <= 4),
    "pattern": ({"type": "string", "pattern": "^[а-я]{2}-[0-9]$"}, lambda v: len(v) == 4 and v[2] == "-"),
    "any of": (
        {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}]},
        lambda v: isinstance(v, bool) or v["x"] is None,
    ),
}


@pytest.fixture(scope="module", params=["bytes", "released"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_tokenizer()[0] if request.param == "bytes" else released_tokenizer(RELEASED)


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    return released_tokenizer(RELEASED)


def allowed(matcher: Matcher) -> set[int]:
    mask_V = matcher.mask()
    assert mask_V is not None
    assert mask_V.dtype == torch.bool
    return set(mask_V.nonzero().flatten().tolist())


def feed(matcher: Matcher, ids: list[int]) -> None:
    for token_id in ids:
        mask_V = matcher.mask()
        assert mask_V is None or bool(mask_V[token_id]), token_id
        matcher.advance(token_id)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, control_tokens=False)


def walk(tokenizer: Tokenizer, matcher: Matcher, rng: random.Random) -> list[int]:
    """Uniform choices among the allowed ids; the ids before the end token."""
    eos = tokenizer.eos_token_id
    closing = [eos] + [plain(tokenizer, text)[0] for text in ('"', "}", "]", ":", "0")]
    forbidden = torch.tensor(sorted(tokenizer.control_token_ids - {eos}))
    ids: list[int] = []
    for step in range(MOST_TOKENS):
        mask_V = matcher.mask()
        assert mask_V is not None
        assert not bool(mask_V[forbidden].any())
        choices = mask_V.nonzero().flatten()
        assert len(choices)
        assert not matcher.is_done or choices.tolist() == [eos]
        token_id = int(choices[rng.randrange(len(choices))])
        if step >= FREE_TOKENS:
            token_id = next((token for token in closing if bool(mask_V[token])), token_id)
        matcher.advance(token_id)
        if token_id == eos:
            return ids
        ids.append(token_id)
    raise AssertionError(f"no end after {MOST_TOKENS} tokens")


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_walk_under_the_mask_ends_in_valid_json(tokenizer: Tokenizer, name: str) -> None:
    schema, is_valid = SCHEMAS[name]
    grammar = Grammar.json_schema(tokenizer, schema)
    for seed in range(12 if tokenizer.vocab_size < 1000 else 4):
        ids = walk(tokenizer, grammar.matcher(False), random.Random(seed))
        text = b"".join(tokenizer.token_bytes(i) for i in ids).decode()  # strict: no half characters
        value = json.loads(text)
        assert is_valid(value), text
        json.dumps(value, ensure_ascii=False).encode()  # strict: no half surrogate pairs


def test_the_end_is_allowed_exactly_when_the_document_is_complete(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_token_id
    matcher = Grammar.json_schema(tokenizer, PERSON).matcher(False)
    text = '{"name": "Zoë 深度 \\n\\u00e9\\ud83d\\ude00", "home": {"city": "Wien", "point": [1.5e3, -2]}}'
    for token_id in plain(tokenizer, text):
        assert eos not in allowed(matcher)
        assert not matcher.is_done
        feed(matcher, [token_id])
    assert allowed(matcher) == {eos}
    assert matcher.is_done
    feed(matcher, [eos, eos])
    assert allowed(matcher) == {eos}
    matcher = Grammar.json_schema(tokenizer, {"type": "integer"}).matcher(False)
    feed(matcher, plain(tokenizer, "12"))
    assert eos in allowed(matcher)
    assert len(allowed(matcher)) > 1
    assert not matcher.is_done


def test_matchers_of_one_grammar_are_independent(tokenizer: Tokenizer) -> None:
    grammar = Grammar.json_schema(tokenizer, None)
    first, second = grammar.matcher(False), grammar.matcher(False)
    feed(first, plain(tokenizer, '{"a'))
    assert allowed(second) == allowed(grammar.matcher(False))
    assert allowed(first) != allowed(second)


def test_reasoning_is_free_and_the_json_begins_behind_it(released: Tokenizer) -> None:
    think_end = released.id_of("</think>")
    assert think_end is not None
    grammar = Grammar.json_schema(released, PERSON)
    thought = [*plain(released, "Hm, {not JSON} "), 129264, released.eos_token_id]
    document = [*plain(released, '{"name": "a", "home": {"city": ""}}'), released.eos_token_id]
    matcher, fresh = grammar.matcher(True), grammar.matcher(False)
    for token_id in [*thought, think_end]:
        assert matcher.mask() is None
        assert not matcher.is_done
        matcher.advance(token_id)
    assert allowed(matcher) == allowed(fresh)
    assert think_end not in allowed(matcher)
    feed(matcher, document)
    assert matcher.is_done


def test_refused_moves_change_nothing(released: Tokenizer) -> None:
    think_end = released.id_of("</think>")
    assert think_end is not None
    matcher = Grammar.json_schema(released, PERSON).matcher(True)
    feed(matcher, [5, think_end, *plain(released, '{"name": "a"')])
    before = allowed(matcher)
    for token_id in (released.eos_token_id, think_end, released.id_of("}")):
        with pytest.raises(RequestError, match="cannot follow"):
            matcher.advance(token_id)  # type: ignore[arg-type]
    assert allowed(matcher) == before
    feed(matcher, plain(released, ', "home": {"city": "b"}}'))
    with pytest.raises(RequestError, match="cannot follow"):
        matcher.advance(5)
    assert matcher.is_done


def test_white_space_has_an_end(tokenizer: Tokenizer) -> None:
    matcher = Grammar.json_schema(tokenizer, None).matcher(False)
    assert all(tokenizer.token_bytes(token_id).startswith(b"{") for token_id in allowed(matcher))
    feed(matcher, plain(tokenizer, "{"))
    space = plain(tokenizer, "\n")[0]
    count = 0
    while space in allowed(matcher):
        matcher.advance(space)
        count += 1
    assert count == 32


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "got list"),
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "object", "properties": 3}, "properties must be an object"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "http://example.com/schema"}, "does not fetch"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"const": float("nan")}, "no JSON"),
        ({"const": {1}}, "no JSON"),
        (nested(400), "recursion limit"),
        (nested(5000), "recursion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_schemas_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"(?s)^response_format: .*{reason}") as refused:
        Grammar.json_schema(byte_tokenizer()[0], schema)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_separators_of_a_schema_are_not_taken() -> None:
    tokenizer = byte_tokenizer()[0]
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"item_separator": ";"}}
    feed(Grammar.json_schema(tokenizer, schema).matcher(False), plain(tokenizer, "[1,1]"))


def test_reasoning_needs_its_token() -> None:
    grammar = Grammar.json_schema(byte_tokenizer()[0], None)
    with pytest.raises(RequestError, match="no </think>"):
        grammar.matcher(True)
