"""The sizes of Engram tables: prime moduli of the hashes, with which the row counts agree (architecture.md 4.11)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leadline.errors import ConfigError

if TYPE_CHECKING:
    from leadline.config.model import ModelConfig


def engram_moduli(config: ModelConfig) -> dict[int, list[int]]:
    """Moduli by Engram layer: the primes from engram_vocab_size on, ascending, dealt out by layer, order and head.

    Raises: ConfigError if those of a layer do not add up to its entry of engram_num_embeddings.
    """
    primes = primes_from(config.engram_vocab_size)
    moduli = {}
    for layer, num_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        own = list(itertools.islice(primes, config.engram_columns))
        if sum(own) != num_rows:
            raise ConfigError(
                f"engram_num_embeddings: layer {layer}: expected {sum(own)}, the sum of {len(own)} primes from "
                f"engram_vocab_size {config.engram_vocab_size} on (by engram_max_ngram_size "
                f"{config.engram_max_ngram_size} and engram_n_heads {config.engram_n_heads}), got "
                f"{list(config.engram_num_embeddings)}"
            )
        moduli[layer] = own
    return moduli


def primes_from(start: int) -> Iterator[int]:
    """Primes >= start, ascending. Trial division: the released tables need 48 primes near 16 million."""
    return (p for p in itertools.count(max(start, 2)) if all(p % d for d in range(2, math.isqrt(p) + 1)))
