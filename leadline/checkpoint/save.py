"""Writes checkpoints in the published layout: configuration, shards, index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from leadline.checkpoint.schema import expected_tensors
from leadline.checkpoint.shard import MemoryShard
from leadline.checkpoint.source import match_tensors
from leadline.config.model import ModelConfig
from leadline.errors import CheckpointError


def save_checkpoint(
    folder: str | Path, config: ModelConfig, tensors: dict[str, torch.Tensor], max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes `config.json` and the tensors: one `model.safetensors`, or numbered shards and their index.

    Args:
        folder: created if needed; must not hold safetensors files already, as old and new shards would mix.
        tensors: every tensor of `config` under its released name, in the stored type; on any device.
        max_shard_bytes: a shard holds at least one tensor and otherwise at most this many bytes of them.

    Raises: CheckpointError for a folder in use, for tensors that do not fit the configuration, and when the system does
        not let it write. Then, or when the process ends half-way, what is left in the folder does not load.
    """
    folder = Path(folder)
    match_tensors(expected_tensors(config), [MemoryShard(tensors)])
    if any(folder.glob("*.safetensors*")):
        raise CheckpointError(f"{folder}: holds a checkpoint already; choose an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        _write_shards(folder, tensors, max_shard_bytes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); make room or choose another folder") from error


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
    if len(shards) == 1:
        _save(shards[0], folder / "model.safetensors")
        return
    shard_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _save(shard, folder / file_name)
        shard_of |= dict.fromkeys(shard, file_name)
    # Last, since shards without an index are refused.
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save(shard: dict[str, torch.Tensor], path: Path) -> None:
    save_file(shard, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # the library's files are for their owner alone
