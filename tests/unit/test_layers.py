"""The layer plan: the published modes, and errors that name the layer."""

import dataclasses
from pathlib import Path

import pytest

from leadline.config.layers import LayerMode, plan_layers
from leadline.config.model import ModelConfig, read_config
from leadline.errors import ConfigError

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"


def changed(**values: object) -> ModelConfig:
    return dataclasses.replace(read_config(GOLDEN / "released_config.json"), **values)


def ratios(**by_layer: int) -> tuple[int, ...]:
    """The published ratios with single layers changed: ratios(l5=1)."""
    result = list(read_config(GOLDEN / "released_config.json").compress_ratios)
    for name, ratio in by_layer.items():
        result[int(name[1:])] = ratio
    return tuple(result)


def test_released_plan_is_the_table_of_the_specification():
    plan = plan_layers(changed())
    assert plan.kv_sources == (2, 8, 14, 20)
    assert plan.split_layer == 20
    assert [spec.layer for spec in plan.layers] == list(range(40))
    modes = {mode: [spec.layer for spec in plan.layers if spec.mode is mode] for mode in LayerMode}
    assert modes[LayerMode.SWA] == [0, 1]
    assert modes[LayerMode.FULL] == [2, 8, 14, 20]
    assert modes[LayerMode.REINDEX] == [24, 28, 32, 36]
    assert len(modes[LayerMode.REUSE]) == 30
    for spec in plan.layers:
        layer = spec.layer
        nearest = max((source for source in (2, 8, 14, 20) if source <= layer), default=None)
        assert spec.kv_source == nearest
        selecting = max((source for source in (2, 8, 14, 20, 24, 28, 32, 36) if source <= layer), default=None)
        assert spec.index_source == selecting
        assert spec.ratio == (0 if layer < 2 else 2 if layer < 20 else 1)
        assert spec.is_candidate_source == (layer == 20)
        assert spec.candidate_source == (20 if layer in (24, 28, 32, 36) else None)
        assert spec.has_engram == (layer in (1, 14))
        assert spec.is_draft_target == (layer in (37, 38, 39))


def test_window_only_model():
    plan = plan_layers(read_config(GOLDEN / "models" / "swa"))
    assert plan.split_layer == -1
    assert plan.kv_sources == ()
    assert {spec.mode for spec in plan.layers} == {LayerMode.SWA}


def test_two_groups_with_their_own_reindex_layers():
    plan = plan_layers(read_config(GOLDEN / "models" / "shared_index"))
    read = [(spec.mode, spec.kv_source, spec.index_source) for spec in plan.layers]
    assert read == [
        (LayerMode.SWA, None, None),
        (LayerMode.FULL, 1, 1),
        (LayerMode.REUSE, 1, 1),
        (LayerMode.REINDEX, 1, 3),
        (LayerMode.FULL, 4, 4),
        (LayerMode.REINDEX, 4, 5),
        (LayerMode.REUSE, 4, 5),
    ]


def test_window_only_layer_inside_a_group_reads_nothing():
    spec = plan_layers(changed(compress_ratios=ratios(l5=0))).layers[5]
    assert (spec.mode, spec.kv_source, spec.index_source) == (LayerMode.SWA, None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compress_ratios": ratios(l1=2)}, r"layer 1: compress_ratios 2, but no kv_source"),
        ({"compress_ratios": ratios(l5=1)}, r"layer 5: compress_ratios 1 differs from 2 of layer 2"),
        ({"compress_ratios": ratios(l5=3)}, r"compress_ratios: layer 5: expected 0, 1 or 2, got 3"),
        ({"compress_ratios": ratios(l41=1)}, r"draft stage 1: expected 0, got 1"),
        ({"compress_ratios": ratios(l8=0)}, r"kv_source_layer_ids: layer 8 has compress_ratios 0"),
        ({"compress_ratios": ratios(l24=0)}, r"index_source_layer_ids: layer 24 has compress_ratios 0"),
        ({"kv_source_layer_ids": (3, 8, 14, 20)}, r"index_source_layer_ids: layer 3 owns rows"),
        ({"index_source_layer_ids": (2, 8, 20)}, r"index_source_layer_ids: layer 14 owns rows"),
        ({"kv_source_layer_ids": (2, 14, 8, 20)}, r"kv_source_layer_ids: layer 8 after layer 14"),
        ({"index_source_layer_ids": (2, 2, 8, 14, 20)}, r"index_source_layer_ids: layer 2 after layer 2"),
        ({"kv_source_layer_ids": (2, 8, 14, 20, 40)}, r"kv_source_layer_ids: layer 40: expected a layer below"),
        ({"engram_layer_ids": (1, 40)}, r"engram_layer_ids: layer 40"),
        ({"dspark_target_layer_ids": (39, 38)}, r"dspark_target_layer_ids: layer 38 after layer 39"),
        ({"candidate_source_layer_id": 24}, r"candidate_source_layer_id: layer 24: expected one of .*no candidates"),
        ({"candidate_source_layer_id": 40}, r"candidate_source_layer_id: layer 40"),
        ({"candidate_source_layer_id": 14}, r"layer 20: selects inside the candidates of layer 14 but reads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_plan_names_the_layer(change, words):
    with pytest.raises(ConfigError, match=words):
        plan_layers(changed(**change))


def test_plan_is_checked_when_a_configuration_is_read():
    data = changed().to_dict()
    data["text_config"]["candidate_source_layer_id"] = 21
    with pytest.raises(ConfigError, match="layer 21"):
        ModelConfig.from_dict(data)
