"""Attention of one layer: window rows of its own, compressed rows and a selection that it makes or is handed.

A layer reads what it is given as `SharedAttention` and hands on a new one where it publishes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.checkpoint.source import WeightSource
from leadline.config.layers import LayerMode, LayerSpec
from leadline.config.model import ModelConfig
from leadline.formats.rows import DenseRows, Rows
from leadline.model.compressor import Compressor
from leadline.model.indexer import Indexer
from leadline.model.shared import SharedAttention
from leadline.model.step import ActiveRows, StepBatch
from leadline.ops.linear import Weight, grouped_linear, linear
from leadline.ops.norm import rms_norm
from leadline.ops.quantize import act_quant
from leadline.ops.rope import apply_rope
from leadline.ops.sparse_attention import sparse_attention


class AttentionWeights:
    """The projections that every attention has, of a layer or of a draft stage."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, has_indexer: bool = False) -> None:
        f32 = torch.float32
        self.config = config
        self.eps = config.rms_norm_eps
        self.wq_a = weights.linear(prefix + "wq_a")
        self.wkv = weights.linear(prefix + "wkv")
        self.wq_b = weights.linear(prefix + "wq_b")
        if has_indexer:  # the index queries read the same latent
            self.wq_b = Weight.stack((self.wq_b, weights.linear(prefix + "indexer.wq_b")))
        self.wo_a = weights.linear(prefix + "wo_a")
        self.wo_b = weights.linear(prefix + "wo_b")
        self.q_norm = weights.tensor(prefix + "q_norm.weight", dtype=f32)
        self.kv_norm = weights.tensor(prefix + "kv_norm.weight", dtype=f32)
        self.attn_sink = weights.tensor(prefix + "attn_sink")
        self.wqkv_a: Weight | None = None
        if self.wq_a.dense is not None:  # one product instead of two over the same input
            self.wqkv_a = Weight.stack((self.wq_a, self.wkv))

    def low_rank(self, xq_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Quantised input to (wq_a x, wkv x), bf16 [T, L] and [T, C]."""
        if self.wqkv_a is None:
            return linear(xq_TD, self.wq_a), linear(xq_TD, self.wkv)
        both = linear(xq_TD, self.wqkv_a)
        L = self.config.q_lora_rank
        return both[:, :L], both[:, L:]

    def window_kv(self, kv_TC: Tensor, turn_TR: Tensor) -> Tensor:
        """wkv's output, normed and rotated, bf16 [T, C]; quantised when stored."""
        return apply_rope(rms_norm(kv_TC, self.kv_norm, self.eps), turn_TR)

    def queries(self, qr_TL: Tensor, turn_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Quantised query latent to rotated queries, bf16 [T, H, C], and the indexer's, [T, J * X], not yet rotated."""
        heads, width = self.config.num_attention_heads, self.config.head_dim
        q, index_q = linear(qr_TL, self.wq_b).tensor_split((heads * width,), dim=1)
        return apply_rope(q.view(q.shape[0], heads, width), turn_TR), index_q

    def output(self, o_THC: Tensor, turn_TR: Tensor) -> Tensor:
        """Attention output, turned back, through the output groups to bf16 [T, D] (architecture.md 4.10)."""
        groups = self.config.o_groups
        o_THC = apply_rope(o_THC, turn_TR.conj_physical())
        width = self.config.num_attention_heads * self.config.head_dim // groups  # not -1: T may be 0
        z = grouped_linear(o_THC.reshape(o_THC.shape[0], groups, width), self.wo_a)
        return linear(act_quant(z), self.wo_b)


class Attention:
    """Attention of one layer in any mode of the plan."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: WeightSource) -> None:
        prefix = f"layers.{spec.layer}.attn."
        self.config = config
        self.spec = spec
        self.theta = "window" if spec.ratio == 0 else "compressed"
        self.scale = config.head_dim**-0.5
        is_full = spec.mode is LayerMode.FULL
        self.compressor = Compressor(config, spec, weights, prefix) if is_full else None
        has_indexer = spec.mode in (LayerMode.FULL, LayerMode.REINDEX)
        self.indexer = Indexer(config, spec, weights, prefix) if has_indexer else None
        self.weights = AttentionWeights(config, weights, prefix, has_indexer)

    def __call__(
        self, x_TD: Tensor, step: StepBatch, cache: KVCache, shared: SharedAttention | None
    ) -> tuple[Tensor, SharedAttention | None]:
        """Attend.

        Args:
            x_TD: bf16, normed input of the rows `step.rows[layer]`.
            shared: what the source below publishes; None if this layer needs nothing or publishes itself.

        Returns: output bf16 of the rows `step.rows[layer + 1]`, and what the layers above read.
        """
        layer = self.spec.layer
        stored, queried = step.rows[layer], step.rows[layer + 1]
        w = self.weights
        xq = act_quant(x_TD)
        keep = queried.narrow(stored)
        turn_TR = stored.turns[self.theta]
        if keep is None:
            qa, kv = w.low_rank(xq)
        else:
            kv, qa = linear(xq, w.wkv), linear(xq[keep], w.wq_a)
        cache.windows[layer].write(window_pool_rows(step, stored), w.window_kv(kv, turn_TR))
        if self.compressor is not None:
            self.compressor(x_TD, step, cache)  # every row of the step: layers up to the last source are never trimmed

        if keep is not None:
            x_TD = x_TD[keep]
            turn_TR = queried.turns[self.theta]
        qr = act_quant(rms_norm(qa, w.q_norm, w.eps))
        q, index_q = w.queries(qr, turn_TR)
        if self.indexer is not None:
            shared = self.indexer(index_q, x_TD, queried, step, cache, shared)
        elif shared is not None:
            shared = shared.narrow(queried)
        pool_row_U, window_idx_TW = queried.windows(step.floors(layer))
        window: Rows = cache.windows[layer].rows
        if pool_row_U is not None:  # queries share rows: decode each once
            window = DenseRows(window.gather(pool_row_U))
        rows, idx_TK = (None, None) if shared is None else (shared.rows, shared.selected_idx_TK)
        o = sparse_attention(q, window, window_idx_TW, rows, idx_TK, w.attn_sink, self.scale)
        return w.output(o, turn_TR), shared


def window_pool_rows(step: StepBatch, active: ActiveRows) -> Tensor:
    """Window pool rows of the positions of `active`, int64 [rows]; the same for every layer."""
    rows = active.stored_rows
    if rows is None:
        parts = [
            run.sequence.window_rows(s, e)
            for run, s, e in zip(step.runs, active.starts, active.ends, strict=True)
            if s < e
        ]
        rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=step.device)
        active.stored_rows = rows
    return rows
