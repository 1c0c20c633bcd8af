"""The keys of a configuration file: both published names of each, what it may hold, how to read and write it.

`name` is the key of the nested `config.json` and the field of the dataclass; `flat` is the key of the published
`inference/config.json` (architecture.md sections 1.1 to 1.3). Tables are in the order of the published file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from leadline.errors import ConfigError


def show(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 120 else text[:117] + "..."


# What a key may hold. A rule returns the value to keep or raises ValueError with the expectation in words.
_Rule = Callable[[Any], Any]
_LARGEST = 2**31 - 1  # for sizes; keeps products of two of them inside int64


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _int(low: int = 1, high: int = _LARGEST, multiple: int = 1) -> _Rule:
    def rule(value: Any) -> Any:
        if not _is_int(value) or not low <= value <= high or value % multiple:
            kind = "an integer" if multiple == 1 else f"a multiple of {multiple}"
            raise ValueError(f"{kind} from {low} to {high}")
        return value

    return rule


def _positive(value: Any) -> Any:
    if not (_is_int(value) or isinstance(value, float)) or not 0 < value < 1e30:
        raise ValueError("a finite number above 0")
    return value


def _positive_or_null(value: Any) -> Any:
    return None if value is None else _positive(value)


def _ints(value: Any) -> Any:
    if not isinstance(value, list) or not all(_is_int(item) and 0 <= item <= _LARGEST for item in value):
        raise ValueError("a list of integers from 0 up")
    return tuple(value)


def _instance(kind: type, words: str) -> _Rule:
    def rule(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(words)
        return value

    return rule


def _exactly(expected: Any) -> _Rule:
    def rule(value: Any) -> Any:
        if isinstance(value, bool) != isinstance(expected, bool) or value != expected:
            raise ValueError(repr(expected))
        return value

    return rule


@dataclass(frozen=True, slots=True)
class Key:
    name: str  # in the nested file, and the field's name
    flat: str | None  # in the flat file
    rule: _Rule
    published: Any = None  # the value written for a key that is no field, and assumed where the flat file has no key
    is_field: bool = True
    is_optional: bool = False


def _fixed(name: str, value: Any, flat: str | None = None) -> Key:
    """A key with the one value that this program implements."""
    return Key(name, flat, _exactly(value), value, is_field=False)


_bool = _instance(bool, "true or false")
an_object = _instance(Mapping, "an object")
_WIDTH = _int(32, multiple=32)  # quantised in blocks of 32
_TOKEN = _int(0)

TOP = (
    _fixed("architectures", ["DeepseekV41ForCausalLM"]),
    _fixed("model_type", "deepseek_v41"),
    _fixed("dtype", "bfloat16"),
    Key("transformers_version", None, _instance(str, "a string"), is_optional=True),
    Key("bos_token_id", None, _TOKEN, 0),
    Key("eos_token_id", None, _TOKEN, 1),
    Key("pad_token_id", None, _TOKEN, 2),
    Key("image_token_id", "image_token_id", _TOKEN),
)
QUANTIZATION = (
    _fixed("quant_method", "fp8", flat="dtype"),
    _fixed("activation_scheme", "dynamic"),
    _fixed("weight_block_size", [32, 32]),
    _fixed("scale_fmt", "ue8m0"),
    _fixed("expert_dtype", "fp4", flat="expert_dtype"),
)
ROPE = (
    _fixed("rope_type", "yarn"),
    Key("factor", "rope_factor", _positive),
    Key("beta_fast", "beta_fast", _positive),
    Key("beta_slow", "beta_slow", _positive),
    Key("original_max_position_embeddings", "original_seq_len", _int()),
)
TEXT = (
    _fixed("model_type", "deepseek_v41_text"),
    Key("vocab_size", "vocab_size", _int()),
    Key("hidden_size", "dim", _WIDTH),
    Key("moe_intermediate_size", "moe_inter_dim", _WIDTH),
    Key("num_hidden_layers", "n_layers", _int(1, 1024)),
    Key("num_attention_heads", "n_heads", _int()),
    _fixed("num_key_value_heads", 1),
    Key("head_dim", "head_dim", _WIDTH),
    Key("qk_rope_head_dim", "rope_head_dim", _int(2, multiple=2)),
    Key("q_lora_rank", "q_lora_rank", _WIDTH),
    Key("o_lora_rank", "o_lora_rank", _WIDTH),
    Key("o_groups", "o_groups", _int()),
    _fixed("hidden_act", "silu"),
    Key("swiglu_limit", "swiglu_limit", _positive),
    Key("rms_norm_eps", "norm_eps", _positive),
    _fixed("attention_bias", False),
    _fixed("attention_dropout", 0.0),
    # Training and library settings without effect here: any value of the type is accepted and none is kept.
    Key("initializer_range", None, _positive, 0.02, is_field=False),
    Key("use_cache", None, _bool, True, is_field=False),
    _fixed("tie_word_embeddings", False),
    Key("max_position_embeddings", None, _int(), 1048576),
    Key("rope_theta", "rope_theta", _positive),
    Key("rope_scaling", None, an_object),
    Key("compress_rope_theta", "compress_rope_theta", _positive),
    Key("n_routed_experts", "n_routed_experts", _int(1, 65536)),
    Key("n_shared_experts", "n_shared_experts", _int(1, 1)),
    Key("num_experts_per_tok", "n_activated_experts", _int()),
    _fixed("scoring_func", "sqrtsoftplus", flat="score_func"),
    _fixed("topk_method", "noaux_tc"),
    Key("norm_topk_prob", None, _bool, True),
    Key("routed_scaling_factor", "route_scale", _positive),
    Key("sliding_window", "window_size", _int()),
    Key("compress_ratios", "compress_ratios", _ints),
    Key("kv_source_layer_ids", "kv_source_layers", _ints),
    Key("index_source_layer_ids", "index_source_layers", _ints),
    Key("index_n_heads", "index_n_heads", _int(0)),
    Key("index_head_dim", "index_head_dim", _int(0, multiple=32)),
    Key("index_topk", "index_topk", _int(0)),
    Key("candidate_source_layer_id", "candidate_source_layer", _int(-1)),
    Key("candidate_topk_blocks", "candidate_topk_blocks", _int(0)),
    Key("candidate_block_size", "candidate_block_size", _int(0)),
    Key("hc_mult", "hc_mult", _int(1, 64)),
    Key("hc_sinkhorn_iters", "hc_sinkhorn_iters", _int(1, 1000)),
    Key("hc_eps", "hc_eps", _positive),
    Key("engram_layer_ids", "engram_layer_ids", _ints),
    Key("engram_num_embeddings", "engram_num_embeddings", _ints),
    Key("engram_max_ngram_size", "engram_max_ngram_size", _int(0, 64)),
    Key("engram_vocab_size", "engram_vocab_size", _int(0)),
    Key("engram_n_heads", "engram_n_heads", _int(0, 1024)),
    Key("engram_head_dim", "engram_head_dim", _int(0, multiple=32)),
    Key("engram_pad_token_id", "engram_pad_id", _TOKEN),
    Key("engram_compressed_vocab_size", "engram_compressed_vocab_size", _int(0)),
    Key("num_nextn_predict_layers", "n_mtp_layers", _int(0, 64)),
    Key("dspark_block_size", "dspark_block_size", _int(0, 1024)),
    Key("dspark_noise_token_id", "dspark_noise_token_id", _TOKEN),
    Key("dspark_markov_rank", "dspark_markov_rank", _int(0)),
    Key("dspark_target_layer_ids", "dspark_target_layer_ids", _ints),
    Key("dspark_n_routed_experts", "dspark_n_routed_experts", _int(0, 65536)),
    Key("dspark_num_experts_per_tok", "dspark_n_activated_experts", _int(0)),
)
VISION = (
    _fixed("model_type", "deepseek_v41_vision"),
    Key("num_hidden_layers", "vision_n_layers", _int(1, 1024)),
    Key("hidden_size", "vision_dim", _WIDTH),
    Key("num_attention_heads", "vision_n_heads", _int()),
    Key("intermediate_size", "vision_inter_dim", _WIDTH),
    Key("patch_size", "vision_patch_size", _int()),
    Key("rope_theta", "vision_rope_theta", _positive),
    Key("downsample_ratio", "vision_downsample_ratio", _int()),
    Key("max_image_tokens", "vision_max_n_token", _int(4)),  # start, one image token, its newline, end
    Key("min_pixels", "vision_min_pixels", _int(0)),
    Key("max_wh_ratio", "vision_max_wh_ratio", _positive_or_null),
)


def take(keys: Iterable[Key], data: Mapping[str, Any], where: str = "", flat: bool = False) -> dict[str, Any]:
    """The fields of one table from one object of the file, each checked by its rule."""
    fields = {}
    for key in keys:
        name = key.flat if flat else key.name
        value = key.published
        if name is not None and name in data:
            try:
                value = key.rule(data[name])
            except ValueError as error:
                raise ConfigError(f"{where}{name}: expected {error}, got {show(data[name])}") from None
        elif name is not None and not key.is_optional:
            raise ConfigError(f"{where}{name}: missing; every published key is required")
        if key.is_field:
            fields[key.name] = value
    return fields


def refuse_unknown(data: Mapping[str, Any], known: Iterable[str | None], where: str = "") -> None:
    for name in sorted(data.keys() - set(known), key=str):
        raise ConfigError(f"{where}{name}: unknown key with value {show(data[name])}; names are matched exactly")


def written(key: Key, owner: object) -> Any:
    value = getattr(owner, key.name) if key.is_field else key.published
    return list(value) if isinstance(value, tuple | list) else value


def write(keys: Iterable[Key], owner: object, flat: bool = False) -> dict[str, Any]:
    names = ((key.flat if flat else key.name, key) for key in keys)
    return {name: written(key, owner) for name, key in names if name is not None}
