"""One block: two sub-layers on four residual streams, mixed in a single pass (architecture.md 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from leadline.checkpoint.source import WeightSource
from leadline.config.model import ModelConfig
from leadline.ops.experts import ExpertWeights, moe
from leadline.ops.hyper import collapse, expand, mix_coefficients
from leadline.ops.linear import Weight
from leadline.ops.norm import rms_norm
from leadline.ops.quantize import act_quant
from leadline.ops.router import route


class HyperConnection:
    """Coefficients of one sub-layer, computed from the streams before it."""

    def __init__(self, config: ModelConfig, weights: WeightSource, name: str) -> None:
        self.config = config
        self.fn = weights.tensor(name + "_fn")
        self.base = weights.tensor(name + "_base")
        self.scale = weights.tensor(name + "_scale")

    def __call__(self, h_TSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """bf16 streams to fp32 (pre [T, S], post [T, S], comb [T, S, S])."""
        c = self.config
        return mix_coefficients(h_TSD, self.fn, self.base, self.scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


class MoE:
    """Routed experts and the shared one (architecture.md 4.12). Draft stages have their own numbers of experts."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, prefix: str, num_experts: int, top_k: int, use_bias_vl: bool
    ) -> None:
        self.config = config
        self.top_k = top_k
        self.gate = weights.tensor(prefix + "gate.weight", dtype=torch.float32)
        self.bias = weights.tensor(prefix + "gate.bias")
        self.bias_vl = weights.tensor(prefix + "gate.bias_vl") if config.vision is not None else None
        if not use_bias_vl:  # stored with draft stages too, but never used there
            self.bias_vl = None

        # The shared expert is the last one: every token names it, with weight 1.
        self.shared = torch.full((1, 1), num_experts, device=self.gate.device), self.gate.new_ones(1, 1)
        names = [*(f"{prefix}experts.{e}." for e in range(num_experts)), prefix + "shared_experts."]

        def experts(matrix: str) -> Iterator[Weight]:
            return (weights.linear(name + matrix) for name in names)

        self.experts = ExpertWeights(experts("w1"), experts("w3"), experts("w2"))

    def route(self, x_TD: Tensor, image_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert ids int64 [T, K], best first, and their fp32 weights."""
        c = self.config
        if self.bias_vl is None:
            image_T = None
        return route(
            x_TD, self.gate, self.bias, self.bias_vl, image_T, self.top_k, c.norm_topk_prob, c.routed_scaling_factor
        )

    def __call__(self, x_TD: Tensor, image_T: Tensor | None, trace: Trace | None = None) -> Tensor:
        """bf16 [T, D] to bf16 [T, D]."""
        limit = self.config.swiglu_limit
        expert_TK, weight_TK = self.route(x_TD, image_T)
        if trace is not None:
            trace("experts", expert_TK)
            trace("expert_weights", weight_TK)
        expert_TK, weight_TK = (
            torch.cat((routed, shared.expand(routed.shape[0], 1)), dim=1)  # `pad` takes four times as long
            for routed, shared in zip((expert_TK, weight_TK), self.shared, strict=True)
        )
        return moe(act_quant(x_TD), expert_TK, weight_TK, self.experts, limit).bfloat16()


Trace = Callable[[str, Tensor], None]  # a test or `verify` looks at inner values by name


class Block:
    """Streams in, streams out. `attend` is given the normed input and returns the attention's output."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, prefix: str, num_experts: int, top_k: int, use_bias_vl: bool
    ) -> None:
        self.eps = config.rms_norm_eps
        self.attn_norm = weights.tensor(prefix + "attn_norm.weight", dtype=torch.float32)
        self.ffn_norm = weights.tensor(prefix + "ffn_norm.weight", dtype=torch.float32)
        self.hc_attn = HyperConnection(config, weights, prefix + "hc_attn")
        self.hc_ffn = HyperConnection(config, weights, prefix + "hc_ffn")
        self.ffn = MoE(config, weights, prefix + "ffn.", num_experts, top_k, use_bias_vl)

    def __call__(
        self,
        h_TSD: Tensor,
        pre_TS: Tensor,
        attend: Callable[[Tensor], Tensor],
        keep: Tensor | None,
        image_T: Tensor | None,
        trace: Trace | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both sub-layers.

        Args:
            h_TSD: bf16 streams. pre_TS: fp32 collapse weights that the sub-layer before handed on.
            keep: rows that go on after attention stored its window, int64; None = all. `attend` returns these rows.
            image_T: bool, rows inside image spans, of the kept rows; None = no images.

        Returns: streams and collapse weights of the kept rows.
        """
        y_TD = attend(rms_norm(collapse(h_TSD, pre_TS), self.attn_norm, self.eps))
        if keep is not None:
            h_TSD = h_TSD[keep]
        pre_TS, post_TS, comb_TSS = self.hc_attn(h_TSD)
        h_TSD = expand(y_TD, h_TSD, post_TS, comb_TSS)
        x_TD = rms_norm(collapse(h_TSD, pre_TS), self.ffn_norm, self.eps)
        pre_TS, post_TS, comb_TSS = self.hc_ffn(h_TSD)
        return expand(self.ffn(x_TD, image_T, trace), h_TSD, post_TS, comb_TSS), pre_TS
