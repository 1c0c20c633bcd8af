"""Facts of a checkpoint, as its configuration file states them (architecture.md section 1).

Two spellings are published: the nested `config.json` and the flat `inference/config.json`. Fields are named as in the
nested file and annotated with their name in the flat one and what they may hold (`keys.py`). Reading and writing go
through that, so that a file read and written again is the same file. A key that is unknown, missing, of the wrong type
or at odds with another one is an error: the defaults of the published code describe a toy model and must never be
fallen back to. Values never change after reading.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from leadline.config.checks import parse_json
from leadline.config.engram import engram_moduli
from leadline.config.keys import (
    BOOL,
    INTEGERS,
    OBJECT,
    POSITIVE,
    POSITIVE_OR_NULL,
    STRING,
    TOKEN,
    WIDTH,
    Key,
    Keys,
    fixed,
    integer,
    keys_of,
    refuse_unknown,
    show,
    take,
    write,
)
from leadline.config.layers import plan_layers
from leadline.errors import ConfigError

Spelling = Literal["nested", "flat"]
_MOST_EXPERTS = 1 << 17  # of all layers together; the released model has 15,360


class Quantization:
    """`quantization_config`."""

    quant_method: ClassVar = fixed("fp8", flat="dtype")
    activation_scheme: ClassVar = fixed("dynamic")
    weight_block_size: ClassVar = fixed([32, 32])
    scale_fmt: ClassVar = fixed("ue8m0")
    expert_dtype: ClassVar = fixed("fp4", flat="expert_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """`rope_scaling`: YaRN for the layers with compressed rows."""

    rope_type: ClassVar = fixed("yarn")
    factor: Annotated[float, Key("rope_factor", POSITIVE)]
    beta_fast: Annotated[float, Key("beta_fast", POSITIVE)]
    beta_slow: Annotated[float, Key("beta_slow", POSITIVE)]
    original_max_position_embeddings: Annotated[int, Key("original_seq_len", integer())]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`vision_config`: the image tower and the limits of the resize plan (pixels, tokens)."""

    model_type: ClassVar = fixed("deepseek_v41_vision")
    num_hidden_layers: Annotated[int, Key("vision_n_layers", integer(1, 1024))]
    hidden_size: Annotated[int, Key("vision_dim", WIDTH)]
    num_attention_heads: Annotated[int, Key("vision_n_heads", integer())]
    intermediate_size: Annotated[int, Key("vision_inter_dim", WIDTH)]
    patch_size: Annotated[int, Key("vision_patch_size", integer())]
    rope_theta: Annotated[float, Key("vision_rope_theta", POSITIVE)]
    downsample_ratio: Annotated[int, Key("vision_downsample_ratio", integer())]
    max_image_tokens: Annotated[int, Key("vision_max_n_token", integer(4))]  # start, one image token, its newline, end
    min_pixels: Annotated[int, Key("vision_min_pixels", integer(0))]
    max_wh_ratio: Annotated[float | None, Key("vision_max_wh_ratio", POSITIVE_OR_NULL)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The keys beside the sections."""

    architectures: ClassVar = fixed(["DeepseekV41ForCausalLM"])
    model_type: ClassVar = fixed("deepseek_v41")
    dtype: ClassVar = fixed("bfloat16")
    transformers_version: Annotated[str | None, Key(None, STRING, is_optional=True)] = None
    bos_token_id: Annotated[int, Key(None, TOKEN, 0)]
    eos_token_id: Annotated[int, Key(None, TOKEN, 1)]
    pad_token_id: Annotated[int, Key(None, TOKEN, 2)]
    image_token_id: Annotated[int, Key("image_token_id", TOKEN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(TopConfig):
    """One DeepSeek V4.1 model: `text_config` and all else. Absent features hold 0, -1 or an empty tuple, as the file
    does."""

    model_type: ClassVar = fixed("deepseek_v41_text")
    vocab_size: Annotated[int, Key("vocab_size", integer())]
    hidden_size: Annotated[int, Key("dim", WIDTH)]
    moe_intermediate_size: Annotated[int, Key("moe_inter_dim", WIDTH)]
    num_hidden_layers: Annotated[int, Key("n_layers", integer(1, 1024))]
    num_attention_heads: Annotated[int, Key("n_heads", integer())]
    num_key_value_heads: ClassVar = fixed(1)
    head_dim: Annotated[int, Key("head_dim", WIDTH)]
    qk_rope_head_dim: Annotated[int, Key("rope_head_dim", integer(2, multiple=2))]
    q_lora_rank: Annotated[int, Key("q_lora_rank", WIDTH)]
    o_lora_rank: Annotated[int, Key("o_lora_rank", WIDTH)]
    o_groups: Annotated[int, Key("o_groups", integer())]
    hidden_act: ClassVar = fixed("silu")
    swiglu_limit: Annotated[float, Key("swiglu_limit", POSITIVE)]
    rms_norm_eps: Annotated[float, Key("norm_eps", POSITIVE)]
    attention_bias: ClassVar = fixed(False)
    attention_dropout: ClassVar = fixed(0.0)
    # Training and library settings without effect here: any value of the type is accepted and none is kept.
    initializer_range: ClassVar = Key(None, POSITIVE, 0.02, is_field=False)
    use_cache: ClassVar = Key(None, BOOL, True, is_field=False)
    tie_word_embeddings: ClassVar = fixed(False)
    max_position_embeddings: Annotated[int, Key(None, integer(), 1048576)]
    rope_theta: Annotated[float, Key("rope_theta", POSITIVE)]
    rope_scaling: Annotated[YarnConfig, Key(None, OBJECT)]
    compress_rope_theta: Annotated[float, Key("compress_rope_theta", POSITIVE)]
    n_routed_experts: Annotated[int, Key("n_routed_experts", integer(1, 65536))]
    n_shared_experts: Annotated[int, Key("n_shared_experts", integer(1, 1))]
    num_experts_per_tok: Annotated[int, Key("n_activated_experts", integer())]
    scoring_func: ClassVar = fixed("sqrtsoftplus", flat="score_func")
    topk_method: ClassVar = fixed("noaux_tc")
    norm_topk_prob: Annotated[bool, Key(None, BOOL, True)]
    routed_scaling_factor: Annotated[float, Key("route_scale", POSITIVE)]
    sliding_window: Annotated[int, Key("window_size", integer())]
    compress_ratios: Annotated[tuple[int, ...], Key("compress_ratios", INTEGERS)]
    kv_source_layer_ids: Annotated[tuple[int, ...], Key("kv_source_layers", INTEGERS)]
    index_source_layer_ids: Annotated[tuple[int, ...], Key("index_source_layers", INTEGERS)]
    index_n_heads: Annotated[int, Key("index_n_heads", integer(0))]
    index_head_dim: Annotated[int, Key("index_head_dim", integer(0, multiple=32))]
    index_topk: Annotated[int, Key("index_topk", integer(0))]
    candidate_source_layer_id: Annotated[int, Key("candidate_source_layer", integer(-1))]
    candidate_topk_blocks: Annotated[int, Key("candidate_topk_blocks", integer(0))]
    candidate_block_size: Annotated[int, Key("candidate_block_size", integer(0))]
    hc_mult: Annotated[int, Key("hc_mult", integer(1, 64))]
    hc_sinkhorn_iters: Annotated[int, Key("hc_sinkhorn_iters", integer(1, 1000))]
    hc_eps: Annotated[float, Key("hc_eps", POSITIVE)]
    engram_layer_ids: Annotated[tuple[int, ...], Key("engram_layer_ids", INTEGERS)]
    engram_num_embeddings: Annotated[tuple[int, ...], Key("engram_num_embeddings", INTEGERS)]
    engram_max_ngram_size: Annotated[int, Key("engram_max_ngram_size", integer(0, 64))]
    engram_vocab_size: Annotated[int, Key("engram_vocab_size", integer(0, 1 << 31))]
    engram_n_heads: Annotated[int, Key("engram_n_heads", integer(0, 1024))]
    engram_head_dim: Annotated[int, Key("engram_head_dim", integer(0, multiple=32))]
    engram_pad_token_id: Annotated[int, Key("engram_pad_id", TOKEN)]
    engram_compressed_vocab_size: Annotated[int, Key("engram_compressed_vocab_size", integer(0))]
    num_nextn_predict_layers: Annotated[int, Key("n_mtp_layers", integer(0, 64))]
    dspark_block_size: Annotated[int, Key("dspark_block_size", integer(0, 1024))]
    dspark_noise_token_id: Annotated[int, Key("dspark_noise_token_id", TOKEN)]
    dspark_markov_rank: Annotated[int, Key("dspark_markov_rank", integer(0))]
    dspark_target_layer_ids: Annotated[tuple[int, ...], Key("dspark_target_layer_ids", INTEGERS)]
    dspark_n_routed_experts: Annotated[int, Key("dspark_n_routed_experts", integer(0, 65536))]
    dspark_num_experts_per_tok: Annotated[int, Key("dspark_n_activated_experts", integer(0))]
    vision: VisionConfig | None

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
        try:
            _check(config)
            plan_layers(config)
            engram_moduli(config)
        except ConfigError as error:
            if is_nested:
                raise
            raise ConfigError(re.sub(r"[\w.]*\w", lambda word: _FLAT_NAMES.get(word[0], word[0]), str(error))) from None
        return config

    def to_dict(self, spelling: Spelling = "nested") -> dict[str, Any]:
        """The file that `from_dict` reads, keys in published order; absent vision means absent keys.

        Raises: ConfigError when `spelling` is "flat" and a value that the flat file cannot carry is not the published
        one. `max_position_embeddings` is exempt: there it is a size chosen at run time.
        """
        if spelling == "flat":
            return _write_flat(self)
        text = write(_TEXT, self) | {"rope_scaling": write(_ROPE, self.rope_scaling)}
        top = {name: value for name, value in write(_TOP, self).items() if value is not None}
        nested = {**top, "quantization_config": write(_QUANTIZATION, self), "text_config": text}
        if self.vision is not None:
            nested["vision_config"] = write(_VISION, self.vision)
        return nested

    @property
    def engram_columns(self) -> int:
        """Rows looked up per token and Engram layer (A): orders 2 to the longest, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.engram_layer_ids else 0


_TOP, _QUANTIZATION, _TEXT = keys_of(TopConfig), keys_of(Quantization), keys_of(ModelConfig)
_ROPE, _VISION = keys_of(YarnConfig), keys_of(VisionConfig)
_FLAT_NAMES = {  # by the names that errors use
    section + name: key.flat
    for section, keys in (("", _TOP), ("", _TEXT), ("rope_scaling.", _ROPE), ("vision_config.", _VISION))
    for name, key in keys.items()
    if key.flat is not None
}


def read_config(path: str | Path) -> ModelConfig:
    """Reads `path`, a JSON file of either spelling or a folder that holds `config.json`.

    Raises: ConfigError, its message led by the path: no such file, not JSON, a key given twice, NaN or infinity, and
    all that `ModelConfig.from_dict` refuses.
    """
    file = Path(path)
    if os.path.isdir(file):  # unlike Path.is_dir, false for a path that the system refuses; reading it says why
        file = file / "config.json"
    try:
        return ModelConfig.from_dict(parse_json(file.read_bytes()))
    except OSError as error:
        advice = "give a checkpoint folder or its config.json"
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected a JSON object, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _read_nested(data: Mapping[str, Any]) -> dict[str, Any]:
    def section(keys: Keys, parent: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
        content = take({name: Key(None, OBJECT)}, parent, where)[name]
        refuse_unknown(content, keys, f"{where}{name}.")
        return take(keys, content, f"{where}{name}.")

    refuse_unknown(data, (*_TOP, "quantization_config", "text_config", "vision_config"))
    fields = take(_TOP, data)
    section(_QUANTIZATION, data, "quantization_config")
    fields |= section(_TEXT, data, "text_config")
    fields["rope_scaling"] = YarnConfig(**section(_ROPE, data["text_config"], "rope_scaling", "text_config."))
    has_vision = data.get("vision_config") is not None
    fields["vision"] = VisionConfig(**section(_VISION, data, "vision_config")) if has_vision else None
    return fields


def _read_flat(data: Mapping[str, Any]) -> dict[str, Any]:
    tables = (_TOP, _QUANTIZATION, _TEXT, _ROPE, _VISION)
    refuse_unknown(data, (key.flat for keys in tables for key in keys.values()))
    fields = take(_TOP, data, flat=True) | take(_TEXT, data, flat=True)
    take(_QUANTIZATION, data, flat=True)
    fields["rope_scaling"] = YarnConfig(**take(_ROPE, data, flat=True))
    has_vision = any(key.flat in data for key in _VISION.values())
    fields["vision"] = VisionConfig(**take(_VISION, data, flat=True)) if has_vision else None
    return fields


def _write_flat(config: ModelConfig) -> dict[str, Any]:
    runtime = ("rope_scaling", "max_position_embeddings", "transformers_version")
    for keys in (_TOP, _TEXT):
        for name, value in write(keys, config).items():
            if keys[name].flat is None and name not in runtime and value != keys[name].published:
                raise ConfigError(f"{name}: the flat file cannot carry {show(value)}; write the nested one")
    flat = write(_TEXT, config, flat=True) | write(_ROPE, config.rope_scaling, flat=True)
    flat |= write(_TOP, config, flat=True) | write(_QUANTIZATION, config, flat=True)
    return flat if config.vision is None else flat | write(_VISION, config.vision, flat=True)


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
    # Each is six tensors: a number beyond all reason must not become a list of them that fills the memory.
    for name, layers in (
        ("n_routed_experts", "num_hidden_layers"),
        ("dspark_n_routed_experts", "num_nextn_predict_layers"),
    ):
        most = _MOST_EXPERTS // max(1, getattr(c, layers))
        need(name, getattr(c, name) <= most, f"at most {most} with {layers} {getattr(c, layers)}")
    need("rope_theta", c.rope_theta > 1, "a number above 1")
    need("compress_rope_theta", c.compress_rope_theta > 1, "a number above 1")
    slow = c.rope_scaling.beta_slow
    need("rope_scaling.beta_fast", c.rope_scaling.beta_fast > slow, f"more than beta_slow {slow}")
    entries = c.num_hidden_layers + c.num_nextn_predict_layers
    parts = f"num_hidden_layers {c.num_hidden_layers} and num_nextn_predict_layers {c.num_nextn_predict_layers}"
    need("compress_ratios", len(c.compress_ratios) == entries, f"{entries} entries, one each of {parts}")
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
        at_least(
            1, "engram_layer_ids names layers", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"
        )
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
