"""Manifold-constrained hyper-connections: S residual streams, mixed around every sub-layer."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import OperatorError
from leadline.ops import dispatch
from leadline.ops.reference import hyper as reference


def mix_coefficients(
    h_TSD: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
    *,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The coefficients a sub-layer derives from the streams as they stand before it.

        m = (flatten(h) fn^T) * rsqrt(mean(flatten(h)^2) + norm_eps)
        pre_j = sigma(m_j s0 + b_j) + eps        post_j = 2 sigma(m_{S+j} s1 + b_{S+j})
        comb = softmax rows of (m s2 + b) + eps, then 2 * iters - 1 normalisations over j, k, j, ..., j

    Args:
        h_TSD: [T, S, D] bf16 streams.
        fn: [(2+S)*S, S*D] fp32; base: [(2+S)*S] fp32; scale: [3] fp32.
        iters: Sinkhorn iterations (20); eps 1e-6, also in every normalisation; norm_eps 1e-20.
    Returns: pre [T, S], post [T, S], comb [T, S (input stream j), S (output stream k)], fp32. T = 0 is fine.
        `pre` is for the collapse in front of the NEXT sub-layer.
    Numerics: fp32, the normalisations in float64; bitwise independent of other tokens.
    Raises: OperatorError on a dtype or shape mismatch.
    Source: architecture.md 4.4.
    """
    _, S, D = h_TSD.shape
    if h_TSD.dtype is not torch.bfloat16 or fn.shape != ((2 + S) * S, S * D) or fn.dtype is not torch.float32:
        raise OperatorError(
            f"mix_coefficients: expected bf16 h [T, S, D] and fp32 fn [{(2 + S) * S}, {S * D}], got {h_TSD.dtype} "
            f"{list(h_TSD.shape)} and {fn.dtype} {list(fn.shape)}; check hc_mult"
        )
    out: tuple[Tensor, Tensor, Tensor] = dispatch.choose("mix_coefficients", impl, h_TSD.device)(
        h_TSD, fn, base, scale, iters, eps, norm_eps
    )
    return out


def collapse(h_TSD: Tensor, pre_TS: Tensor, *, impl: str | None = None) -> Tensor:
    """Sub-layer input u = bf16(sum_j pre_j h_j).

    h_TSD: [T, S, D] bf16. pre_TS: [T, S] fp32, of the previous sub-layer. Returns bf16 [T, D].
    Numerics: fp32 sums, one rounding; bitwise independent of other tokens. Raises OperatorError on a mismatch.
    """
    if h_TSD.dtype is not torch.bfloat16 or pre_TS.shape != h_TSD.shape[:2]:
        raise OperatorError(
            f"collapse: expected bf16 h [T, S, D] and pre [T, S], got {h_TSD.dtype} {list(h_TSD.shape)} and "
            f"{list(pre_TS.shape)}; pass the previous sub-layer's pre for the same tokens"
        )
    out: Tensor = dispatch.choose("collapse", impl, h_TSD.device)(h_TSD, pre_TS)
    return out


def expand(y_TD: Tensor, h_TSD: Tensor, post_TS: Tensor, comb_TSS: Tensor, *, impl: str | None = None) -> Tensor:
    """New streams h_k = bf16(post_k y + sum_j comb_jk h_j); the sum runs over the FIRST stream index of comb.

    y_TD: [T, D] bf16 sub-layer output. h_TSD: [T, S, D] bf16 streams before it. post_TS, comb_TSS: its coefficients.
    Returns bf16 [T, S, D], a new tensor.
    Numerics: fp32 sums, one rounding; bitwise independent of other tokens. Raises OperatorError on a mismatch.
    """
    if y_TD.dtype is not torch.bfloat16 or h_TSD.dtype is not torch.bfloat16 or y_TD.shape[1] != h_TSD.shape[2]:
        raise OperatorError(
            f"expand: expected bf16 y [T, D] and h [T, S, D], got {y_TD.dtype} {list(y_TD.shape)} and {h_TSD.dtype} "
            f"{list(h_TSD.shape)}; round the sub-layer output to bf16"
        )
    out: Tensor = dispatch.choose("expand", impl, h_TSD.device)(y_TD, h_TSD, post_TS, comb_TSS)
    return out


dispatch.register("mix_coefficients", "reference", reference.mix_coefficients)
dispatch.register("collapse", "reference", reference.collapse)
dispatch.register("expand", "reference", reference.expand)
