"""`leadline plan`: what a model consists of and what it needs, computed from its configuration alone.

No weight is read, so the plan of the released model can be had on a laptop that could never hold it.
"""

from __future__ import annotations

import itertools
import json as json_format
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leadline.cache.pages import PAGE_TOKENS
from leadline.checkpoint.random_model import default_config
from leadline.checkpoint.schema import TensorSpec, expected_tensors
from leadline.cli.options import table
from leadline.config.checks import check_integer
from leadline.config.layers import LayerPlan, LayerSpec, plan_layers
from leadline.config.model import ModelConfig, read_config
from leadline.formats.rows import compressed_row, index_row, window_row
from leadline.ops.select import BUDGET_BYTES

# Name of a part and the tensors that belong to it; the first match counts.
_PARTS = (
    ("engram tables", r"\.engram\.embed\."),
    ("engram projections", r"\.engram\."),
    ("draft stages", r"^mtp\."),
    ("vision", r"^(vision|aligner|image)"),
    ("embedding and head", r"^(embed|head)\."),
    ("routed experts", r"\.ffn\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.gate\."),
    ("indexer and compressor", r"\.attn\.(indexer|compressor)\."),
    ("attention", r"\.attn\."),
    ("norms and stream mixing", r"norm|hc_"),
)
_KINDS = {"F8_E4M3": "FP8", "I8": "FP4", "F8_E8M0": "E8M0 scales", "BF16": "BF16", "F32": "F32"}


def plan_report(config: ModelConfig, context: int = 1, batch: int = 1, gpus: int = 1) -> dict[str, Any]:
    """The plan as plain data, the same that `--json` prints.

    Args:
        context: tokens per sequence. batch: sequences. gpus: devices that share routed experts and sequences; all
            else is on each of them.
    Units: bytes, tokens, elements; FP4 counts two elements per stored byte.
    Raises: RequestError for sizes out of range.
    Source: architecture.md sections 2.1, 5 and 7.
    """
    check_integer("context", context, 1, config.max_position_embeddings)
    check_integer("batch", batch, 1)
    check_integer("gpus", gpus, 1)
    tensors = expected_tensors(config)
    plan = plan_layers(config)
    return {
        "layers": [_layer(spec) for spec in plan.layers],
        "checkpoint": _checkpoint(tensors),
        "cache": _cache(config, plan),
        "memory": _memory(config, plan, tensors, context, batch, gpus),
    }


def _layer(spec: LayerSpec) -> dict[str, Any]:
    return {
        "layer": spec.layer,
        "mode": spec.mode.value,
        "ratio": spec.ratio,
        "rows_of": spec.kv_source,
        "selection_of": spec.index_source,
        "candidates_of": spec.candidate_source,
        "is_candidate_source": spec.is_candidate_source,
        "has_engram": spec.has_engram,
        "is_draft_target": spec.is_draft_target,
    }


def _checkpoint(tensors: dict[str, TensorSpec]) -> dict[str, Any]:
    parts: dict[str, Counter[str]] = {part: Counter() for part, _ in _PARTS}
    kinds: dict[str, Counter[str]] = {kind: Counter() for kind in _KINDS.values()}
    for name, spec in tensors.items():
        part = next(part for part, pattern in _PARTS if re.search(pattern, name))
        elements = spec.num_elements * (2 if spec.dtype == "I8" else 1)
        parts[part].update(parameters=0 if spec.dtype == "F8_E8M0" else elements, bytes=spec.num_bytes)
        kinds[_KINDS[spec.dtype]].update(elements=elements, bytes=spec.num_bytes)
    return {
        "tensors": len(tensors),
        "bytes": sum(sizes["bytes"] for sizes in parts.values()),
        "parameters": sum(sizes["parameters"] for sizes in parts.values()),
        "parts": [{"part": part, **sizes} for part, sizes in parts.items() if sizes],
        "kinds": [{"kind": kind, **sizes} for kind, sizes in kinds.items() if sizes],
    }


def _cache(config: ModelConfig, plan: LayerPlan) -> dict[str, Any]:
    """Bytes per token of every layer that owns rows, and the constant state of a sequence."""
    sources = []
    for source in plan.kv_sources:
        ratio = plan.layers[source].ratio
        row, key = compressed_row(config.head_dim).row_bytes, index_row(config.index_head_dim).row_bytes
        each = {"layer": source, "tokens_per_row": ratio, "row_bytes": row, "key_bytes": key}
        sources.append({**each, "bytes_per_token": _exact((row + key) / ratio)})
    ring = config.sliding_window * window_row(config.head_dim).row_bytes
    pairs = sum(plan.layers[source].ratio == 2 for source in plan.kv_sources)
    state = {
        "windows": config.num_hidden_layers * ring,
        "draft_rings": config.num_nextn_predict_layers * ring,
        "open_groups": pairs * 2 * config.head_dim * 4,  # projection and gate of one token, fp32
        "hashed_ids": (config.engram_max_ngram_size - 1) * 8 if config.engram_layer_ids else 0,
    }
    return {
        "bytes_per_token": _exact(sum(source["bytes_per_token"] for source in sources)),
        "sources": sources,
        "bytes_per_sequence": sum(state.values()),
        "sequence_state": state,
    }


def _exact(value: float) -> float:
    """Whole numbers as int: half rows make quotients of 2."""
    return int(value) if value == int(value) else value


def _memory(
    config: ModelConfig, plan: LayerPlan, tensors: dict[str, TensorSpec], context: int, batch: int, gpus: int
) -> dict[str, Any]:
    """What one device must hold. Tables stay on the host; a page of the cache covers PAGE_TOKENS tokens."""

    def size_of(mark: str) -> int:
        return sum(spec.num_bytes for name, spec in tensors.items() if mark in name)

    tables, experts = size_of(".engram.embed."), size_of(".ffn.experts.")
    cache = _cache(config, plan)
    sequences = -(-batch // gpus)
    tokens = -(-context // PAGE_TOKENS) * PAGE_TOKENS
    device = {
        "routed_experts": -(-experts // gpus),
        "other_weights": size_of("") - tables - experts,
        "rows": int(sequences * tokens * cache["bytes_per_token"]),
        "sequence_state": sequences * cache["bytes_per_sequence"],
        "selection_scratch": BUDGET_BYTES if plan.kv_sources else 0,
    }
    return {
        "context": context,
        "batch": batch,
        "gpus": gpus,
        "bytes_per_device": sum(device.values()),
        "device": device,
        "host": {"engram_tables": tables},
    }


def plan(
    model: Annotated[
        str, typer.Argument(help="Checkpoint folder or config.json; empty: the small default model.")
    ] = "",
    *,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence.", show_default="4096, or the model's most")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    gpus: Annotated[int, typer.Option(help="Devices that share the routed experts and the sequences.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show a model's layers, sizes and memory needs, from its configuration alone."""
    config = read_config(model) if model else default_config()
    if context is None:
        context = min(4096, config.max_position_embeddings)
    report = plan_report(config, context, batch, gpus)
    if json:
        typer.echo(json_format.dumps(report, indent=2))
        return
    Console().print(*_tables(report), sep="\n")


def _tables(report: dict[str, Any]) -> Iterator[Table]:
    checkpoint, cache, memory = report["checkpoint"], report["cache"], report["memory"]
    yield table("Layers", _runs(report["layers"]))
    title = f"Checkpoint: {checkpoint['tensors']:,} tensors, {_size(checkpoint['bytes'])}"
    everything = {"part": "all", "parameters": checkpoint["parameters"], "bytes": checkpoint["bytes"]}
    yield table(title, checkpoint["parts"], [everything])
    formats = [{"format": k["kind"], "elements": k["elements"], "bytes": k["bytes"]} for k in checkpoint["kinds"]]
    yield table("Number formats", formats)
    title = f"Cache: {cache['bytes_per_token']:,} B per token, {_size(cache['bytes_per_sequence'])} per sequence"
    owners = [(f"layer {source['layer']}", source["bytes_per_token"], "") for source in cache["sources"]]
    owners += [(name.replace("_", " "), "", size) for name, size in cache["sequence_state"].items()]
    names = ("owner", "bytes per token", "bytes per sequence")
    yield table(title, [dict(zip(names, owner, strict=True)) for owner in owners], right=names[1:])
    title = f"Memory: {memory['batch']} x {memory['context']:,} tokens on {memory['gpus']} device(s)"
    totals = {"each device": memory["bytes_per_device"], "host: engram tables": memory["host"]["engram_tables"]}
    needs, sums = (
        [{"what": name.replace("_", " "), "bytes": size, "": _size(size)} for name, size in sizes.items()]
        for sizes in (memory["device"], totals)
    )
    yield table(title, needs, sums, right=[""])


def _runs(layers: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row of cells a layer; neighbours with equal cells share one."""
    flags = {"is_candidate_source": "candidate source", "has_engram": "engram", "is_draft_target": "feeds the drafter"}

    def cells(layer: dict[str, Any]) -> dict[str, str]:
        own = {layer["layer"]: "own", None: "-"}
        sources = {key.replace("_", " "): layer[key] for key in ("rows_of", "selection_of", "candidates_of")}
        return {
            "mode": layer["mode"],
            "ratio": str(layer["ratio"] or "-"),
            **{name: own.get(source, str(source)) for name, source in sources.items()},
            "notes": ", ".join(text for flag, text in flags.items() if layer[flag]),
        }

    rows = []
    for row, run in itertools.groupby(layers, cells):
        numbers = [layer["layer"] for layer in run]
        first, last = numbers[0], numbers[-1]
        rows.append({"layers": f"{first}" if first == last else f"{first}-{last}", **row})
    return rows


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"
