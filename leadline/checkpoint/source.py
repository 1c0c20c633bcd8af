"""Weights out of a checkpoint, one tensor at a time, each of them exactly once.

Names, types and shapes of the whole checkpoint are compared with its configuration before the first weight is read, so
that a wrong folder fails in a second and not after an hour. Peak memory of a load is the weights kept plus a few
tensors: what has been copied or dequantised is handed back to the system tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch

from leadline.checkpoint.schema import TensorSpec, expected_tensors, released_name
from leadline.checkpoint.shard import AnyShard, MemoryShard, open_shards
from leadline.checkpoint.table import EngramTable
from leadline.config.model import ModelConfig
from leadline.errors import CheckpointError
from leadline.ops.linear import Weight

WeightsChoice = Literal["auto", "dense", "packed"]
Progress = Callable[[int, int], None]  # bytes taken so far, bytes to take; Engram tables, which stay mapped, excluded

# A number with all of these bits set is NaN or infinite; every byte of an I8 tensor is two finite numbers.
_NOT_FINITE = {
    torch.float8_e8m0fnu: (torch.uint8, 0xFF),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
}
_SCAN_BYTES = 1 << 24  # checked at a time
_COPIED_BYTES = 1 << 20  # below this a view of the file saves nothing: pages hold other tensors too


class WeightSource:
    """The tensors of one checkpoint under their released names; take each once, then `finish`.

    checkpoint: a folder or file, which is mapped; or tensors in memory, in the published layout, of which nothing is
        copied that needs no conversion. All are compared with `config`, and no weight is read yet.
    weights: "dense" keeps dequantised bf16 weights, "packed" the stored bytes (on CPU as views of the file), "auto"
        dense if that takes at most half of the memory now available. Values are equal either way.
    Raises: CheckpointError naming file and tensor, see `open_shards` and `Shard`; and for tensors that are missing,
        unknown, given twice under an older and the released name, or of another dtype or shape.
    """

    def __init__(
        self,
        checkpoint: str | Path | dict[str, torch.Tensor],
        config: ModelConfig,
        device: str | torch.device = "cpu",
        weights: WeightsChoice = "auto",
        progress: Progress | None = None,
    ) -> None:
        self._expected = expected_tensors(config)
        if isinstance(checkpoint, dict):
            self._found = match_tensors(self._expected, [MemoryShard(checkpoint)])
        else:
            self._found = match_tensors(self._expected, open_shards(Path(checkpoint)))
        self._left = set(self._expected)
        self._device = torch.device(device)
        self._progress = progress
        self._bytes_taken = 0
        self._bytes_total = sum(spec.num_bytes for name, spec in self._expected.items() if not _is_table(name))
        if weights not in ("auto", "dense", "packed"):
            raise CheckpointError(f"weights: expected auto, dense or packed, got {weights!r}")
        fits = dense_bytes(config) <= available_bytes(self._device) // 2
        self.is_dense = weights == "dense" or (weights == "auto" and fits)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Takes an unquantised tensor under its full name, in its stored type or in `dtype`, on the source's device.

        Raises: CheckpointError for NaN and infinity.
        """
        result = self._keep(name, dtype)
        self._mark(name)
        return result

    def linear(self, name: str) -> Weight:
        """Takes a projection: `name`.weight and, if it is quantised, `name`.scale.

        Raises: CheckpointError for NaN and infinity among weights or scales.
        """
        kind = self._spec(f"{name}.weight").dtype
        if kind == "BF16":
            return Weight.from_bf16(self.tensor(f"{name}.weight"))
        names = (f"{name}.weight", f"{name}.scale")
        if self.is_dense:  # straight from the mapped bytes, without a copy of them
            codes, scale = (self._finite(part).to(self._device) for part in names)
        else:
            codes, scale = (self._keep(part) for part in names)
        weight = Weight.from_fp8(codes, scale) if kind == "F8_E4M3" else Weight.from_fp4(codes, scale)
        if self.is_dense:
            # Decoding leaves holes of several times the result in the heap; a copy made after it settles into them.
            weight = Weight.from_bf16(weight.dense_NK().clone())
            for part in names:
                self._release(part)
        self._mark(*names)
        return weight

    def table(self, name: str) -> EngramTable:
        """Takes an Engram table. It stays where it is, mapped from the file or in memory; only its scales are read.

        Raises: CheckpointError for a NaN scale. NaN values show when their row is looked up.
        """
        names = (f"{name}.weight", f"{name}.scale")
        scale_bytes = self._finite(names[1]).view(torch.uint8)
        for part in names:
            shard, key = self._found[part]
            shard.expect_random_access(key)
        self._mark(*names)
        shard, key = self._found[names[0]]
        return EngramTable(shard.view(key).view(torch.uint8), scale_bytes)

    def finish(self) -> None:
        """Raises: CheckpointError listing the tensors that nobody has taken."""
        if self._left:
            raise CheckpointError(f"checkpoint: {_listed(self._left)}: read from the file but used by no module")

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._expected:
            raise CheckpointError(f"checkpoint: {name}: not a tensor of this configuration")
        return self._expected[name]

    def _keep(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor on the source's device: a view of the file where it may stay one, else memory of its own."""
        view = self._finite(name)
        is_mapped = self._found[name][0].is_mapped
        may_stay = not self.is_dense and view.nbytes >= _COPIED_BYTES
        kept = view.to(self._device, dtype or view.dtype, copy=is_mapped and not may_stay)
        if kept is not view:
            self._release(name)
        return kept

    def _finite(self, name: str) -> torch.Tensor:
        """The stored tensor after a look at all of it, a part at a time; CheckpointError for NaN and infinity."""
        self._spec(name)
        shard, key = self._found[name]
        view = shard.view(key)
        if view.dtype in _NOT_FINITE:
            bits, mask = _NOT_FINITE[view.dtype]
            for part in torch.split(view.view(bits).reshape(-1), _SCAN_BYTES // bits.itemsize):
                if ((part & mask) == mask).any():
                    raise CheckpointError(f"{shard.label}: {name}: holds NaN or infinity; download the file again")
                if view.nbytes >= _COPIED_BYTES:
                    shard.release(key)
        return view

    def _release(self, name: str) -> None:
        shard, key = self._found[name]
        shard.release(key)

    def _mark(self, *names: str) -> None:
        for name in names:
            if name not in self._left:
                raise CheckpointError(f"checkpoint: {name}: taken twice")
            self._left.remove(name)
            if not _is_table(name):
                self._bytes_taken += self._expected[name].num_bytes
        if self._progress is not None:
            self._progress(self._bytes_taken, self._bytes_total)


def dense_bytes(config: ModelConfig) -> int:
    """Memory of all weights with quantised ones as bf16; Engram tables, which stay mapped, excluded."""
    total = 0
    for name, spec in expected_tensors(config).items():
        if _is_table(name) or spec.dtype == "F8_E8M0":
            continue
        total += spec.num_elements * {"I8": 4, "F8_E4M3": 2, "BF16": 2, "F32": 4}[spec.dtype]
    return total


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated now: free device memory, or the host's within the limit of a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _is_table(name: str) -> bool:
    return ".engram.embed." in name


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def match_tensors(expected: dict[str, TensorSpec], shards: Iterable[AnyShard]) -> dict[str, tuple[AnyShard, str]]:
    """Where each expected tensor is: its shard and its name there."""
    found: dict[str, tuple[AnyShard, str]] = {}
    for shard in shards:
        for key, spec in shard.specs.items():
            name = released_name(key)
            if name is None:
                continue
            where = f"{shard.label}: {key}"
            if name in found:
                raise CheckpointError(f"{where}: {name} is also in {found[name][0].label}; a tensor may be there once")
            if name not in expected:
                raise CheckpointError(f"{where}: unknown tensor; the configuration has none of this name")
            if spec != expected[name]:
                want = expected[name]
                raise CheckpointError(
                    f"{where}: expected {want.dtype} {list(want.shape)}, got {spec.dtype} {list(spec.shape)}; "
                    f"configuration and weights belong to different models"
                )
            found[name] = (shard, key)
    if missing := expected.keys() - found.keys():
        labels = _listed({shard.label for shard, _ in found.values()}) or "checkpoint"
        raise CheckpointError(f"{labels}: {_listed(missing)}: missing; the configuration promises them")
    return found
