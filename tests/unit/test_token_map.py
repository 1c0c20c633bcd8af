"""Engram's token map against the published numbers."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadline.config.model import read_config
from leadline.errors import ConfigError
from leadline.ops.engram import build_hash_tables, hash_rows
from leadline.text.token_map import token_map
from leadline.text.tokenizer import Tokenizer
from tests.support.released_tokenizer import released_tokenizer

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = read_config(GOLDEN / "released_config.json")
# Appendix A: the map as little-endian int32
MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
SAMPLES = [
    *((0, 0), (1, 1), (2, 2), (100, 74), (201, 174), (200, 174), (223, 174), (262, 174), (619, 39), (39, 39)),
    *((671, 237), (455, 237), (1805, 237), (270, 237), (20852, 237), (1000, 604), (19923, 15844)),
    *((128799, 98611), (128803, 98615), (128804, 98616), (128821, 98633), (129264, 99076), (129279, 99091)),
]


@pytest.fixture(scope="module")
def released_map() -> torch.Tensor:
    return token_map(released_tokenizer(RELEASED), RELEASED)


def test_whole_map(released_map: torch.Tensor) -> None:
    assert released_map.dtype == torch.int64
    assert released_map.shape == (129280,)
    digest = hashlib.sha256(released_map.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == MAP_SHA256


@pytest.mark.parametrize(("token_id", "compressed"), SAMPLES)
def test_samples(released_map: torch.Tensor, token_id: int, compressed: int) -> None:
    assert released_map[token_id].item() == compressed


def test_recorded_samples(released_map: torch.Tensor) -> None:
    recorded = load_file(GOLDEN / "engram_hash.safetensors")
    found = released_map[recorded["map_sample_token"].long()]
    assert torch.equal(found.int(), recorded["map_sample_compressed"])


def test_sequence(released_map: torch.Tensor) -> None:
    ids = released_tokenizer(RELEASED).encode("Hello! The quick brown fox.", add_bos=True)
    assert released_map[ids].tolist() == [0, 15844, 3, 237, 4015, 9933, 18307, 16]


def test_small_vocabulary_and_size_check() -> None:
    folder = GOLDEN / "models" / "engram"
    config = read_config(folder / "config.json")
    tokenizer = Tokenizer.load(folder, config)
    found = token_map(tokenizer, config)
    assert found.unique().tolist() == list(range(330))
    upper, lower = tokenizer.encode("A")[0], tokenizer.encode("a")[0]
    assert found[upper] == found[lower]
    with pytest.raises(ConfigError, match=r"expected 331 .*got 330"):
        token_map(tokenizer, dataclasses.replace(config, engram_compressed_vocab_size=331))


@pytest.mark.parametrize(
    ("dead", "sha256"),
    [
        ([], "980b5764141cc55cc3d882135071c13c83d58ba9ba659373f751799d6a2ed31a"),
        ([2, 3], "f107a50488b053aa648cc1de83c484a9b6be9ff28f44a7220ea608822c1bb156"),
    ],
)
def test_text_to_table_rows(released_map: torch.Tensor, dead: list[int], sha256: str) -> None:
    """Appendix A: from the text to all [8, 2, 24] row numbers; dead positions stand for an image."""
    ids = released_tokenizer(RELEASED).encode("Hello! The quick brown fox.", add_bos=True)
    compressed = released_map[ids]
    compressed[dead] = -1
    padded = torch.cat([torch.full((RELEASED.engram_max_ngram_size - 1,), -1), compressed])
    window = padded.unfold(0, RELEASED.engram_max_ngram_size, 1).flip(1)
    pad = int(released_map[RELEASED.engram_pad_token_id])
    rows = torch.stack([hash_rows(window, table, pad) for table in build_hash_tables(RELEASED).values()], dim=1)
    assert rows.shape == (8, 2, 24)
    assert hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest() == sha256
