"""The whole model: packed steps in, logits out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leadline.cache.pool import KVCache
from leadline.cache.sequence import Sequence
from leadline.checkpoint.source import Progress, WeightsChoice, WeightSource
from leadline.config.layers import LayerSpec, plan_layers
from leadline.config.model import ModelConfig, read_config
from leadline.errors import CheckpointError, RequestError
from leadline.model.attention import Attention
from leadline.model.block import Block
from leadline.model.draft import Choose, Drafter, DraftOutput
from leadline.model.engram import Engram, hash_windows
from leadline.model.shared import SharedAttention
from leadline.model.step import Run, StepBatch
from leadline.model.vision import VisionTower, span_rows
from leadline.ops import rope
from leadline.ops.engram import build_hash_tables
from leadline.ops.hyper import collapse
from leadline.ops.linear import linear_f32
from leadline.ops.norm import rms_norm
from leadline.text.token_map import token_map
from leadline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from leadline.text.images import PreparedImage

LayerTrace = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Logits of all runs, fp32 [N, V]. logits[i]: the rows [n_i, V] of run i, for the positions from
    max(logits_from, start) to the run's end; they follow each other in `rows`."""

    rows: Tensor
    logits: list[Tensor]


class Layer:
    """A layer of the plan: its block, its attention and, where it has one, its Engram."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: WeightSource, engram: Engram | None) -> None:
        self.spec = spec
        self.engram = engram
        self.attention = Attention(config, spec, weights)
        prefix = f"layers.{spec.layer}."
        self.block = Block(
            config, weights, prefix, config.n_routed_experts, config.num_experts_per_tok, use_bias_vl=True
        )


class Model:
    """DeepSeek V4.1 on one device.

    Nothing but `KVCache` is carried from step to step; the model itself never changes after loading.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource, token_map_V: Tensor | None) -> None:
        """Take every tensor out of `weights`.

        token_map_V: int64 [V], compressed ids; needed exactly when the configuration has Engram layers.
        """
        self.config = config
        self.plan = plan_layers(config)
        if bool(config.engram_layer_ids) and token_map_V is None:
            raise CheckpointError(
                "tokenizer.json: n-gram hashing (engram_layer_ids) needs the tokenizer beside the weights; add the file"
            )
        self.embed = weights.tensor("embed.weight")
        self.device = self.embed.device
        self.token_map = None if token_map_V is None else token_map_V.to(self.device)
        tables = build_hash_tables(config)
        self.layers = []
        for spec in self.plan.layers:
            engram = Engram(config, weights, spec.layer, tables[spec.layer]) if spec.has_engram else None
            self.layers.append(Layer(config, spec, weights, engram))
        self.norm = weights.tensor("norm.weight", dtype=torch.float32)
        self.head = weights.tensor("head.weight", dtype=torch.float32)
        self.drafter = Drafter(config, weights) if config.num_nextn_predict_layers else None
        self.vision: VisionTower | None = None
        if config.vision is not None:
            self.vision = VisionTower(config, weights)
            self.image_marks = [weights.tensor(name) for name in ("image_start", "image_newline", "image_end")]
        weights.finish()
        window = rope.frequencies(config.qk_rope_head_dim, config.rope_theta, None)
        compressed = rope.frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
        self.freqs = {"window": window.to(self.device), "compressed": compressed.to(self.device)}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        weights: WeightsChoice = "auto",
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
    ) -> Model:
        """Read a checkpoint folder in the published layout.

        Raises: ConfigError, CheckpointError: see `read_config`, `WeightSource`, `token_map`.
        """
        folder = Path(folder)
        config = read_config(folder)
        mapping = token_map(Tokenizer.load(folder, config), config) if config.engram_layer_ids else None
        with torch.inference_mode():
            return cls(config, WeightSource(folder, config, device, weights, progress), mapping)

    @property
    def has_draft(self) -> bool:
        return self.drafter is not None

    def new_cache(
        self,
        *,
        max_tokens: int,
        max_sequences: int = 1,
        max_step_tokens: int = 2048,
        max_snapshots: int = 0,
        poison: bool = False,
    ) -> KVCache:
        """Cache for this model; see `KVCache`."""
        return KVCache(
            self.config,
            self.plan,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_snapshots=max_snapshots,
            device=self.device,
            poison=poison,
        )

    @torch.inference_mode()
    def encode_images(self, images: list[PreparedImage]) -> Tensor:
        """Embedding rows of all span positions of the images, one after the other, bf16 [positions, D].

        Raises:
            RequestError: the model has no vision tower.
        """
        if self.vision is None:
            raise RequestError("images: this model has no vision tower; send text only")
        parts = []
        for image in images:
            plan = image.plan
            aligned = self.vision.encode(image.patches.to(self.device), plan.patch_rows, plan.patch_columns)
            parts.append(span_rows(aligned, plan.token_types(), *self.image_marks))
        return torch.cat(parts)

    @torch.inference_mode()
    def step(self, runs: list[Run], cache: KVCache, trace: LayerTrace | None = None) -> StepOutput:
        """Run a packed step; every sequence then includes its run.

        Args:
            runs: of distinct sequences of `cache`, each with room or pages left for its run.
            trace: called with names like "layer3.stream" and inner values of the active rows; for tests and `verify`.

        Raises:
            PromptError, RequestError: see `StepBatch`. CapacityError: no pages. The sequences are unchanged then.
        """
        c = self.config
        if not runs:
            return StepOutput(rows=self.head.new_empty(0, c.vocab_size), logits=[])
        if len({run.sequence.slot for run in runs}) != len(runs):
            raise RequestError("step: two runs of one sequence; join them or run them one after the other")
        step = StepBatch(runs, c, self.plan, cache, self.freqs)
        windows_TN, pad = None, 0
        if self.token_map is not None and c.engram_layer_ids:
            windows_TN = hash_windows(step, cache, self.token_map, c.engram_max_ngram_size)
            pad = int(self.token_map[c.engram_pad_token_id])
        h, image_T = self._embed(step), step.image_T
        active = step.all_rows
        pre = torch.zeros(active.num_rows, c.hc_mult, device=self.device)
        pre[:, 0] = 1.0
        shared: SharedAttention | None = None
        main_hidden: list[Tensor] = []
        for layer in self.layers:
            k = layer.spec.layer
            keep = step.rows[k].narrow(active)
            if keep is not None:  # only where nothing has compressed rows: the very first layer may be trimmed already
                h, pre = h[keep], pre[keep]
                image_T = None if image_T is None else image_T[keep]
                windows_TN = None if windows_TN is None else windows_TN[keep]
            active = step.rows[k]
            if layer.engram is not None:
                assert windows_TN is not None
                h = layer.engram(h, windows_TN, pad, image_T)
                if trace is not None:
                    trace(f"layer{k}.after_engram", h)
            keep = step.rows[k + 1].narrow(active)
            if layer.spec.is_draft_target:
                main_hidden.append(h.mean(dim=1, dtype=torch.float32).bfloat16())
                if k == max(c.dspark_target_layer_ids) and self.drafter is not None:
                    self.drafter.observe(main_hidden, active, step, cache)
                    if trace is not None:
                        trace("main_hidden", torch.cat(main_hidden, dim=1))
            if keep is not None:
                main_hidden = [m[keep] for m in main_hidden]
                image_T = None if image_T is None else image_T[keep]
                windows_TN = None if windows_TN is None else windows_TN[keep]

            def attend(x_TD: Tensor, attention: Attention = layer.attention) -> Tensor:
                nonlocal shared
                y, shared = attention(x_TD, step, cache, shared)
                return y

            inner = None if trace is None else _named(trace, k)
            h, pre = layer.block(h, pre, attend, keep, image_T, inner)
            active = step.rows[k + 1]
            if trace is not None:
                trace(f"layer{k}.stream", h)
                trace(f"layer{k}.pre_mix", pre)
                if layer.attention.indexer is not None and shared is not None:
                    trace(f"layer{k}.selected", shared.selection_TK)
        u = rms_norm(collapse(h, pre), self.norm, c.rms_norm_eps)
        logits = linear_f32(u, self.head)
        step.finish()
        o = active.offsets
        return StepOutput(rows=logits, logits=[logits[o[i] : o[i + 1]] for i in range(len(runs))])

    def _embed(self, step: StepBatch) -> Tensor:
        x = self.embed[step.token_ids_T]
        if step.image_T is not None:
            x[step.image_T] = torch.cat([run.image_rows for run in step.runs if run.image_rows is not None])
        return x[:, None].expand(-1, self.config.hc_mult, -1)

    @torch.inference_mode()
    def draft(self, cache: KVCache, sequences: list[Sequence], anchor_ids: Tensor, choose: Choose) -> DraftOutput:
        """Draft a block of tokens after each anchor.

        Args:
            sequences: B sequences; every position below their lengths has been processed.
            anchor_ids: int64 [B], the sampled, not yet processed token at position `length` of each.
            choose: called with (i, fp32 logits [B, V]) for draft i = 0, 1, ..; returns int64 [B].

        Raises:
            RequestError: the model has no drafter, or no sequences are given.
        """
        if self.drafter is None:
            raise RequestError("draft: this model has no draft stages (num_nextn_predict_layers is 0)")
        if not sequences or any(seq.length == 0 for seq in sequences):
            raise RequestError("draft: expected at least one sequence, each with at least one processed token")
        return self.drafter(cache, sequences, anchor_ids, choose, self.embed, self.head, self.freqs["window"])


def _named(trace: LayerTrace, layer: int) -> LayerTrace:
    return lambda name, value: trace(f"layer{layer}.{name}", value)
