"""The owner's side of compressed KV: latents from tokens, stored as rows and as index keys (architecture.md 4.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.cache.pool import STATE_ROWS, KVCache
from leadline.checkpoint.source import WeightSource
from leadline.config.layers import LayerSpec
from leadline.config.model import ModelConfig
from leadline.model.step import StepBatch
from leadline.ops.compressor import pool_pairs
from leadline.ops.linear import linear, linear_f32
from leadline.ops.norm import rms_norm
from leadline.ops.rope import apply_rope


class Compressor:
    """Compressed rows and index keys of one source layer. The owner stores both in every step that completes a row."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: WeightSource, prefix: str) -> None:
        f32 = torch.float32
        self.layer = spec.layer
        self.ratio = spec.ratio
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.norm = weights.tensor(prefix + "compressor.norm.weight", dtype=f32)
        self.wk = weights.linear(prefix + "indexer.wk")
        self.k_norm = weights.tensor(prefix + "indexer.k_norm.weight", dtype=f32)
        if self.ratio == 1:
            self.wkv = weights.linear(prefix + "compressor.wkv")
        else:  # both projections run in fp32 on widened weights; stacked, because they share the input
            wkv = weights.tensor(prefix + "compressor.wkv.weight", dtype=f32)
            wgate = weights.tensor(prefix + "compressor.wgate.weight", dtype=f32)
            self.wkv_gate = torch.cat((wkv, wgate))

    def __call__(self, x_TD: Tensor, step: StepBatch, cache: KVCache) -> None:
        """Store the rows that the step completes. x_TD: bf16, normed input of all rows of the step."""
        new = step.new_rows(self.ratio)
        latent_NC = self._project(x_TD, step, cache)
        if latent_NC.shape[0] == 0:  # every other token of a decode
            return
        latent_NC = rms_norm(latent_NC, self.norm, self.eps)
        turn_NR = new.turns["compressed"]
        # The index key takes the latent before rotation.
        key_NX = apply_rope(rms_norm(linear(latent_NC, self.wk), self.k_norm, self.eps), turn_NR)
        cache.keys[self.layer].write(new.pool_row_N, key_NX)
        cache.compressed[self.layer].write(new.pool_row_N, apply_rope(latent_NC, turn_NR))

    def _project(self, x_TD: Tensor, step: StepBatch, cache: KVCache) -> Tensor:
        if self.ratio == 1:
            return linear(x_TD, self.wkv)
        cg_T2C = linear_f32(x_TD, self.wkv_gate).view(-1, 2, self.head_dim)
        ring = cache.open_groups[cache.pair_sources.index(self.layer)]
        second_N = step.new_rows(2).token_idx_N
        latent_NC = self._pool(cg_T2C, second_N, ring, step) if len(second_N) else cg_T2C[:0, 0]
        tail_idx, slot, place = step.state_tail
        ring[slot, place] = cg_T2C[tail_idx]
        return latent_NC.bfloat16()

    def _pool(self, cg_T2C: Tensor, second_N: Tensor, ring: Tensor, step: StepBatch) -> Tensor:
        # The first token of a group is the row before, or waits in the ring since an earlier step.
        first_N2C = cg_T2C[(second_N - 1).clamp_min(0)]
        waiting_N = step.is_first_T[second_N]
        if bool(waiting_N.any()):
            waits = second_N[waiting_N]
            position = step.all_rows.position_T[waits] - 1
            first_N2C[waiting_N] = ring[step.slot_T[waits], position % STATE_ROWS]
        second_N2C = cg_T2C[second_N]
        c_N2C = torch.stack((first_N2C[:, 0], second_N2C[:, 0]), dim=1)
        g_N2C = torch.stack((first_N2C[:, 1], second_N2C[:, 1]), dim=1)
        return pool_pairs(c_N2C, g_N2C)
