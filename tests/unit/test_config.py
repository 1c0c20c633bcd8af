"""Configuration files: both spellings, round trips, and every way a file can be wrong."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.config.model import ModelConfig, read_config
from leadline.errors import ConfigError

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = GOLDEN / "released_config.json"
TINY = sorted((GOLDEN / "models").glob("*/config.json"))


def released() -> dict:
    return json.loads(RELEASED.read_text())


def with_value(data: dict, path: str, value: object) -> dict:
    """A copy of `data` with one key, given as "section.key", set."""
    data = copy.deepcopy(data)
    *sections, key = path.split(".")
    owner = data
    for section in sections:
        owner = owner[section]
    owner[key] = value
    return data


def every_path(data: dict, prefix: str = "") -> list[str]:
    paths = []
    for key, value in data.items():
        paths.append(prefix + key)
        if isinstance(value, dict):
            paths += every_path(value, f"{prefix}{key}.")
    return paths


def test_released_file_is_reproduced_to_the_byte():
    assert json.dumps(read_config(RELEASED).to_dict(), indent=2) == RELEASED.read_text()


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.parent.name)
def test_tiny_files_are_reproduced(path):
    config = read_config(path.parent)
    data = json.loads(path.read_text())
    assert config.to_dict() == data
    assert ModelConfig.from_dict(config.to_dict()) == config
    flat = ModelConfig.from_dict(config.to_dict("flat"))
    assert dataclasses.replace(flat, max_position_embeddings=config.max_position_embeddings) == config


def test_eight_tiny_configurations_are_covered():
    assert len(TINY) == 8


def test_values_of_the_released_model():
    config = read_config(RELEASED)
    assert (config.hidden_size, config.head_dim, config.n_routed_experts) == (5120, 512, 384)
    assert config.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0)
    assert config.rope_scaling.factor == 16
    assert config.vision is not None
    assert config.vision.min_pixels == 295936
    assert config.vision.max_wh_ratio is None
    assert config.engram_columns == 24


def test_flat_file_has_the_published_keys_and_means_the_same(tmp_path):
    config = read_config(RELEASED)
    flat = config.to_dict("flat")
    assert len(flat) == 64
    assert flat["dtype"] == "fp8"
    assert flat["expert_dtype"] == "fp4"
    assert flat["score_func"] == "sqrtsoftplus"
    assert flat["rope_factor"] == 16
    assert flat["original_seq_len"] == 65536
    assert flat["vision_max_n_token"] == 1024
    file = tmp_path / "config.json"
    file.write_text(json.dumps(flat))
    again = read_config(file)
    assert again == dataclasses.replace(config, transformers_version=None)
    assert again.to_dict("flat") == flat


def test_flat_file_cannot_carry_everything():
    for field, value in (("norm_topk_prob", False), ("eos_token_id", 5)):
        config = dataclasses.replace(read_config(RELEASED), **{field: value})
        with pytest.raises(ConfigError, match=field):
            config.to_dict("flat")


@pytest.mark.parametrize("path", every_path(released()))
def test_missing_key_is_named(path):
    data = released()
    *sections, key = path.split(".")
    owner = data
    for section in sections:
        owner = owner[section]
    del owner[key]
    if path in ("vision_config", "transformers_version"):
        assert ModelConfig.from_dict(data).to_dict() == data
        return
    with pytest.raises(ConfigError, match=rf"{key}: (missing|unknown)"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize("name", read_config(RELEASED).to_dict("flat"))
def test_missing_flat_key_is_named(name):
    data = read_config(RELEASED).to_dict("flat")
    del data[name]
    with pytest.raises(ConfigError, match=rf"^{name}: missing"):
        ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    "section", ["", "quantization_config.", "text_config.", "text_config.rope_scaling.", "vision_config."]
)
def test_unknown_key_is_named_with_its_value(section):
    with pytest.raises(ConfigError, match=r"max_num_tokens: unknown key with value 4321"):
        ModelConfig.from_dict(with_value(released(), f"{section}max_num_tokens", 4321))


def test_flat_and_nested_do_not_mix():
    with pytest.raises(ConfigError, match=r"text_config\.dim: unknown"):
        ModelConfig.from_dict(with_value(released(), "text_config.dim", 5120))
    flat = read_config(RELEASED).to_dict("flat")
    with pytest.raises(ConfigError, match="hidden_size: unknown"):
        ModelConfig.from_dict({**flat, "hidden_size": 5120})


@pytest.mark.parametrize("path", [path for path in every_path(released()) if path != "vision_config.max_wh_ratio"])
@pytest.mark.parametrize("value", [None, "x", True, -7, math.nan, math.inf, [1.5], {}], ids=repr)
def test_wrong_type_or_range_is_named(path, value):
    key = path.rpartition(".")[2]
    allowed = {
        ("vision_config", None),
        ("transformers_version", "x"),
        *((name, True) for name in ("use_cache", "norm_topk_prob")),
    }
    if (key, value) in [pair for pair in allowed if type(pair[1]) is type(value)]:
        ModelConfig.from_dict(with_value(released(), path, value))
        return
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict(with_value(released(), path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("architectures", ["DeepseekV41ForConditionalGeneration"]),
        ("model_type", "deepseek_v4.1"),
        ("dtype", "float32"),
        ("text_config.model_type", "deepseek_v4.1_text"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.scoring_func", "sigmoid"),
        ("text_config.topk_method", "greedy"),
        ("text_config.num_key_value_heads", 8),
        ("text_config.attention_bias", True),
        ("text_config.tie_word_embeddings", True),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("quantization_config.quant_method", "awq"),
        ("quantization_config.weight_block_size", [128, 128]),
        ("quantization_config.scale_fmt", "float"),
        ("quantization_config.expert_dtype", "fp8"),
        ("vision_config.model_type", "deepseek_v41"),
        ("text_config.hidden_size", 5121),
        ("text_config.hidden_size", 5120.0),
        ("text_config.vocab_size", 10**40),
        ("text_config.rms_norm_eps", 0),
        ("text_config.rope_theta", 10**400),
        ("text_config.head_dim", 40),
        ("text_config.qk_rope_head_dim", 63),
        ("text_config.qk_rope_head_dim", 514),
        ("text_config.index_head_dim", 32),  # narrower than the rotated part
        ("text_config.o_groups", 7),
        ("text_config.num_experts_per_tok", 385),
        ("text_config.n_routed_experts", 65536),  # 15 million tensors in 40 layers
        ("text_config.dspark_n_routed_experts", 65536),
        ("text_config.n_shared_experts", 2),
        ("text_config.compress_ratios", [0] * 40),
        ("text_config.index_topk", 0),
        ("text_config.candidate_block_size", 0),
        ("text_config.engram_num_embeddings", [384006168]),
        ("text_config.engram_num_embeddings", [1, 2]),
        ("text_config.engram_vocab_size", 7),
        ("text_config.engram_max_ngram_size", 1),
        ("text_config.engram_pad_token_id", 99092),
        ("text_config.engram_compressed_vocab_size", 129281),
        ("text_config.dspark_target_layer_ids", []),
        ("text_config.dspark_num_experts_per_tok", 129),
        ("text_config.dspark_noise_token_id", 129280),
        ("text_config.rope_scaling.beta_fast", 1),
        ("eos_token_id", 129280),
        ("image_token_id", 129280),
        ("vision_config.num_attention_heads", 15),
        ("vision_config.max_image_tokens", 3),
    ],
)
def test_contradiction_names_key_and_value(path, value):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(with_value(released(), path, value))
    message = str(caught.value)
    assert path.rpartition(".")[2] in message
    assert repr(value)[:40] in message
    assert "expected" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "dspark_n_activated_experts",
            0,
            "^dspark_n_activated_experts: expected at least 1, as n_mtp_layers is 3, got 0",
        ),
        ("n_mtp_layers", 0, "^compress_ratios: expected 40 entries, .* n_mtp_layers 0, got"),
        ("engram_compressed_vocab_size", 0, "^engram_compressed_vocab_size: expected at least 1"),
        ("n_activated_experts", 385, "^n_activated_experts: expected at most n_routed_experts 384, got 385"),
        ("beta_fast", 1, "^beta_fast: expected more than beta_slow 1, got 1"),
        ("vision_n_heads", 15, "^vision_n_heads: "),
        ("kv_source_layers", [], r"^candidate_source_layer: layer 20: expected one of kv_source_layers \[\]"),
        ("index_source_layers", [], r"^index_source_layers: .* \(kv_source_layers\); .* got \[\]"),
    ],
)
def test_contradictions_of_a_flat_file_are_in_its_spelling(key, value, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict(read_config(RELEASED).to_dict("flat") | {key: value})


def test_draft_targets_without_stages():
    data = with_value(released(), "text_config.num_nextn_predict_layers", 0)
    data = with_value(data, "text_config.compress_ratios", data["text_config"]["compress_ratios"][:40])
    with pytest.raises(ConfigError, match="dspark_target_layer_ids"):
        ModelConfig.from_dict(data)


def test_settings_without_effect_are_accepted():
    data = with_value(with_value(released(), "text_config.use_cache", False), "text_config.initializer_range", 0.006)
    assert ModelConfig.from_dict(data) == read_config(RELEASED)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a JSON object"),
        ("{", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ("\xff", "config.json"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"a": 1, "a": 2}', "a given twice"),
        ('{"a": NaN}', "finite"),
        ('{"a": -Infinity}', "finite"),
        ("{}", "missing"),
        ('{"model_type": "llama", "architectures": []}', "text_config|unknown|architectures"),
    ],
)
def test_unreadable_file_is_named(tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(tmp_path)
    assert str(file) in str(caught.value)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read .File name too long"):
        read_config("a" * 5000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from(every_path(released())), value=JSON)
def test_any_value_is_read_or_refused(path, value):
    """No value raises anything but ConfigError, and what is read can be written and read again."""
    try:
        config = ModelConfig.from_dict(with_value(released(), path, value))
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
