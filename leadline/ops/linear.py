"""Linear layers, and the weights they take in three stored forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.formats import fp4, fp8
from leadline.ops import dispatch
from leadline.ops.reference import linear as reference


@dataclass(slots=True)
class Weight:
    """A weight [N out, K in] in the form it is stored in; the bf16 values are exact for every form.

    bf16  dense [N, K] bf16
    fp8   codes float8_e4m3fn [N, K], scale float8_e8m0fnu [ceil N/32, K/32]: one power of two per 32 x 32 tile
    fp4   codes int8 [N, K/2] (even input in the low nibble), scale float8_e8m0fnu [N, K/32]
    """

    kind: Literal["bf16", "fp8", "fp4"]
    shape: tuple[int, int]
    codes: Tensor | None = None
    scale: Tensor | None = None
    dense: Tensor | None = None
    _is_packed: bool = False  # `dense` is in the form of `operand`

    @classmethod
    def from_bf16(cls, dense: Tensor) -> Weight:
        """dense: bf16 [N, K], kept without a copy. Raises OperatorError on another dtype or rank."""
        if dense.dtype is not torch.bfloat16 or dense.dim() != 2:
            raise OperatorError(f"bf16 weight: expected bf16 [N, K], got {dense.dtype} {list(dense.shape)}; cast it")
        return cls("bf16", (dense.shape[0], dense.shape[1]), dense=dense)

    @classmethod
    def from_fp8(cls, codes: Tensor, scale: Tensor) -> Weight:
        """codes: float8_e4m3fn [N, K], K a multiple of 32; scale: float8_e8m0fnu [ceil N/32, K/32]."""
        N, K = codes.shape
        _check_stored("fp8", codes, torch.float8_e4m3fn, K, scale, (-(-N // 32), K // 32))
        return cls("fp8", (N, K), codes, scale)

    @classmethod
    def from_fp4(cls, codes: Tensor, scale: Tensor) -> Weight:
        """codes: int8 [N, K/2], K a multiple of 32; scale: float8_e8m0fnu [N, K/32]."""
        N, K = codes.shape[0], codes.shape[1] * 2
        _check_stored("fp4", codes, torch.int8, K, scale, (N, K // 32))
        return cls("fp4", (N, K), codes, scale)

    @classmethod
    def stack(cls, weights: Sequence[Weight]) -> Weight:
        """One weight with the rows of all, in order: same kind and K, FP8 rows a multiple of 32. Copies."""
        first = weights[0]
        if any(w.kind != first.kind or w.shape[1] != first.shape[1] for w in weights):
            raise OperatorError(
                f"weights to stack: expected one kind and K, got {[(w.kind, w.shape) for w in weights]}"
            )
        if first.kind == "fp8" and any(w.shape[0] % 32 for w in weights[:-1]):
            raise OperatorError(
                "fp8 weights to stack: expected row counts that are multiples of 32; densify them first"
            )
        shape = (sum(w.shape[0] for w in weights), first.shape[1])
        if first.kind == "bf16":
            return cls("bf16", shape, dense=torch.cat([w.dense_NK() for w in weights]))
        # cat knows no one-byte floats on every version, bytes are enough
        codes = torch.cat([_stored(w.codes).view(torch.uint8) for w in weights]).view(_stored(first.codes).dtype)
        scale = torch.cat([_stored(w.scale).view(torch.uint8) for w in weights]).view(_stored(first.scale).dtype)
        return cls(first.kind, shape, codes, scale)

    def dense_NK(self) -> Tensor:
        """bf16 [N, K]: the kept values, or decoded for this call. Exact (rounds only at bf16 subnormals)."""
        if self.dense is not None:
            return self.dense.to_dense() if self.dense.is_mkldnn else self.dense
        N = self.shape[0]
        codes = _stored(self.codes).view(torch.uint8)
        scale = _stored(self.scale).view(torch.uint8)
        if self.kind == "fp4":
            return fp4.dequantize_fp4_e8m0(codes, scale)
        return fp8.dequantize_e4m3_e8m0(codes, scale.repeat_interleave(fp8.BLOCK, dim=0)[:N])

    def operand(self) -> Tensor:
        """The bf16 values as `linear` multiplies with them.

        A weight that is kept dense on a CPU is packed for the library's kernel at first use and stays in that form
        only: equal values in equal memory.
        """
        if self.dense is None:
            return self.dense_NK()
        if not self._is_packed:
            self.dense = reference.packed(self.dense)
            self._is_packed = True
        return self.dense

    def densified(self) -> Weight:
        """The same values as a bf16 weight; four (FP4) or two (FP8) times the memory, no decoding per call."""
        return self if self.kind == "bf16" else Weight("bf16", self.shape, dense=self.dense_NK())


def linear(x_TK: Tensor, weight: Weight, *, impl: str | None = None) -> Tensor:
    """y = x W^T.

    Args:
        x_TK: [T, K] bf16; for an FP8 or FP4 weight the caller has quantised it (`act_quant`), which is not checked.
        weight: [N, K].
    Returns: bf16 [T, N]; T = 0 is fine.
    Numerics: products accumulate in fp32 in a free order, one rounding to bf16; a row does not depend on other rows,
        bitwise.
    Raises: OperatorError on a dtype or width mismatch.
    Source: architecture.md 3.7.
    """
    if x_TK.dtype is not torch.bfloat16 or x_TK.shape[-1] != weight.shape[1]:
        raise OperatorError(
            f"linear x_TK: expected bf16 [T, {weight.shape[1]}], got {x_TK.dtype} {list(x_TK.shape)}; "
            "check the order of the layers"
        )
    out: Tensor = dispatch.choose("linear", impl, x_TK.device)(x_TK, weight.operand())
    return out


def linear_f32(x_TK: Tensor, w_NK: Tensor, *, impl: str | None = None) -> Tensor:
    """y = x W^T with fp32 operands, products and result: router, mixing coefficients, ratio-2 compressor, head.

    Args:
        x_TK: [T, K] fp32, or bf16 that is widened here (exact).
        w_NK: [N, K] fp32.
    Returns: fp32 [T, N]; T = 0 is fine.
    Numerics: fp32 accumulation in a free order that does not depend on T. Bitwise independent of other rows.
    Raises: OperatorError on a dtype or width mismatch.
    """
    if w_NK.dtype is not torch.float32 or x_TK.shape[-1] != w_NK.shape[1]:
        raise OperatorError(
            f"linear_f32: expected x [T, K] and fp32 w [N, K], got {list(x_TK.shape)} and {w_NK.dtype} "
            f"{list(w_NK.shape)}; widen the weight once at load"
        )
    out: Tensor = dispatch.choose("linear_f32", impl, x_TK.device)(x_TK, w_NK)
    return out


def grouped_linear(x_TGI: Tensor, weight: Weight, *, impl: str | None = None) -> Tensor:
    """The low-rank output projection wo_a: group g of the input meets rows g*Y .. g*Y+Y-1 of the weight only.

    Args:
        x_TGI: [T, G, I] bf16, not quantised (the stored FP8 weight is used as exact bf16).
        weight: [G * Y, I].
    Returns: bf16 [T, G * Y], groups in order.
    Numerics: as `linear`, per group.
    Raises: OperatorError on a dtype or shape mismatch.
    Source: architecture.md 2.5, 4.10.
    """
    if x_TGI.dtype is not torch.bfloat16 or x_TGI.shape[2] != weight.shape[1] or weight.shape[0] % x_TGI.shape[1]:
        raise OperatorError(
            f"grouped_linear: expected bf16 x [T, G, {weight.shape[1]}] with G dividing {weight.shape[0]}, got "
            f"{x_TGI.dtype} {list(x_TGI.shape)}; check o_groups"
        )
    out: Tensor = dispatch.choose("grouped_linear", impl, x_TGI.device)(x_TGI, weight.dense_NK())
    return out


def _check_stored(
    kind: str, codes: Tensor, dtype: torch.dtype, K: int, scale: Tensor, scale_shape: tuple[int, int]
) -> None:
    if (
        codes.dtype is not dtype
        or K % 32
        or scale.dtype is not torch.float8_e8m0fnu
        or tuple(scale.shape) != scale_shape
    ):
        raise OperatorError(
            f"{kind} weight: expected {dtype} codes, K divisible by 32, and scale float8_e8m0fnu {list(scale_shape)}, "
            f"got {codes.dtype} {list(codes.shape)} and {scale.dtype} {list(scale.shape)}; check the checkpoint"
        )


def _stored(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a packed weight has codes and scale"
    return tensor


dispatch.register("linear", "reference", reference.linear)
dispatch.register("linear_f32", "reference", reference.linear_f32)
dispatch.register("grouped_linear", "reference", reference.grouped_linear)
