"""Incremental detokenisation equals decoding the whole, for every split."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.config.model import read_config
from leadline.errors import PromptError
from leadline.text.detokenize import Detokenizer
from leadline.text.tokenizer import Tokenizer
from tests.support.released_tokenizer import released_tokenizer

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL_CONFIG = read_config(GOLDEN / "models" / "engram" / "config.json")
SMALL = Tokenizer.load(GOLDEN / "models" / "engram", SMALL_CONFIG)
TEXTS = ["", "plain", "深度求索", "👩‍👩‍👧‍👦 e\u0301", "a\r\n\t\x00", "日本語🇯🇵<think>x</think>"]


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.feed(ids[a:b]) for a, b in pairwise(edges)]
    return [*deltas, detokenizer.finish()]


# The small vocabulary is mostly single bytes, so random ids make every kind of broken UTF-8.
@given(st.lists(st.integers(0, SMALL.vocab_size - 1)), st.lists(st.integers(0, 1000)))
def test_any_ids_in_any_split(ids: list[int], cuts: list[int]) -> None:
    assert "".join(in_pieces(SMALL, ids, cuts)) == SMALL.decode(ids)


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_text_never_shows_a_split_character(text: str, cuts: list[int]) -> None:
    deltas = in_pieces(SMALL, SMALL.encode(text), cuts)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("text", TEXTS)
def test_released_vocabulary_token_by_token(text: str) -> None:
    tokenizer = released_tokenizer(read_config(GOLDEN / "released_config.json"))
    ids = tokenizer.encode(text)
    assert "".join(in_pieces(tokenizer, ids, list(range(len(ids))))) == text


def test_unfinished_character_is_flushed_as_replacement() -> None:
    ids = SMALL.encode("a深")
    detokenizer = Detokenizer(SMALL)
    assert [detokenizer.feed([i]) for i in ids[:-1]] == ["a"] + [""] * (len(ids) - 2)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_hidden_and_unknown_ids() -> None:
    detokenizer = Detokenizer(SMALL, hidden_ids={SMALL.eos_token_id})
    assert detokenizer.feed([*SMALL.encode("ok"), SMALL.eos_token_id]) == "ok"
    with pytest.raises(PromptError, match="384"):
        detokenizer.feed([SMALL.vocab_size])
