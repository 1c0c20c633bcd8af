"""Byte maps of the cache rows, and reading rows by number (architecture.md 7.1).

    row         bytes at released widths   values                              scales
    window      528 = 512 + 16             E4M3, one byte a channel            E8M0, one per 32 channels
    compressed  288 = 256 + 32             E2M1, even channel in low nibble    E4M3, one per 16 channels
    index       68  =  64 +  4             E2M1, even channel in low nibble    E8M0, one per 32 channels

A pool keeps the two parts in separate planes, values [M, value_bytes] and scales [M, scale_bytes], both uint8: the
plane of values stays aligned whatever the row length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leadline.errors import ConfigError
from leadline.formats import fp4, fp8


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One kind of row: how many bytes go to each plane and how channels become bytes."""

    name: str
    width: int  # channels
    value_bytes: int
    scale_bytes: int
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]  # bf16 [..., width] -> (values, scales), uint8
    unpack: Callable[[Tensor, Tensor], Tensor]  # (values, scales) -> bf16 [..., width], exact

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes


def window_row(C: int) -> RowLayout:
    """Window KV of C channels, C a multiple of 32. Raises ConfigError otherwise."""
    _check_width("window", C, fp8.BLOCK)
    return RowLayout("window", C, C, C // fp8.BLOCK, fp8.quantize_e4m3_e8m0, fp8.dequantize_e4m3_e8m0)


def compressed_row(C: int) -> RowLayout:
    """Compressed KV of C channels, C a multiple of 16. Raises ConfigError otherwise."""
    _check_width("compressed", C, fp4.BLOCK_E4M3)
    return RowLayout("compressed", C, C // 2, C // fp4.BLOCK_E4M3, fp4.quantize_fp4_e4m3, fp4.dequantize_fp4_e4m3)


def index_row(X: int) -> RowLayout:
    """Index key of X channels, X a multiple of 32. Raises ConfigError otherwise."""
    _check_width("index", X, fp4.BLOCK_E8M0)
    return RowLayout("index", X, X // 2, X // fp4.BLOCK_E8M0, fp4.quantize_fp4_e8m0, fp4.dequantize_fp4_e8m0)


def _check_width(name: str, width: int, block: int) -> None:
    if width <= 0 or width % block:
        raise ConfigError(
            f"{name} row width: expected a positive multiple of {block}, got {width}; check the head widths"
        )


class Rows(Protocol):
    """Rows that can be read by number, whatever form they are stored in."""

    def gather(self, row_ids: Tensor) -> Tensor:
        """row_ids: int32 or int64 [...], all within the pool (no -1). Returns bf16 [..., width]; repeats are fine."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows in their byte form; each gather decodes what it reads."""

    layout: RowLayout
    values: Tensor  # uint8 [M, value_bytes]
    scales: Tensor  # uint8 [M, scale_bytes]

    def gather(self, row_ids: Tensor) -> Tensor:
        ids = row_ids.reshape(-1)
        rows = self.layout.unpack(self.values.index_select(0, ids), self.scales.index_select(0, ids))
        return rows.view(*row_ids.shape, self.layout.width)


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Rows kept as bf16 values (already quantised and restored, so equal to the packed form bit for bit)."""

    rows_MC: Tensor

    def gather(self, row_ids: Tensor) -> Tensor:
        rows = torch.index_select(self.rows_MC, 0, row_ids.reshape(-1))
        return rows.view(*row_ids.shape, self.rows_MC.shape[-1])
