"""Engram: n-gram tables read by token history, gated into the streams (architecture.md 4.11)."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.checkpoint.source import WeightSource
from leadline.config.model import ModelConfig
from leadline.model.step import StepBatch
from leadline.ops.engram import HashTable, engram_gate, hash_rows
from leadline.ops.linear import linear
from leadline.ops.quantize import act_quant

DEAD = -1  # compressed id of a position inside an image span: no n-gram crosses it


def hash_windows(step: StepBatch, cache: KVCache, token_map_V: Tensor, max_ngram: int) -> Tensor:
    """Compressed ids that each row's n-grams look at, int64 [T, max_ngram]: its own, the one before, ...

    -1 where the history is before the sequence's start or inside an image. The token ids of the step join the
    sequences' rings, from which the next step takes its history.
    """
    own_T = step.token_ids_T
    if step.image_T is not None:
        own_T = own_T.masked_fill(step.image_T, DEAD)
    offsets = step.all_rows.offsets
    ring = cache.recent_ids
    windows = []
    for i, (run, start) in enumerate(zip(step.runs, step.starts, strict=True)):
        back = torch.arange(start - max_ngram + 1, start, device=step.device)
        history = ring[run.sequence.slot, back % ring.shape[1]].masked_fill(back < 0, DEAD)
        line = torch.cat((history, own_T[offsets[i] : offsets[i + 1]]))
        windows.append(line.unfold(0, max_ngram, 1).flip(1))
    tail_idx, slot, place = step.ring_tail(ring.shape[1])
    ring[slot, place] = own_T[tail_idx]
    window_TN = torch.cat(windows)
    return torch.where(window_TN < 0, DEAD, token_map_V[window_TN.clamp_min(0)])


class Engram:
    """The n-gram module before one layer."""

    def __init__(self, config: ModelConfig, weights: WeightSource, layer: int, table: HashTable) -> None:
        prefix = f"layers.{layer}.engram."
        self.config = config
        self.embed = weights.table(prefix + "embed")
        self.wkv = weights.linear(prefix + "wkv")
        self.q_weight = weights.tensor(prefix + "q_weight", dtype=torch.float32)
        self.k_weight = weights.tensor(prefix + "k_weight", dtype=torch.float32)
        device = self.k_weight.device
        self.hash_table = HashTable(table.multipliers.to(device), table.primes.to(device), table.offsets.to(device))

    def __call__(self, h_TSD: Tensor, window_TN: Tensor, pad: int, image_T: Tensor | None) -> Tensor:
        """bf16 streams to bf16 streams. window_TN: `hash_windows` of the same rows; pad: compressed pad id."""
        c = self.config
        fetched = self.embed.fetch(hash_rows(window_TN, self.hash_table, pad))
        kv = linear(act_quant(fetched), self.wkv).view(-1, c.hc_mult + 1, c.hidden_size)
        key_TSD, value_TD = kv[:, :-1], kv[:, -1]
        return engram_gate(h_TSD, key_TSD, value_TD, self.q_weight, self.k_weight, c.rms_norm_eps, image_T)
