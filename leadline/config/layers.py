"""The layer plan: what each layer computes itself and whose work it reads (architecture.md section 5)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from leadline.errors import ConfigError

if TYPE_CHECKING:
    from leadline.config.model import ModelConfig


class LayerMode(StrEnum):
    SWA = "SWA"  # window rows only
    FULL = "FULL"  # owns compressed rows and index keys, selects for itself
    REINDEX = "REINDEX"  # reads another layer's rows and keys, selects for itself
    REUSE = "REUSE"  # reads another layer's rows and selection


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of the plan. Layers are numbered as in the checkpoint; draft stages are not layers of the plan."""

    layer: int
    mode: LayerMode
    ratio: int  # tokens per compressed row; 0 = no compressed rows
    kv_source: int | None  # layer whose compressed rows and index keys are read (itself for FULL)
    index_source: int | None  # layer whose selection is read (itself for FULL and REINDEX)
    is_candidate_source: bool
    candidate_source: int | None  # set when this layer selects inside another layer's candidate blocks
    has_engram: bool
    is_draft_target: bool  # the mean over streams of its input feeds the drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    layers: tuple[LayerSpec, ...]
    kv_sources: tuple[int, ...]  # ascending
    # Last layer that owns compressed rows, -1 if none: layers after it need not see every prompt token.
    split_layer: int


def plan_layers(config: ModelConfig) -> LayerPlan:
    """Derives the mode and the sources of every layer.

    A layer with a ratio reads the rows of the nearest key/value source at or before it, and the selection of the
    nearest index source at or before it. Layers after the candidate source that select for themselves do so inside its
    candidate blocks. The draft stages are window-only and not part of the plan.

    Raises: ConfigError naming the layer: a source list out of order or out of range, a source without compressed rows,
    a consumer before its source, a ratio that differs from the source's, an owner of rows that does not select, a
    candidate source that does not select or whose consumers read other rows, an unknown ratio, a draft stage with one.

    Source: architecture.md sections 1.2, 4.8 and 5.
    """
    num_layers = config.num_hidden_layers
    ratios = config.compress_ratios
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        for previous, layer in itertools.pairwise((-1, *getattr(config, name))):
            if layer >= num_layers:
                raise ConfigError(f"{name}: layer {layer}: expected a layer below num_hidden_layers {num_layers}")
            if layer <= previous:
                raise ConfigError(
                    f"{name}: layer {layer} after layer {previous}: expected ascending layers without repeats"
                )
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise ConfigError(f"compress_ratios: layer {layer}: expected 0, 1 or 2, got {ratio}")
        if ratio and layer >= num_layers:
            raise ConfigError(
                f"compress_ratios: entry {layer} is draft stage {layer - num_layers}: expected 0, got {ratio}"
            )
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(config, name):
            if ratios[layer] == 0:
                raise ConfigError(
                    f"{name}: layer {layer} has compress_ratios 0 and no rows; give it a ratio or remove it"
                )
    for layer in config.kv_source_layer_ids:
        if layer not in config.index_source_layer_ids:
            raise ConfigError(
                f"index_source_layer_ids: layer {layer} owns rows (kv_source_layer_ids); it must be listed too, got "
                f"{list(config.index_source_layer_ids)}"
            )
    candidate_source = config.candidate_source_layer_id
    if candidate_source >= 0 and candidate_source not in config.kv_source_layer_ids:
        raise ConfigError(
            f"candidate_source_layer_id: layer {candidate_source}: expected one of kv_source_layer_ids "
            f"{list(config.kv_source_layer_ids)}; its consumers would have no candidates"
        )
    layers = []
    kv_source: int | None = None
    index_source: int | None = None
    for layer in range(num_layers):
        ratio = ratios[layer]
        owns_rows = layer in config.kv_source_layer_ids
        selects = layer in config.index_source_layer_ids
        kv_source = layer if owns_rows else kv_source
        index_source = layer if selects else index_source
        if ratio and kv_source is None:
            raise ConfigError(f"layer {layer}: compress_ratios {ratio}, but no kv_source_layer_ids at or before it")
        if ratio and kv_source is not None and ratios[kv_source] != ratio:
            raise ConfigError(
                f"layer {layer}: compress_ratios {ratio} differs from {ratios[kv_source]} of layer {kv_source}, "
                f"whose rows it reads; a group has one ratio"
            )
        restricted = selects and 0 <= candidate_source < layer
        if restricted and kv_source != candidate_source:
            raise ConfigError(
                f"layer {layer}: selects inside the candidates of layer {candidate_source} but reads the rows of layer "
                f"{kv_source}; no rows may be owned after candidate_source_layer_id"
            )
        if ratio == 0:
            mode = LayerMode.SWA
        elif owns_rows:
            mode = LayerMode.FULL
        else:
            mode = LayerMode.REINDEX if selects else LayerMode.REUSE
        layers.append(
            LayerSpec(
                layer=layer,
                mode=mode,
                ratio=ratio,
                kv_source=kv_source if ratio else None,
                index_source=index_source if ratio else None,
                is_candidate_source=layer == candidate_source,
                candidate_source=candidate_source if restricted else None,
                has_engram=layer in config.engram_layer_ids,
                is_draft_target=layer in config.dspark_target_layer_ids,
            )
        )
    sources = config.kv_source_layer_ids
    return LayerPlan(layers=tuple(layers), kv_sources=sources, split_layer=sources[-1] if sources else -1)
