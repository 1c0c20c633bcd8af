"""Quantise-and-restore in torch; the number formats are the reference."""

from leadline.formats.fp4 import restore_fp4_e8m0 as index_quant
from leadline.formats.fp8 import restore_activation as act_quant

__all__ = ["act_quant", "index_quant"]
