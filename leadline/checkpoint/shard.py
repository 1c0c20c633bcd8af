"""One safetensors file, mapped into memory and read tensor by tensor.

The format is a little-endian uint64 (length of the header), the header (JSON: name -> dtype, shape, data_offsets) and
the data. The mapping is shared and read-only: a view costs no memory of ours, a 100 GB table can be mapped on a machine
with little memory, and pages already used can be handed back (`release`). The safetensors library maps private and
writable and hands nothing back, hence the few lines here; it is used for writing.
"""

from __future__ import annotations

import mmap
import struct
import warnings
from pathlib import Path
from typing import Any

import torch

from leadline.checkpoint.schema import DTYPES, TensorSpec
from leadline.config.checks import parse_json
from leadline.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_MAX_RANK = 8  # of a tensor; with the file's size as the limit of each length, every product stays printable


class Shard:
    """A mapped file. `specs` lists its tensors; `label` is what error messages call it.

    The file may be removed or replaced by another while it is mapped, but not be cut short: the system ends a process
    that reads beyond the end.
    """

    is_mapped = True

    def __init__(self, path: Path) -> None:
        """Maps `path` and checks its header: types known, sizes right, no gaps, no overlaps, nothing after the data.

        Raises: CheckpointError naming the file and, where one is at fault, the tensor.
        """
        self.label = str(path)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be mapped ({error}); download the file again") from error
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.specs: dict[str, TensorSpec] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._read_header()

    def view(self, name: str) -> torch.Tensor:
        """The stored tensor, read-only and without a copy. Reading it brings its pages in; writing to it crashes."""
        start, stop = self._spans[name]
        dtype = DTYPES[self.specs[name].dtype]
        data = self._bytes[start:stop]
        if start % dtype.itemsize:  # a file whose header was not padded
            data = data.clone()
        return data.view(dtype).view(self.specs[name].shape)

    def release(self, name: str) -> None:
        """Hands the tensor's pages back to the system. Views stay valid: they are read from the file again."""
        self._advise(name, "MADV_DONTNEED")

    def expect_random_access(self, name: str) -> None:
        """Tells the system not to read ahead in this tensor."""
        self._advise(name, "MADV_RANDOM")

    def _advise(self, name: str, advice: str) -> None:
        option = getattr(mmap, advice, None)  # hints: a system without them only keeps more pages for longer
        start, stop = self._spans[name]
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        if option is not None and stop > page:
            self._map.madvise(option, page, stop - page)

    def _read_header(self) -> None:
        size = len(self._map)
        header_bytes = struct.unpack("<Q", self._map[:8])[0] if size >= 8 else _MAX_HEADER_BYTES + 1
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.label}: expected a safetensors file, got no valid header length")
        if size < 8 + header_bytes:
            raise CheckpointError(f"{self.label}: truncated: header of {header_bytes} B, file of {size} B")
        try:
            header = parse_json(self._map[8 : 8 + header_bytes])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.label}: expected a JSON header, got {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.label}: expected a JSON object as header, got {type(header).__name__}")
        header.pop("__metadata__", None)
        data_start = 8 + header_bytes
        for name, entry in header.items():
            self._read_entry(name, entry, data_start, size)
        end, previous = data_start, "the header"
        for name, (start, stop) in sorted(self._spans.items(), key=lambda item: item[1]):
            if start != end:
                raise CheckpointError(f"{self.label}: {name}: expected to start where {previous} ends, at byte {end}")
            end, previous = stop, name
        if end != size:
            raise CheckpointError(f"{self.label}: expected {end} B, got {size} B; download the file again")

    def _read_entry(self, name: str, entry: Any, data_start: int, size: int) -> None:
        where = f"{self.label}: {name}"
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, got {str(entry)[:120]}")
        if dtype not in DTYPES:
            raise CheckpointError(f"{where}: expected a dtype of {sorted(DTYPES)}, got {dtype}")
        if len(shape) > _MAX_RANK or not all(type(length) is int and 0 <= length <= size for length in shape):
            raise CheckpointError(
                f"{where}: expected a shape of at most {_MAX_RANK} integers from 0 to the file's {size} B, "
                f"got {str(shape)[:120]}"
            )
        spec = TensorSpec(dtype, tuple(shape))
        if start < 0 or stop - start != spec.num_bytes:
            span = str([start, stop])[:120]
            raise CheckpointError(f"{where}: expected {spec.num_bytes} B for {dtype} {shape}, got data_offsets {span}")
        if data_start + stop > size:
            raise CheckpointError(f"{where}: truncated: the file ends before the tensor does; download it again")
        self.specs[name] = spec
        self._spans[name] = (data_start + start, data_start + stop)


class MemoryShard:
    """Tensors already in memory, behind the interface of `Shard`."""

    is_mapped = False
    label = "tensors in memory"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        names = {dtype: name for name, dtype in DTYPES.items()}
        self._tensors = tensors
        self.specs: dict[str, TensorSpec] = {}
        for name, tensor in tensors.items():
            if tensor.dtype not in names:
                raise CheckpointError(f"{self.label}: {name}: expected a dtype of {sorted(DTYPES)}, got {tensor.dtype}")
            self.specs[name] = TensorSpec(names[tensor.dtype], tuple(tensor.shape))

    def view(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def release(self, name: str) -> None:
        """Nothing to hand back: the caller owns the tensors."""

    def expect_random_access(self, name: str) -> None:
        """Nothing to advise."""


AnyShard = Shard | MemoryShard


def open_shards(path: Path) -> list[Shard]:
    """Maps the files of a checkpoint: one file, or a folder with an index or with a single `model.safetensors`.

    Raises: CheckpointError naming file and tensor: no checkpoint, shards without an index, an unreadable index, a
    missing shard, a tensor in another shard than the index says or in the index only; and for what the system refuses
    to read.
    """
    try:
        return _open_shards(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror}); check it") from error


def _open_shards(path: Path) -> list[Shard]:
    if path.is_file():
        return [Shard(path)]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        if (path / "model.safetensors").is_file():
            return [Shard(path / "model.safetensors")]
        if others := list(path.glob("*.safetensors")):
            raise CheckpointError(f"{index}: missing, with {len(others)} safetensors files beside it; download it")
        raise CheckpointError(f"{path}: no model.safetensors and no index of shards; give a checkpoint folder")
    shard_of = _read_index(index)
    shards = []
    seen: set[str] = set()
    for file_name in sorted(set(shard_of.values())):
        if not (path / file_name).is_file():
            raise CheckpointError(f"{path / file_name}: missing shard, named by {index.name}; download it")
        shard = Shard(path / file_name)
        for name in shard.specs:
            if shard_of.get(name) != file_name:
                raise CheckpointError(f"{shard.label}: {name}: {index.name} says {shard_of.get(name, 'nothing of it')}")
        seen.update(shard.specs)
        shards.append(shard)
    for name, file_name in shard_of.items():
        if name not in seen:
            raise CheckpointError(f"{path / file_name}: {name}: named by {index.name}, but not in the shard")
    return shards


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = parse_json(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected JSON, got {error}") from error
    shard_of = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{index}: expected an object weight_map of tensor names, got {str(shard_of)[:120]}")
    for name, file_name in shard_of.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index}: {name}: expected the name of a file beside the index, got {file_name!r}")
    return shard_of
