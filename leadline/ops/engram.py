"""Engram: which table rows the last tokens hash to, and how the fetched value enters the streams."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leadline.config.engram import engram_moduli
from leadline.config.model import ModelConfig
from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import engram as reference


@dataclass(frozen=True, slots=True)
class HashTable:
    """Constants of one Engram layer, int64. Multipliers exceed 2^53: never pass them through floats or JSON."""

    multipliers: Tensor  # [n], by look-back
    primes: Tensor  # [A], order-major, then head
    offsets: Tensor  # [A], first row of each column


def build_hash_tables(config: ModelConfig) -> dict[int, HashTable]:
    """The hash constants of every Engram layer, as the published tables were built.

    Moduli: `engram_moduli`. Multipliers: odd numbers from numpy's default_rng(10007 * layer), small enough that
    products with compressed ids stay below 2^63.
    Source: architecture.md 4.11.
    """
    tables = {}
    for layer, moduli in engram_moduli(config).items():
        bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, config.engram_max_ngram_size, dtype=np.int64)
        factors = drawn * 2 + 1
        offsets = [0, *itertools.accumulate(moduli[:-1])]
        tables[layer] = HashTable(torch.from_numpy(factors), torch.tensor(moduli), torch.tensor(offsets))
    return tables


def hash_rows(window_TN: Tensor, table: HashTable, pad: int, *, impl: str | None = None) -> Tensor:
    """Table rows of the n-grams that end at each token.

    Args:
        window_TN: int64 [T, n], compressed ids at p, p-1, .. p-(n-1); -1 inside image spans and before the start. Such
            an entry blocks itself and everything before it: those become `pad`.
        table: of the layer, on the device of the window.
        pad: compressed id of the pad token.
    Returns: int64 [T, A] row numbers, columns order-major (2, 3, ..), then head. T = 0 is fine.
    Numerics: exact integers.
    Raises: OperatorError if the window is not int64 [T, n].
    Source: architecture.md 4.11.
    """
    if window_TN.dtype is not torch.int64 or window_TN.shape[-1] != table.multipliers.shape[0]:
        raise OperatorError(
            f"hash_rows window_TN: expected int64 [T, {table.multipliers.shape[0]}], got {window_TN.dtype} "
            f"{list(window_TN.shape)}; pad the look-back with -1"
        )
    out: Tensor = dispatch.choose("hash_rows", impl, window_TN.device)(
        window_TN, table.multipliers, table.primes, table.offsets, pad
    )
    return out


def engram_gate(
    h_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    q_weight_SD: Tensor,
    k_weight_SD: Tensor,
    eps: float,
    image_T: Tensor | None,
    *,
    impl: str | None = None,
) -> Tensor:
    """h_c + gate_c * value, the gate from how well the stream agrees with its key.

        d_c = sum(h_c q_c k_c key_c) * rsqrt(mean(h_c^2) + eps) * rsqrt(mean(key_c^2) + eps) * D^-0.5
        gate_c = sigma(copysign(sqrt(max(|d_c|, 1e-6)), d_c))

    Args:
        h_TSD: [T, S, D] bf16 streams before the layer. key_TSD: [T, S, D] bf16. value_TD: [T, D] bf16.
        q_weight_SD, k_weight_SD: [S, D] bf16 or fp32.
        image_T: [T] bool, positions of image spans, where the gate is shut; None if there are none.
    Returns: bf16 [T, S, D], a new tensor. T = 0 is fine.
    Numerics: fp32, one rounding to bf16; bitwise independent of other tokens.
    Raises: OperatorError on a dtype or shape mismatch.
    Source: architecture.md 4.11.
    """
    if h_TSD.dtype is not torch.bfloat16 or key_TSD.shape != h_TSD.shape or value_TD.shape[-1] != h_TSD.shape[-1]:
        raise OperatorError(
            f"engram_gate: expected bf16 h and key [T, S, D], value [T, D], got {h_TSD.dtype} {list(h_TSD.shape)}, "
            f"{list(key_TSD.shape)} and {list(value_TD.shape)}; split the projection into S keys and one value"
        )
    out: Tensor = dispatch.choose("engram_gate", impl, h_TSD.device)(
        h_TSD, key_TSD, value_TD, q_weight_SD, k_weight_SD, eps, image_T
    )
    return out


dispatch.register("hash_rows", "reference", reference.hash_rows)
dispatch.register("engram_gate", "reference", reference.engram_gate)
