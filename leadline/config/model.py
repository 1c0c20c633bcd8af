"""Facts of a checkpoint, as its configuration file states them (architecture.md section 1).

Two spellings are published: the nested `config.json` and the flat `inference/config.json`. Field names are those of the
nested file. The tables of `keys.py` hold both names of every key and what it may hold; reading and writing go through
them, so that a file read and written again is the same file. A key that is unknown, missing, of the wrong type or at
odds with another one is an error: the defaults of the published code describe a toy model and must never be fallen back
to. Values never change after reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from leadline.config.keys import (
    QUANTIZATION,
    ROPE,
    TEXT,
    TOP,
    VISION,
    Key,
    an_object,
    refuse_unknown,
    show,
    take,
    write,
    written,
)
from leadline.config.layers import plan_layers
from leadline.errors import ConfigError

Spelling = Literal["nested", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """`rope_scaling`: YaRN for the layers with compressed rows."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`vision_config`: the image tower and the limits of the resize plan (pixels, tokens)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One DeepSeek V4.1 model. Absent features hold 0, -1 or an empty tuple, as the file does."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: YarnConfig
    compress_rope_theta: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_markov_rank: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None
    transformers_version: str | None = None  # who wrote the nested file; of no effect

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Reads either spelling, told apart by the keys `text_config` and `architectures`.

        The flat file lacks the token ids, `max_position_embeddings` and `norm_topk_prob`: they take the published
        values (0, 1, 2; 1048576; true). Numbers keep the type they have in the file (10000 stays an int).

        Raises: ConfigError naming key, expected and given value; also for a layer plan that cannot work.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"configuration: expected a JSON object, got {show(data)}")
        is_nested = "text_config" in data or "architectures" in data
        config = cls(**(_read_nested(data) if is_nested else _read_flat(data)))
        _check(config)
        plan_layers(config)
        return config

    def to_dict(self, spelling: Spelling = "nested") -> dict[str, Any]:
        """The file that `from_dict` reads, keys in published order; absent vision means absent keys.

        Raises: ConfigError when `spelling` is "flat" and a value that the flat file cannot carry is not the published
        one. `max_position_embeddings` is exempt: there it is a size chosen at run time.
        """
        if spelling == "flat":
            return _write_flat(self)
        rope = write(ROPE, self.rope_scaling)
        text = {key.name: rope if key.name == "rope_scaling" else written(key, self) for key in TEXT}
        top = {key.name: value for key in TOP if (value := written(key, self)) is not None}
        nested = {**top, "quantization_config": write(QUANTIZATION, self), "text_config": text}
        if self.vision is not None:
            nested["vision_config"] = write(VISION, self.vision)
        return nested

    @property
    def engram_columns(self) -> int:
        """Rows looked up per token and Engram layer (A): orders 2 to the longest, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.engram_layer_ids else 0


def read_config(path: str | Path) -> ModelConfig:
    """Reads `path`, a JSON file of either spelling or a folder that holds `config.json`.

    Raises: ConfigError, its message led by the path: no such file, not JSON, a key given twice, NaN or infinity, and
    all that `ModelConfig.from_dict` refuses.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        data = json.loads(file.read_bytes(), object_pairs_hook=_object_without_repeats, parse_constant=_refuse_constant)
        return ModelConfig.from_dict(data)
    except OSError as error:
        advice = "give a checkpoint folder or its config.json"
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected a JSON object, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{repeated}: given twice in one object; keep one")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ConfigError(f"configuration: expected finite numbers, got {text}")


def _read_nested(data: Mapping[str, Any]) -> dict[str, Any]:
    def section(keys: tuple[Key, ...], parent: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
        (content,) = take([Key(name, None, an_object)], parent, where).values()
        refuse_unknown(content, (key.name for key in keys), f"{where}{name}.")
        return take(keys, content, f"{where}{name}.")

    sections = ("quantization_config", "text_config", "vision_config")
    refuse_unknown(data, (*(key.name for key in TOP), *sections))
    fields = take(TOP, data)
    section(QUANTIZATION, data, "quantization_config")
    fields |= section(TEXT, data, "text_config")
    fields["rope_scaling"] = YarnConfig(**section(ROPE, data["text_config"], "rope_scaling", "text_config."))
    has_vision = data.get("vision_config") is not None
    fields["vision"] = VisionConfig(**section(VISION, data, "vision_config")) if has_vision else None
    return fields


def _read_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unknown(data, (key.flat for key in (*TOP, *QUANTIZATION, *TEXT, *ROPE, *VISION)))
    fields = take(TOP, data, flat=True) | take(TEXT, data, flat=True)
    take(QUANTIZATION, data, flat=True)
    fields["rope_scaling"] = YarnConfig(**take(ROPE, data, flat=True))
    has_vision = any(key.flat in data for key in VISION)
    fields["vision"] = VisionConfig(**take(VISION, data, flat=True)) if has_vision else None
    return fields


def _write_flat(config: ModelConfig) -> dict[str, Any]:
    runtime = ("rope_scaling", "max_position_embeddings", "transformers_version")
    for key in (*TOP, *TEXT):
        value = written(key, config)
        if key.flat is None and key.name not in runtime and value != key.published:
            raise ConfigError(f"{key.name}: the flat file cannot carry {show(value)}; write the nested one")
    flat = write(TEXT, config, flat=True) | write(ROPE, config.rope_scaling, flat=True)
    flat |= write(TOP, config, flat=True) | write(QUANTIZATION, config, flat=True)
    return flat if config.vision is None else flat | write(VISION, config.vision, flat=True)


def _check(c: ModelConfig) -> None:
    """Keys that contradict each other. Values of features that are off are not looked at."""

    def need(name: str, holds: bool, expected: str) -> None:
        if not holds:
            section, _, field = name.rpartition(".")
            owner = {"": c, "rope_scaling": c.rope_scaling, "vision_config": c.vision}[section]
            raise ConfigError(f"{name}: expected {expected}, got {show(getattr(owner, field))}")

    def at_least(low: int, why: str, *names: str) -> None:
        for name in names:
            need(name, getattr(c, name) >= low, f"at least {low}, as {why}")

    def at_most(name: str, limit: str) -> None:
        need(name, getattr(c, name) <= getattr(c, limit), f"at most {limit} {getattr(c, limit)}")

    def token(*names: str) -> None:
        for name in names:
            need(name, getattr(c, name) < c.vocab_size, f"an id below vocab_size {c.vocab_size}")

    token("bos_token_id", "eos_token_id", "pad_token_id")
    at_most("qk_rope_head_dim", "head_dim")
    heads = c.num_attention_heads
    need("o_groups", heads % c.o_groups == 0, f"a divisor of num_attention_heads {heads}")
    at_most("num_experts_per_tok", "n_routed_experts")
    need("rope_theta", c.rope_theta > 1, "a number above 1")
    need("compress_rope_theta", c.compress_rope_theta > 1, "a number above 1")
    slow = c.rope_scaling.beta_slow
    need("rope_scaling.beta_fast", c.rope_scaling.beta_fast > slow, f"more than beta_slow {slow}")
    entries = c.num_hidden_layers + c.num_nextn_predict_layers
    need("compress_ratios", len(c.compress_ratios) == entries, f"{entries} entries, one a layer and one a draft stage")
    if c.index_source_layer_ids:
        at_least(1, "index_source_layer_ids names layers", "index_n_heads", "index_head_dim", "index_topk")
        at_most("qk_rope_head_dim", "index_head_dim")
    if c.candidate_source_layer_id >= 0:
        why = f"candidate_source_layer_id is {c.candidate_source_layer_id}"
        at_least(1, why, "candidate_topk_blocks", "candidate_block_size")
    tables = len(c.engram_layer_ids)
    need("engram_num_embeddings", len(c.engram_num_embeddings) == tables, f"{tables} entries, one per engram_layer_ids")
    if tables:
        need("engram_num_embeddings", min(c.engram_num_embeddings) >= 1, "at least 1 row in each table")
        at_least(2, "engram_layer_ids names layers", "engram_max_ngram_size", "engram_vocab_size")
        at_least(1, "engram_layer_ids names layers", "engram_n_heads", "engram_head_dim")
        at_most("engram_compressed_vocab_size", "vocab_size")
        compressed = c.engram_compressed_vocab_size
        need("engram_pad_token_id", c.engram_pad_token_id < compressed, f"an id below {compressed} (compressed ids)")
    if c.num_nextn_predict_layers:
        why = f"num_nextn_predict_layers is {c.num_nextn_predict_layers}"
        need("dspark_target_layer_ids", c.dspark_target_layer_ids != (), f"at least one layer, as {why}")
        at_least(1, why, "dspark_block_size", "dspark_markov_rank", "dspark_num_experts_per_tok")
        at_most("dspark_num_experts_per_tok", "dspark_n_routed_experts")
        token("dspark_noise_token_id")
    else:
        need("dspark_target_layer_ids", c.dspark_target_layer_ids == (), "[], as num_nextn_predict_layers is 0")
    if c.vision is not None:
        token("image_token_id")
        # Rows and columns each rotate pairs of channels, so a head is a multiple of 4 wide.
        quarter = c.vision.hidden_size // 4
        fits = quarter % c.vision.num_attention_heads == 0
        need("vision_config.num_attention_heads", fits, f"a divisor of hidden_size / 4 = {quarter}")
