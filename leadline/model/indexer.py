"""The lightning indexer of a source layer: index queries, head weights, selection (architecture.md 4.7, 4.8)."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.checkpoint.source import WeightSource
from leadline.config.layers import LayerSpec
from leadline.config.model import ModelConfig
from leadline.formats.rows import DenseRows, Rows
from leadline.model.shared import DENSE_ROWS, SharedAttention
from leadline.model.step import ActiveRows, StepBatch
from leadline.ops.linear import linear
from leadline.ops.quantize import index_quant
from leadline.ops.rope import apply_rope
from leadline.ops.select import KeyRows, select_in_blocks, select_rows, select_rows_and_blocks


class Indexer:
    """Selects, per query, the rows that its layer and the layers reusing its selection attend to."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: WeightSource, prefix: str) -> None:
        assert spec.kv_source is not None
        self.config = config
        self.spec = spec
        self.kv_source = spec.kv_source
        self.weights_proj = weights.linear(prefix + "indexer.weights_proj")
        self.weight_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5

    def __call__(
        self,
        q_TN: Tensor,
        x_TD: Tensor,
        active: ActiveRows,
        step: StepBatch,
        cache: KVCache,
        shared: SharedAttention | None,
    ) -> SharedAttention:
        """Select for the rows `active`.

        Args:
            q_TN: index queries, not yet rotated, [T, J * X]. x_TD: normed layer input. Both bf16, of the rows `active`.
            shared: what the candidate source below publishes, if this layer selects inside its blocks.
        """
        cfg = self.config
        T = active.num_rows
        q_TJX = q_TN.view(T, cfg.index_n_heads, cfg.index_head_dim)
        q_TJX = index_quant(apply_rope(q_TJX, active.turns["compressed"]))
        # Rounded to bf16 like the published code; exact at the released sizes, where the factor is 1/64.
        weight_TJ = (linear(x_TD, self.weights_proj) * self.weight_scale).float()
        ratio = self.spec.ratio
        visible_T = active.visible_T(ratio)
        candidates_TB = None
        if self.spec.candidate_source is not None and shared is not None:
            candidates_TB = shared.narrow(active).candidates_TB
        lines: list[Tensor] = []
        blocks: list[Tensor] = []
        for i, run in enumerate(step.runs):
            part = slice(active.offsets[i], active.offsets[i + 1])
            keys = KeyRows(cache.keys[self.kv_source].rows, run.sequence.pool_rows(ratio))
            operands = (q_TJX[part], weight_TJ[part], keys, visible_T[part])
            if candidates_TB is not None:
                size = cfg.candidate_block_size
                lines.append(select_in_blocks(*operands, candidates_TB[part], size, cfg.index_topk))
            elif self.spec.is_candidate_source:
                line, block = select_rows_and_blocks(
                    *operands, cfg.index_topk, cfg.candidate_topk_blocks, cfg.candidate_block_size
                )
                lines.append(line)
                blocks.append(block)
            else:
                lines.append(select_rows(*operands, cfg.index_topk))
        selection_TK = torch.cat(lines)
        rows, selected_idx_TK = self._rows(selection_TK, active, step, cache)
        return SharedAttention(
            rows=rows,
            selected_idx_TK=selected_idx_TK,
            selection_TK=selection_TK,
            candidates_TB=torch.cat(blocks) if blocks else candidates_TB,
            active=active,
        )

    def _rows(self, selection_TK: Tensor, active: ActiveRows, step: StepBatch, cache: KVCache) -> tuple[Rows, Tensor]:
        # The layers that reuse the selection read the same rows: decode them once where that is little.
        pool = cache.compressed[self.kv_source].rows
        ratio = self.spec.ratio
        num_visible = [end // ratio for end in step.ends]
        total = sum(num_visible)
        none_TK = selection_TK < 0
        offset, first = [], 0
        if total == 0:  # nothing is visible yet; one row that nobody points at keeps the shapes of later steps
            empty = torch.zeros(1, self.config.head_dim, dtype=torch.bfloat16, device=step.device)
            return DenseRows(empty), selection_TK.long()
        if total <= min(DENSE_ROWS, selection_TK.numel()):
            tables = [run.sequence.pool_rows(ratio)[:n] for run, n in zip(step.runs, num_visible, strict=True)]
            for i, n in enumerate(num_visible):
                part = slice(active.offsets[i], active.offsets[i + 1])
                offset.append(selection_TK[part].long() + first)
                first += n
            return DenseRows(pool.gather(torch.cat(tables))), torch.cat(offset).masked_fill_(none_TK, -1)
        for i, run in enumerate(step.runs):
            part = slice(active.offsets[i], active.offsets[i + 1])
            offset.append(run.sequence.pool_rows(ratio)[selection_TK[part].long().clamp_min(0)])
        selected_idx_TK = torch.cat(offset).masked_fill_(none_TK, -1)
        if selected_idx_TK.numel() <= DENSE_ROWS:
            gathered = pool.gather(selected_idx_TK.clamp_min(0).flatten())
            own = torch.arange(selected_idx_TK.numel(), device=step.device).view_as(selected_idx_TK)
            return DenseRows(gathered), own.masked_fill_(none_TK, -1)
        return pool, selected_idx_TK
