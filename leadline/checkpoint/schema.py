"""Which tensors a checkpoint holds, derived from its configuration (architecture.md section 2.3).

Quantised tensors come in pairs: FP8 as `<name>.weight` + `<name>.scale` with one E8M0 byte per block of 32 x 32; FP4 as
I8, two values a byte, with one E8M0 byte per row and 32 inputs; Engram tables as FP8 with one per row and 32 columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from leadline.config.layers import LayerMode, plan_layers
from leadline.config.model import ModelConfig, VisionConfig

BLOCK = 32  # values that share a scale, along each scaled axis

# Names of the safetensors format for the types that the layout uses.
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the file: `dtype` as safetensors writes it, `shape` as stored (FP4 has half the inputs)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Stored elements; an I8 element holds two FP4 values."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint of `config` under its published name, in model order; nothing else may be there."""
    plan = plan_layers(config)
    tensors = dict(_bf16("embed.weight", config.vocab_size, config.hidden_size))
    for spec in plan.layers:
        prefix = f"layers.{spec.layer}."
        if spec.has_engram:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(spec.layer)]
            tensors |= _engram(f"{prefix}engram.", config, rows)
        tensors |= _block(prefix, config, config.n_routed_experts)
        if spec.mode is LayerMode.FULL:
            tensors |= _compressor(f"{prefix}attn.compressor.", config, spec.ratio)
        if spec.mode in (LayerMode.FULL, LayerMode.REINDEX):
            tensors |= _indexer(f"{prefix}attn.indexer.", config, owns_keys=spec.mode is LayerMode.FULL)
    tensors |= _bf16("norm.weight", config.hidden_size)
    tensors |= _bf16("head.weight", config.vocab_size, config.hidden_size)
    tensors |= _draft(config)
    if config.vision is not None:
        tensors |= _vision(config, config.vision)
    return tensors


_Tensors = Iterator[tuple[str, TensorSpec]]


def _bf16(name: str, *shape: int) -> _Tensors:
    yield name, TensorSpec("BF16", shape)


def _f32(name: str, *shape: int) -> _Tensors:
    yield name, TensorSpec("F32", shape)


def _fp8(name: str, rows: int, columns: int) -> _Tensors:
    yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (-(-rows // BLOCK), -(-columns // BLOCK)))


def _fp4(name: str, rows: int, columns: int) -> _Tensors:
    yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2))
    yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, columns // BLOCK))


def _block(prefix: str, config: ModelConfig, num_experts: int) -> _Tensors:
    """What a layer and a draft stage have in common: attention, its norms, stream mixing, experts."""
    width, heads, head_width = config.hidden_size, config.num_attention_heads, config.head_dim
    mix = (2 + config.hc_mult) * config.hc_mult
    yield from _fp8(f"{prefix}attn.wq_a", config.q_lora_rank, width)
    yield from _bf16(f"{prefix}attn.q_norm.weight", config.q_lora_rank)
    yield from _fp8(f"{prefix}attn.wq_b", heads * head_width, config.q_lora_rank)
    yield from _fp8(f"{prefix}attn.wkv", head_width, width)
    yield from _bf16(f"{prefix}attn.kv_norm.weight", head_width)
    group_rows = config.o_groups * config.o_lora_rank
    yield from _fp8(f"{prefix}attn.wo_a", group_rows, heads * head_width // config.o_groups)
    yield from _fp8(f"{prefix}attn.wo_b", width, group_rows)
    yield from _f32(f"{prefix}attn.attn_sink", heads)
    for part in ("attn", "ffn"):
        yield from _bf16(f"{prefix}{part}_norm.weight", width)
        yield from _f32(f"{prefix}hc_{part}_fn", mix, config.hc_mult * width)
        yield from _f32(f"{prefix}hc_{part}_base", mix)
        yield from _f32(f"{prefix}hc_{part}_scale", 3)
    yield from _bf16(f"{prefix}ffn.gate.weight", num_experts, width)
    yield from _f32(f"{prefix}ffn.gate.bias", num_experts)
    if config.vision is not None:
        yield from _f32(f"{prefix}ffn.gate.bias_vl", num_experts)
    inner = config.moe_intermediate_size
    for name, rows, columns in (("w1", inner, width), ("w2", width, inner), ("w3", inner, width)):
        yield from _fp8(f"{prefix}ffn.shared_experts.{name}", rows, columns)
        for expert in range(num_experts):
            yield from _fp4(f"{prefix}ffn.experts.{expert}.{name}", rows, columns)


def _compressor(prefix: str, config: ModelConfig, ratio: int) -> _Tensors:
    yield from _bf16(f"{prefix}wkv.weight", config.head_dim, config.hidden_size)
    if ratio > 1:
        yield from _bf16(f"{prefix}wgate.weight", config.head_dim, config.hidden_size)
    yield from _bf16(f"{prefix}norm.weight", config.head_dim)


def _indexer(prefix: str, config: ModelConfig, owns_keys: bool) -> _Tensors:
    yield from _fp8(f"{prefix}wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
    yield from _bf16(f"{prefix}weights_proj.weight", config.index_n_heads, config.hidden_size)
    if owns_keys:
        yield from _bf16(f"{prefix}wk.weight", config.index_head_dim, config.head_dim)
        yield from _bf16(f"{prefix}k_norm.weight", config.index_head_dim)


def _engram(prefix: str, config: ModelConfig, rows: int) -> _Tensors:
    row_width = config.engram_head_dim
    yield f"{prefix}embed.weight", TensorSpec("F8_E4M3", (rows, row_width))
    yield f"{prefix}embed.scale", TensorSpec("F8_E8M0", (rows, row_width // BLOCK))
    outputs = (config.hc_mult + 1) * config.hidden_size
    yield from _fp8(f"{prefix}wkv", outputs, config.engram_columns * row_width)
    yield from _bf16(f"{prefix}q_weight", config.hc_mult, config.hidden_size)
    yield from _bf16(f"{prefix}k_weight", config.hc_mult, config.hidden_size)


def _draft(config: ModelConfig) -> _Tensors:
    stages, width, rank = config.num_nextn_predict_layers, config.hidden_size, config.dspark_markov_rank
    for stage in range(stages):
        prefix = f"mtp.{stage}."
        if stage == 0:
            yield from _fp8(f"{prefix}main_proj", width, len(config.dspark_target_layer_ids) * width)
            yield from _bf16(f"{prefix}main_norm.weight", width)
        yield from _block(prefix, config, config.dspark_n_routed_experts)
        if stage == stages - 1:
            yield from _bf16(f"{prefix}norm.weight", width)
            yield from _bf16(f"{prefix}markov_head.embed.weight", config.vocab_size, rank)
            yield from _bf16(f"{prefix}markov_head.head.weight", config.vocab_size, rank)
            yield from _bf16(f"{prefix}confidence_head.proj.weight", 1, width + rank)


def _vision(config: ModelConfig, vision: VisionConfig) -> _Tensors:
    width, inner = vision.hidden_size, vision.intermediate_size
    yield from _bf16("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield from _bf16("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        yield from _bf16(f"{prefix}norm1.weight", width)
        yield from _bf16(f"{prefix}attn.wqkv.weight", 3 * width, width)
        yield from _bf16(f"{prefix}attn.wqkv.bias", 3 * width)
        yield from _bf16(f"{prefix}attn.wo.weight", width, width)
        yield from _bf16(f"{prefix}attn.wo.bias", width)
        yield from _bf16(f"{prefix}norm2.weight", width)
        yield from _bf16(f"{prefix}mlp.w1.weight", 2 * inner, width)
        yield from _bf16(f"{prefix}mlp.w2.weight", width, inner)
    yield from _bf16("vision.norm.weight", width)
    for name, columns in (("w1", width * vision.downsample_ratio**2), ("w2", config.hidden_size)):
        yield from _bf16(f"aligner.{name}.weight", config.hidden_size, columns)
        yield from _bf16(f"aligner.{name}.bias", config.hidden_size)
    for name in ("image_start", "image_end", "image_newline"):
        yield from _bf16(name, config.hidden_size)


_DRAFT_COPY = re.compile(r"mtp\.\d+\.(embed|head)\.weight")


def released_name(name: str) -> str | None:
    """The released name of a tensor that may carry an older one; None for the drafter's copies of embedding and head.

    The identity on released names. Source: architecture.md section 2.5, in the published converter's order.
    """
    name = name.removeprefix("model.")
    if _DRAFT_COPY.fullmatch(name):
        return None
    name = name.replace("self_attn", "attn")
    if not name.startswith("vision."):
        name = name.replace("mlp", "ffn")
    return name.replace("weight_scale_inv", "scale").replace("e_score_correction_bias", "bias")
