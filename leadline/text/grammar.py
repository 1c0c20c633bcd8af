"""Answers that must be JSON: which tokens may come next.

llguidance parses the schema and walks the vocabulary. This file adds what an answer of this model needs around it: the
reasoning before the JSON, the end token behind it, and taking tokens back across both borders.

V vocabulary.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from leadline.errors import RequestError
from leadline.text.tokenizer import Tokenizer

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


class Grammar:
    """A compiled schema, for any number of answers in the same vocabulary. Made by `Grammar.json_schema`."""

    def __init__(self, tokenizer: Tokenizer, start: LLMatcher) -> None:
        self._start = start
        self._vocab_size = tokenizer.vocab_size
        self._eos_id = tokenizer.eos_token_id
        self._think_end_id = tokenizer.id_of("</think>") if tokenizer.has_control_tokens else None

    @classmethod
    def json_schema(cls, tokenizer: Tokenizer, schema: dict[str, Any] | None) -> Grammar:
        """The JSON documents that a JSON Schema allows; None allows every JSON object.

        Objects have their properties in the order of the schema. There is no white space around the document and at
        most 32 characters of it between two parts. The first grammar of a tokenizer costs about a second at 129,280
        ids, every further one a few milliseconds.

        Raises:
            RequestError: the schema is not valid, allows nothing, is too large, or uses a keyword that is not
                supported; the message names response_format and the reason.
        """
        if schema is not None and not isinstance(schema, dict):
            raise _refused(f"expected a JSON Schema as an object, got {type(schema).__name__}")
        try:
            text = json.dumps({"type": "object"} if schema is None else schema, allow_nan=False)
            compiled = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)  # type: ignore[arg-type]
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"expected a JSON Schema, got one that is no JSON: {error}") from None
        start = LLMatcher(_vocabulary(tokenizer), compiled)
        if start.is_error():
            raise _refused(f"the JSON Schema cannot be followed: {start.get_error()}")
        first = start.deep_copy()  # a schema that refers to itself shows only now that no document begins
        first.compute_bitmask()
        if first.is_error():
            raise _refused("the JSON Schema allows no document; it may refer to itself without an end")
        return cls(tokenizer, start)

    def matcher(self, in_reasoning: bool) -> Matcher:
        """A new matcher for one answer. in_reasoning: the answer begins inside the reasoning.

        Raises: RequestError if it does and the vocabulary has no `</think>`.
        """
        if in_reasoning and self._think_end_id is None:
            raise _refused("expected an answer without reasoning, as this vocabulary has no </think>")
        think_end_id = self._think_end_id if in_reasoning else None
        return Matcher(self._start.deep_copy(), self._vocab_size, self._eos_id, think_end_id)


class Matcher:
    """Where one answer stands: in the reasoning, in the JSON, or behind its end.

    Inside the reasoning everything is allowed, the end token as well: an answer may end without a word of JSON. The
    token after `</think>` is the first of the JSON. There the end token is allowed exactly when the document is
    complete; behind it nothing else is. Control tokens are never part of the JSON.
    """

    def __init__(self, json_part: LLMatcher, vocab_size: int, eos_id: int, think_end_id: int | None) -> None:
        self._json_part = json_part
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._think_end_id = think_end_id
        self._in_reasoning = think_end_id is not None
        self._num_reasoning = 0  # tokens up to and with </think>
        self._num_json = 0
        self._num_ends = 0  # the library does not count end tokens, so it never sees them

    @property
    def is_done(self) -> bool:
        """Only the end token may follow. A document that could also go on, like the number 12, is not done."""
        return self._num_ends > 0 or (not self._in_reasoning and self._json_part.is_stopped())

    @property
    def is_free(self) -> bool:
        """Every token may come next: `mask` gives None."""
        return self._in_reasoning

    def mask(self) -> Tensor | None:
        """The ids that may come next, bool [V] on the CPU, at least one of them; None if all may.

        Raises: RequestError if the schema turns out to need more work than the library's limits allow.
        """
        if self._in_reasoning:
            return None
        if self._num_ends:
            mask_V = torch.zeros(self._vocab_size, dtype=torch.bool)
            mask_V[self._eos_id] = True
            return mask_V
        packed = np.frombuffer(self._json_part.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_))

    def advance(self, token_id: int) -> None:
        """Take over the next token of the answer.

        Raises: RequestError if `mask` forbids it; nothing has changed then. As `mask` otherwise.
        """
        if self._in_reasoning:
            self._num_reasoning += 1
            self._in_reasoning = token_id != self._think_end_id
        elif token_id == self._eos_id and (self._num_ends or self._json_part.is_accepting()):
            self._num_ends += 1
        elif token_id != self._eos_id and not self._num_ends and self._json_part.try_consume_tokens([token_id]):
            self._num_json += 1
        else:
            self._check()
            raise _refused(f"token {token_id} cannot follow in the JSON of this answer; draw tokens under the mask")

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens: everything is as if they had never come.

        Raises: RequestError if there were not so many.
        """
        total = self._num_reasoning + self._num_json + self._num_ends
        if not 0 <= count <= total:
            raise _refused(f"expected 0 to {total} tokens to take back, got {count}")
        ends = min(count, self._num_ends)
        inside = min(count - ends, self._num_json)
        before = count - ends - inside
        self._num_ends -= ends
        self._num_json -= inside
        self._num_reasoning -= before
        if inside:
            self._json_part.rollback(inside)
            self._check()
        if before:  # the last token of the reasoning is its end, so it is open again
            self._in_reasoning = True

    def _check(self) -> None:
        if self._json_part.is_error():
            raise _refused(f"the JSON Schema cannot be followed any further: {self._json_part.get_error()}")


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


def _refused(reason: str) -> RequestError:
    # Messages of the library may go on for many lines; the first one says what is wrong.
    return RequestError(f"response_format: {' '.join(reason.split())[:300]}")
