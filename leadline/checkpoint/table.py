"""Rows of an Engram table, decoded where they are looked up (architecture.md section 4.11)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leadline.formats.fp8 import dequantize_e4m3_e8m0


@dataclass(frozen=True, slots=True)
class EngramTable:
    """One table on the host, usually a view of the file: 264 bytes of it are read per row looked up.

    values: [rows, U] uint8, E4M3 codes. scales: [rows, U / 32] uint8, E8M0 codes, none of them NaN.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def fetch(self, rows_TA: torch.Tensor) -> torch.Tensor:
        """Looks up A rows per token and joins them in column order.

        Args: rows_TA: [T, A] int64 row numbers from 0 up, on any device; repeats are fine.
        Returns: [T, A * U] bf16 on the device of `rows_TA`; [0, A * U] for zero tokens.
        Numerics: value x scale is exact in bf16; bitwise, row by row.
        """
        flat = rows_TA.reshape(-1).cpu()
        rows = dequantize_e4m3_e8m0(self.values.index_select(0, flat), self.scales.index_select(0, flat))
        return rows.reshape(rows_TA.shape[0], rows_TA.shape[1] * self.values.shape[1]).to(rows_TA.device)
