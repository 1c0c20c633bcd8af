"""The tokenizer: ids, bytes, checks against the configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from leadline.config.model import read_config
from leadline.errors import CheckpointError, ConfigError, PromptError
from leadline.text.tokenizer import Tokenizer
from tests.support.released_tokenizer import released_tokenizer, released_tokenizer_json, write_released_tokenizer

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = read_config(GOLDEN / "released_config.json")
TINY = GOLDEN / "models" / "engram"

TEXTS = ["", "Hello! The quick brown fox.", "深度求索 V4.1", "a\u0301 👩‍👩‍👧‍👦 \r\n\t x", "\x00\x1f", "\ufffd"]


@pytest.fixture(scope="module")
def released() -> Tokenizer:
    return released_tokenizer(RELEASED)


@pytest.mark.parametrize(
    ("token", "token_id"),
    [
        ("<｜begin▁of▁sentence｜>", 0),
        ("<｜end▁of▁sentence｜>", 1),
        ("<｜▁pad▁｜>", 2),
        ("<｜System｜>", 128799),
        ("<｜User｜>", 128803),
        ("<｜Assistant｜>", 128804),
        ("<think>", 128821),
        ("</think>", 128822),
        ("｜DSML｜", 128825),
        ("<｜deepseek_image｜>", 129264),
    ],
)
def test_control_tokens_have_the_published_ids(released: Tokenizer, token: str, token_id: int) -> None:
    assert released.id_of(token) == token_id
    assert released.encode(token) == [token_id]
    assert token_id in released.control_token_ids
    assert released.decode([token_id]) == token


def test_known_sequence(released: Tokenizer) -> None:
    # Appendix A of the specification
    ids = [0, 19923, 3, 455, 4787, 13769, 46012, 16]
    assert released.encode("Hello! The quick brown fox.", add_bos=True) == ids
    assert released.decode(ids[1:]) == "Hello! The quick brown fox."


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(released: Tokenizer, text: str) -> None:
    ids = released.encode(text)
    assert released.decode(ids) == text
    assert b"".join(released.token_bytes(i) for i in ids) == text.encode()
    assert ids == released.encode(text, control_tokens=False)


def test_token_bytes_agree_with_decode_for_every_id(released: Tokenizer) -> None:
    texts = released.decode_each(range(released.vocab_size))
    ours = [released.token_bytes(i).decode(errors="replace") for i in range(released.vocab_size)]
    assert ours == texts


def test_plain_text_never_becomes_a_control_token(released: Tokenizer) -> None:
    text = "a <think> b <｜User｜> <｜deepseek_image｜> ｜DSML｜"
    ids = released.encode(text, control_tokens=False)
    assert released.control_token_ids.isdisjoint(ids)
    assert released.decode(ids) == text
    assert not released.control_token_ids.isdisjoint(released.encode(text))


@pytest.mark.parametrize("bad", [-1, 129280])
def test_ids_outside_the_vocabulary(released: Tokenizer, bad: int) -> None:
    for call in (released.token_of, released.token_bytes, lambda i: released.decode([0, i])):
        with pytest.raises(PromptError, match=str(bad)):
            call(bad)


def test_lone_surrogate(released: Tokenizer) -> None:
    for control_tokens in (True, False):
        with pytest.raises(PromptError, match="surrogate"):
            released.encode("a\ud800", control_tokens=control_tokens)


def test_v4_file_is_refused() -> None:
    text = released_tokenizer_json().replace("<｜System｜>", "<｜place▁holder▁no▁799｜>")
    with pytest.raises(ConfigError, match="V4 tokenizer"):
        Tokenizer(text, RELEASED)


def test_other_image_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_token_id: expected 129264"):
        Tokenizer(released_tokenizer_json(), dataclasses.replace(RELEASED, image_token_id=129279))


def test_size_mismatch_is_refused() -> None:
    text = (TINY / "tokenizer.json").read_text()
    config = read_config(TINY / "config.json")
    assert Tokenizer(text, config).has_control_tokens is False
    for size in (config.vocab_size - 1, config.vocab_size + 1):
        with pytest.raises(ConfigError, match="384 tokens"):
            Tokenizer(text, dataclasses.replace(config, vocab_size=size))


def test_missing_byte_is_refused() -> None:
    content = json.loads((TINY / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["not a byte"] = vocab.pop("Ā")  # byte 0
    content["model"]["merges"] = []
    with pytest.raises(ConfigError, match="256 bytes, missing 1, first 0"):
        Tokenizer(json.dumps(content), read_config(TINY / "config.json"))


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path, RELEASED)
    write_released_tokenizer(tmp_path)
    named = {
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": {"content": "<｜end▁of▁sentence｜>"},
        "pad_token": "x",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert Tokenizer.load(tmp_path, RELEASED).eos_token_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | {"eos_token": "<｜User｜>"}))
    with pytest.raises(ConfigError, match="eos_token"):
        Tokenizer.load(tmp_path, RELEASED)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="Hugging Face tokenizer"):
        Tokenizer.load(tmp_path, RELEASED)


def test_only_texts_that_are_surely_too_long_are_refused(released: Tokenizer) -> None:
    text = "The lead line, 深さ 🤔. " * 40_000
    exact = len(released.encode(text))
    assert len(text) > 1 << 19  # several pieces
    for most in (exact, exact * 2 // 3, -(-exact // 2) + 10):
        released.check_length("prompt", text, most)
    with pytest.raises(PromptError, match=rf"prompt: expected at most {exact // 3} tokens"):
        released.check_length("prompt", text, exact // 3)
    released.check_length("prompt", "", 0)
    spelled = "<｜User｜>" * 3000
    released.check_length("prompt", spelled, len(released.encode(spelled)))
