"""Answers that must be JSON or tool calls: which tokens may come next.

llguidance parses the schemas and walks the vocabulary. This file adds what an answer of this model needs around it: the
reasoning before, the end token behind, and taking tokens back across both borders.

V vocabulary.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from leadline.errors import RequestError
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_grammar import Tool, call_rules

# They stand above a schema's own `x-guidance` key. Nothing is ignored in silence, the separators are those of JSON, and
# white space between two parts has an end: a model could otherwise fill its budget with line feeds. Text may be escaped
# as json.dumps does it, with surrogates only in pairs.
_OPTIONS: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "json_allow_general_unicode_escapes": True,
}
# Schemas of tools are written for people too: what a mask cannot follow is passed over there, as in unmasked calls.
_TOOL_OPTIONS = {**_OPTIONS, "lenient": True}
ANY_OBJECT = {"type": "object"}
MAX_OPTIONAL = 100  # properties of an object that may be left out: masks get slow, and from some 500 on there are none


class Grammar:
    """What answers have to follow, for any number of them in the same vocabulary.

    Made by `Grammar.json_schema` and `Grammar.tool_calls`. The first grammar of a tokenizer costs about a second at
    129,280 ids, every further one a few milliseconds.
    """

    def __init__(self, tokenizer: Tokenizer, start: LLMatcher, not_in_reasoning: Sequence[int] = ()) -> None:
        self._start = start
        self._vocab_size = tokenizer.vocab_size
        self._eos_id = tokenizer.eos_token_id
        self._think_end_id = tokenizer.id_of("</think>") if tokenizer.has_control_tokens else None
        self._reasoning_V: Tensor | None = None
        if not_in_reasoning:
            self._reasoning_V = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
            self._reasoning_V[list(not_in_reasoning)] = False

    @classmethod
    def json_schema(cls, tokenizer: Tokenizer, schema: dict[str, Any] | None) -> Grammar:
        """The JSON documents that a JSON Schema allows; None allows every JSON object.

        Objects have their properties in the order of the schema. There is no white space around the document and at
        most 32 characters of it between two parts. Inside the reasoning everything is allowed, the end token as well:
        an answer may end without a word of JSON.

        Raises:
            RequestError: the schema is not valid, allows nothing, is too large, has more than `MAX_OPTIONAL` optional
                properties in one object, or uses a keyword that is not supported; the message names response_format
                and the reason.
        """
        if schema is not None and not isinstance(schema, dict):
            raise _refused("response_format", f"expected a JSON Schema as an object, got {type(schema).__name__}")
        try:
            text = json.dumps(ANY_OBJECT if schema is None else schema, allow_nan=False)
            compiled = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)  # type: ignore[arg-type]
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused("response_format", f"expected a JSON Schema, got one that is no JSON: {error}") from None
        _check_optional("response_format", schema)
        return cls(tokenizer, _started(tokenizer, compiled, "response_format"))

    @classmethod
    def tool_calls(
        cls,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        *,
        many: bool = True,
        document: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """One block of calls, in the markup of the model and with nothing around it; `call_rules` says what it holds.

        many: several calls may come, instead of exactly one. document: a schema; what it allows, as in `json_schema`,
        may come instead of the block. Inside the reasoning the marker of a block is not allowed, as readers of answers
        take it for the end of the reasoning; nor is the end token, without a document.

        Raises:
            RequestError: no tools, a vocabulary without the marker, or a schema as in `json_schema`; the message names
                tools, and the tool if it is one.
        """
        mark_id = tokenizer.id_of("｜DSML｜") if tokenizer.has_control_tokens else None
        if not tools or mark_id is None:
            raise _refused("tools", "expected at least one, and a vocabulary with V4.1's control tokens")
        for tool in tools:
            _check_optional(f"tools: {tool.name}", tool.parameters)
        _check_optional("tools", document)

        def compiled(some: Sequence[Tool], start: str) -> str:
            try:
                rules = call_rules(some, mark_id, many, _TOOL_OPTIONS)
            except (TypeError, ValueError, RecursionError) as error:
                raise _refused("tools", f"expected JSON Schemas that can be followed: {error}") from None
            return LLMatcher.grammar_from_lark(f"start: {start}\n{rules}")

        either = "calls"
        if document is not None:
            either += f" | document\ndocument: %json {json.dumps({**document, 'x-guidance': _OPTIONS})}"
        try:
            start = _started(tokenizer, compiled(tools, either), "tools")
        except RequestError:
            for tool in tools:  # one of them alone may be at fault
                _started(tokenizer, compiled([tool], "calls"), f"tools: {tool.name}")
            raise
        return cls(tokenizer, start, [mark_id, tokenizer.eos_token_id] if document is None else [mark_id])

    def matcher(self, in_reasoning: bool) -> Matcher:
        """A new matcher for one answer. in_reasoning: the answer begins inside the reasoning.

        Raises: RequestError if it does and the vocabulary has no `</think>`.
        """
        if in_reasoning and self._think_end_id is None:
            raise RequestError("expected an answer without reasoning, as this vocabulary has no </think>")
        think_end_id = self._think_end_id if in_reasoning else None
        return Matcher(self._start.deep_copy(), self._vocab_size, self._eos_id, think_end_id, self._reasoning_V)


class Matcher:
    """Where one answer stands: in the reasoning, in the part behind it that the grammar rules, or behind its end.

    The token after `</think>` is the first of the ruled part. There the end token is allowed exactly when the part is
    complete; behind it nothing else is. The only control tokens that it can hold are the markers of tool calls.
    """

    def __init__(
        self,
        ruled: LLMatcher,
        vocab_size: int,
        eos_id: int,
        think_end_id: int | None,
        reasoning_V: Tensor | None,
    ) -> None:
        self._ruled = ruled
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._think_end_id = think_end_id
        self._reasoning_V = reasoning_V
        self._in_reasoning = think_end_id is not None
        self._has_ended = False  # the library never sees end tokens

    @property
    def is_done(self) -> bool:
        """Only the end token may follow. An answer that could also go on, like the number 12, is not done."""
        return self._has_ended or (not self._in_reasoning and self._ruled.is_stopped())

    @property
    def is_free(self) -> bool:
        """Next to no token is forbidden, so drafts are worth their time."""
        return self._in_reasoning

    def mask(self) -> Tensor | None:
        """The ids that may come next, bool [V] on the CPU, at least one of them; None if all may.

        Raises: RequestError if the schema turns out to need more work than the library's limits allow.
        """
        if self._in_reasoning:
            return self._reasoning_V
        if self._has_ended:
            mask_V = torch.zeros(self._vocab_size, dtype=torch.bool)
            mask_V[self._eos_id] = True
            return mask_V
        packed = np.frombuffer(self._ruled.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_))

    def advance(self, token_id: int) -> None:
        """Take over the next token of the answer.

        Raises: RequestError if `mask` forbids it; nothing has changed then. As `mask` otherwise.
        """
        if self._in_reasoning and (self._reasoning_V is None or self._reasoning_V[token_id]):
            self._in_reasoning = token_id != self._think_end_id
        elif self._in_reasoning:
            raise RequestError(f"token {token_id} cannot follow in this reasoning; draw tokens under the mask")
        elif token_id == self._eos_id and (self._has_ended or self._ruled.is_accepting()):
            self._has_ended = True
        elif token_id == self._eos_id or self._has_ended or not self._ruled.try_consume_tokens([token_id]):
            self._check()
            raise RequestError(f"token {token_id} cannot follow in this answer; draw tokens under the mask")

    def _check(self) -> None:
        if self._ruled.is_error():
            raise RequestError(f"the schema of this answer cannot be followed any further: {self._ruled.get_error()}")


class _Words:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, control_tokens=False)


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Words(tokenizer)))


def _started(tokenizer: Tokenizer, compiled: str, field: str) -> LLMatcher:
    start = LLMatcher(_vocabulary(tokenizer), compiled)
    if start.is_error():
        # Lines and text of the grammar mean nothing to who wrote the schema.
        reason = re.sub(r"^at \d+\(\d+\): |\n +\d+ \| .*", "", start.get_error(), flags=re.DOTALL)
        raise _refused(field, f"the JSON Schema cannot be followed: {reason}")
    first = start.deep_copy()  # a schema that refers to itself shows only now that no document begins
    first.compute_bitmask()
    if first.is_error():
        raise _refused(field, "the JSON Schema allows no document; it may refer to itself without an end")
    return start


def _check_optional(field: str, schema: Any) -> None:
    """Refuse objects with more than `MAX_OPTIONAL` properties that are not required."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, Mapping):
                names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
                if (count := len(set(properties).difference(names))) > MAX_OPTIONAL:
                    raise _refused(
                        field, f"expected at most {MAX_OPTIONAL} properties that are not required, got {count}"
                    )
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _refused(field: str, reason: str) -> RequestError:
    # Messages of the library may go on for many lines; the first one says what is wrong.
    return RequestError(f"{field}: {' '.join(reason.split())[:300]}")
