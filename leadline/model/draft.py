"""DSpark, the draft head: a block of drafts from the upper layers' inputs (architecture.md 4.14)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.checkpoint.source import WeightSource
from leadline.config.model import ModelConfig
from leadline.formats.rows import DenseRows
from leadline.model.attention import AttentionWeights, window_pool_rows
from leadline.model.block import Block
from leadline.model.step import ActiveRows, StepBatch
from leadline.ops import rope
from leadline.ops.hyper import collapse
from leadline.ops.linear import linear, linear_f32
from leadline.ops.norm import rms_norm
from leadline.ops.quantize import act_quant
from leadline.ops.sparse_attention import sparse_attention

Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """Drafts of B sequences. The first draft follows the anchor.

    Attributes:
        token_ids: [B, block] int64. logits: [B, block, V] fp32 that each was chosen from.
        confidence: [B, block] fp32 logit; its sigmoid estimates P(accepted, given that all before it were).
    """

    token_ids: Tensor
    logits: Tensor
    confidence: Tensor


class Drafter:
    """The `mtp` stages. Embedding and head are the backbone's."""

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        f32 = torch.float32
        self.config = config
        stages = range(config.num_nextn_predict_layers)
        last = f"mtp.{stages[-1]}."
        self.main_proj = weights.linear("mtp.0.main_proj")
        self.main_norm = weights.tensor("mtp.0.main_norm.weight", dtype=f32)
        self.attention = [AttentionWeights(config, weights, f"mtp.{s}.attn.") for s in stages]
        num_experts, top_k = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        self.blocks = [Block(config, weights, f"mtp.{s}.", num_experts, top_k, use_bias_vl=False) for s in stages]
        self.norm = weights.tensor(last + "norm.weight", dtype=f32)
        self.markov_embed = weights.tensor(last + "markov_head.embed.weight")
        self.markov_head = weights.tensor(last + "markov_head.head.weight", dtype=f32)
        self.confidence = weights.tensor(last + "confidence_head.proj.weight", dtype=f32)

    def observe(self, main_hidden: list[Tensor], active: ActiveRows, step: StepBatch, cache: KVCache) -> None:
        """Store the context rows of the step in every stage's window.

        main_hidden: per target layer the mean over streams of its input, bf16 [rows, D], of the rows `active`.
        """
        x = act_quant(torch.cat(main_hidden, dim=1))
        main_x = act_quant(rms_norm(linear(x, self.main_proj), self.main_norm, self.config.rms_norm_eps))
        rows = window_pool_rows(step, active)
        turn_TR = active.turns["window"]
        for s, attention in enumerate(self.attention):
            kv = attention.window_kv(linear(main_x, attention.wkv), turn_TR)
            cache.windows[self.config.num_hidden_layers + s].write(rows, kv)

    def __call__(
        self,
        cache: KVCache,
        sequences: list[Sequence],
        anchor_ids: Tensor,
        choose: Choose,
        embed_VD: Tensor,
        head_VD: Tensor,
        freqs: Tensor,
    ) -> DraftOutput:
        """Draft a block after each anchor. See `Model.draft`."""
        c = self.config
        B, n, W = len(sequences), c.dspark_block_size, c.sliding_window
        device = embed_VD.device
        anchor_ids = anchor_ids.to(device)
        ids = torch.full((B, n), c.dspark_noise_token_id, dtype=torch.int64, device=device)
        ids[:, 0] = anchor_ids
        lengths = [seq.length for seq in sequences]
        position_Bn = torch.tensor(lengths, device=device)[:, None] + torch.arange(n, device=device)
        turn_TR = rope.turns(position_Bn.flatten(), freqs)

        # Every query sees the last W context rows, which do not slide with it, and the whole block.
        pool_rows, idx, first = [], [], 0
        for seq in sequences:
            base = max(0, seq.length - W)
            count = seq.length - base
            pool_rows.append(seq.window_rows(base, seq.length))
            line = torch.arange(first, first + W, device=device)
            idx.append(line.masked_fill_(line >= first + count, -1))
            first += count
        context = torch.cat(pool_rows)
        block = first + torch.arange(B * n, device=device).view(B, n)
        idx_TN = torch.cat((torch.stack(idx), block), dim=1).repeat_interleave(n, dim=0)

        h = embed_VD[ids.flatten()][:, None].expand(-1, c.hc_mult, -1)
        pre = torch.zeros(B * n, c.hc_mult, device=device)
        pre[:, 0] = 1.0
        for s, (attention, stage) in enumerate(zip(self.attention, self.blocks, strict=True)):
            pool = cache.windows[c.num_hidden_layers + s]

            def attend(x_TD: Tensor, w: AttentionWeights = attention, pool=pool) -> Tensor:  # type: ignore[no-untyped-def]
                qa, kv = w.low_rank(act_quant(x_TD))
                own = pool.layout.unpack(*pool.layout.pack(w.window_kv(kv, turn_TR)))
                rows = DenseRows(torch.cat((pool.rows.gather(context), own)))
                q, _ = w.queries(act_quant(rms_norm(qa, w.q_norm, w.eps)), turn_TR)
                o = sparse_attention(q, rows, idx_TN, None, None, w.attn_sink, c.head_dim**-0.5)
                return w.output(o, turn_TR)

            h, pre = stage(h, pre, attend, None, None)
        x_TD = collapse(h, pre)
        logits = linear_f32(rms_norm(x_TD, self.norm, c.rms_norm_eps), head_VD).view(B, n, -1)
        x_BnD = x_TD.view(B, n, -1)
        drafts, corrected, confidence = [], [], []
        prev = anchor_ids
        for i in range(n):
            markov = self.markov_embed[prev]
            seen = torch.cat((x_BnD[:, i], markov), dim=1)
            confidence.append(linear_f32(seen, self.confidence)[:, 0])
            corrected.append(logits[:, i] + linear_f32(markov, self.markov_head))
            prev = choose(i, corrected[-1])
            drafts.append(prev)
        return DraftOutput(
            token_ids=torch.stack(drafts, 1), logits=torch.stack(corrected, 1), confidence=torch.stack(confidence, 1)
        )
