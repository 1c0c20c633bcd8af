"""A prefix cache's tree as one file.

The file is a safetensors file, so that it can be looked at with common tools:

    ids          int64 [N, 128]    token ids of each node; parents come before their children
    parent       int64 [N]         row of the parent, -1 = none
    stamp        int64 [N]         time of last use
    pages        uint8 [N, bytes]  the node's rows of all planes of global pages
    at           int64 [S]         node of each snapshot
    window_from  int64 [S, layers] first stored position of each layer
    used         int64 [S]         time of last use
    windows      uint8 [S, bytes]  rows of all planes of window pages

Its metadata name the version, the model and the prefill mode, and the SHA-256 of the whole file with the 64 digits of
the sum itself set to 0. Rows are written one after the other, so saving needs no memory for all of them together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leadline.cache.pages import PAGE_TOKENS
from leadline.errors import CheckpointError

if TYPE_CHECKING:
    from leadline.cache.prefix import Node, PrefixCache, Snapshot

VERSION = "1"
NO_SUM = "0" * 64
BLOCK_BYTES = 1 << 20
DTYPES = {"I64": torch.int64, "U8": torch.uint8}


def save(tree: PrefixCache, path: Path, fingerprint: str) -> None:
    """Writes every snapshot and the nodes above it. The file appears under its name only when it is complete.

    Raises: CheckpointError if the file cannot be written.
    """
    snapshots = [node.snapshot for node in tree.root.walk() if node.snapshot is not None]
    useful = {node for snapshot in snapshots for node in snapshot.node.path()}
    nodes = [node for node in tree.root.walk() if node in useful]
    row = {node: i for i, node in enumerate(nodes)}
    shapes = _shapes(tree, len(nodes), len(snapshots))

    def column(values: Iterable[Any]) -> Iterable[bytes]:
        return (np.asarray(value, dtype=np.int64).tobytes() for value in values)

    contents: dict[str, Iterable[bytes]] = {
        "ids": (node.key for node in nodes),
        "parent": column(row.get(node.parent, -1) for node in nodes if node.parent is not None),
        "stamp": column(node.stamp for node in nodes),
        "at": column(row[snapshot.node] for snapshot in snapshots),
        "window_from": column(snapshot.window_from for snapshot in snapshots),
        "used": column(snapshot.stamp for snapshot in snapshots),
        "pages": (_bytes_of(node, tree.pages.bytes.read) for node in nodes),
        "windows": (_bytes_of(snapshot, tree.windows.bytes.read) for snapshot in snapshots),
    }
    header: dict[str, Any] = {"__metadata__": {**_metadata(tree, fingerprint), "sha256": NO_SUM}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + int(np.prod(shape)) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.parent / f"{path.name}.{os.getpid()}.part"
    try:
        with temporary.open("wb") as file:
            digest = hashlib.sha256()
            for part in (len(text).to_bytes(8, "little"), text):
                digest.update(part)
                file.write(part)
            for name in shapes:
                for part in contents[name]:
                    digest.update(part)
                    file.write(part)
            file.seek(8 + text.index(NO_SUM.encode()))
            file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        reason = (
            f"cannot be written there ({error.strerror or error}); name a file in a folder that exists and has room"
        )
        raise CheckpointError(f"{path}: the prefix cache {reason}") from error
    finally:
        with suppress(OSError):  # it took its place, or was never there
            temporary.unlink()


def load(tree: PrefixCache, path: Path, fingerprint: str) -> None:
    """Adds what the file holds to the tree, as far as there is room. The file is checked as a whole before."""
    try:
        with path.open("rb") as file:
            _check_sum(path, file)
        with safe_open(path, "pt") as tensors:
            metadata = tensors.metadata() or {}
            for name, expected in _metadata(tree, fingerprint).items():
                if metadata.get(name) != expected:
                    raise CheckpointError(
                        f"{path}: a saved prefix cache with {name} {metadata.get(name)!r}, expected {expected!r}; "
                        "delete the file or start with what it was saved with"
                    )
            small = {name: tensors.get_tensor(name) for name in tensors.keys() if name not in ("pages", "windows")}  # noqa: SIM118
            pages, windows = tensors.get_slice("pages"), tensors.get_slice("windows")
            found = {name: list(tensor.shape) for name, tensor in small.items()}
            found |= {"pages": pages.get_shape(), "windows": windows.get_shape()}
            shapes = {name: shape for name, (_, shape) in _shapes(tree, found["stamp"][0], found["used"][0]).items()}
            if found != shapes:
                raise CheckpointError(f"{path}: a saved prefix cache of shapes {found}, expected {shapes}")
            nodes = _load_nodes(tree, small, pages)
            for i, at in enumerate(small["at"].tolist()):
                node = nodes[at]
                if node is not None:
                    window_from = tuple(small["window_from"][i].tolist())
                    tree.restore_snapshot(node, window_from, int(small["used"][i]), partial(_row, windows, i))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); name a file that `save_prefixes` wrote") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a saved prefix cache that can be read ({error}); delete it") from error


def _load_nodes(tree: PrefixCache, small: dict[str, Tensor], pages: Any) -> list[Node | None]:
    nodes: list[Node | None] = []  # None: no room
    parents, stamps = small["parent"].tolist(), small["stamp"].tolist()
    for i, ids in enumerate(small["ids"]):
        parent = tree.root if parents[i] < 0 else nodes[parents[i]]
        key = ids.numpy().tobytes()
        nodes.append(None if parent is None else tree.restore_node(parent, key, stamps[i], partial(_row, pages, i)))
    return nodes


def _shapes(tree: PrefixCache, num_nodes: int, num_snapshots: int) -> dict[str, tuple[str, list[int]]]:
    return {
        "ids": ("I64", [num_nodes, PAGE_TOKENS]),
        "parent": ("I64", [num_nodes]),
        "stamp": ("I64", [num_nodes]),
        "at": ("I64", [num_snapshots]),
        "window_from": ("I64", [num_snapshots, tree.num_layers]),
        "used": ("I64", [num_snapshots]),
        "pages": ("U8", [num_nodes, tree.pages.bytes.num_bytes]),
        "windows": ("U8", [num_snapshots, tree.windows.bytes.num_bytes]),
    }


def _metadata(tree: PrefixCache, fingerprint: str) -> dict[str, str]:
    return {"version": VERSION, "model": fingerprint, "prefill": tree.mode}


def _bytes_of(item: Node | Snapshot, read: Callable[..., Tensor]) -> bytes:
    data = item.data if item.data is not None else read(item.page, wait=True)
    return data.numpy().tobytes()


def _check_sum(path: Path, file: BinaryIO) -> None:
    start = file.read(8)
    text = file.read(min(int.from_bytes(start, "little"), BLOCK_BYTES))
    mark = b'"sha256": "'
    at = text.find(mark) + len(mark)
    stated = text[at : at + len(NO_SUM)]
    digest = hashlib.sha256(start + text[:at] + NO_SUM.encode() + text[at + len(NO_SUM) :])
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    if digest.hexdigest().encode() != stated:
        raise CheckpointError(f"{path}: not a saved prefix cache, or damaged: its check sum does not fit; delete it")


def _row(rows: Any, i: int) -> Tensor:
    row: Tensor = rows[i]
    return row
