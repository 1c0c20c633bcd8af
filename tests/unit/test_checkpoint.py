"""Checkpoints: what they hold, reading them exactly, and every way they can be broken."""

import itertools
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from leadline.checkpoint import random_model, source
from leadline.checkpoint.save import save_checkpoint
from leadline.checkpoint.schema import DTYPES, TensorSpec, expected_tensors, released_name
from leadline.checkpoint.shard import Shard
from leadline.checkpoint.source import WeightSource, available_bytes, dense_bytes
from leadline.config.engram import primes_from
from leadline.config.model import ModelConfig, read_config
from leadline.errors import CheckpointError
from leadline.formats.fp8 import dequantize_e4m3_e8m0
from leadline.ops.engram import build_hash_tables
from leadline.text.token_map import token_map
from leadline.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = sorted(path.parent for path in (GOLDEN / "models").glob("*/config.json"))
EVERYTHING = GOLDEN / "models" / "everything"


def take_all(weights: WeightSource, config) -> dict[str, torch.Tensor]:
    """Takes every tensor as a model does; values by name, projections and table rows as bf16."""
    result = {}
    for name, spec in expected_tensors(config).items():
        base = name.removesuffix(".weight")
        if name.endswith(".scale"):
            continue
        if name.endswith("engram.embed.weight"):
            rows = torch.arange(spec.shape[0])[:, None]
            result[base] = weights.table(base).fetch(rows)
        elif spec.dtype in ("I8", "F8_E4M3"):
            result[base] = weights.linear(base).dense_NK()
        else:
            result[name] = weights.tensor(name)
    weights.finish()
    return result


def by_hand(tensors: dict[str, torch.Tensor], base: str) -> torch.Tensor:
    """Dequantises one projection of the file in float64, element by element."""
    codes, scale = tensors[f"{base}.weight"], tensors[f"{base}.scale"].view(torch.uint8)
    if codes.dtype == torch.int8:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        table = torch.cat([magnitudes, -magnitudes])
        pairs = codes.view(torch.uint8).int()
        values = torch.stack([table[pairs & 15], table[pairs >> 4]], dim=-1).flatten(1)
        rows = 1
    else:
        values = codes.to(torch.float64)
        rows = 1 if base.endswith("engram.embed") else 32
    powers = torch.exp2(scale.to(torch.float64) - 127).repeat_interleave(rows, 0).repeat_interleave(32, 1)
    return values * powers[: values.shape[0], : values.shape[1]]


# What a checkpoint holds.


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_schema_is_what_the_tiny_models_hold(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {
            name: TensorSpec(file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
            for name in file.keys()  # noqa: SIM118 (not a dict)
        }
    assert stored == expected_tensors(read_config(folder))


def test_schema_counts_of_the_released_model():
    """Totals and counts per layer of architecture.md sections 2.1 and 2.2."""
    expected = expected_tensors(read_config(GOLDEN / "released_config.json"))
    assert len(expected) == 96085
    elements = Counter()
    for spec in expected.values():
        elements[spec.dtype] += spec.num_elements
    assert elements == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "F8_E4M3": 204_015_223_296,
        "I8": 557_171_343_360 // 2,
        "F8_E8M0": 23_563_015_184,
    }
    assert sum(spec.num_bytes for spec in expected.values()) == 510_286_023_000

    def count(prefix: str) -> int:
        return sum(name.startswith(prefix) for name in expected)

    per_layer = {0: 2334, 1: 2340, 2: 2342, 3: 2334, 14: 2348, 20: 2341, 24: 2337, 39: 2334}
    assert {layer: count(f"layers.{layer}.") for layer in per_layer} == per_layer
    assert [count(f"mtp.{stage}.") for stage in range(3)] == [801, 798, 802]
    assert count("vision.") + count("aligner.") == 263
    assert expected["layers.14.engram.embed.scale"] == TensorSpec("F8_E8M0", (384016682, 8))
    assert expected["mtp.2.confidence_head.proj.weight"] == TensorSpec("BF16", (1, 5376))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.embed.weight", "embed.weight"),
        ("model.layers.3.self_attn.wkv.weight_scale_inv", "layers.3.attn.wkv.scale"),
        ("layers.0.mlp.gate.e_score_correction_bias", "layers.0.ffn.gate.bias"),
        ("layers.0.mlp.experts.1.w2.weight", "layers.0.ffn.experts.1.w2.weight"),
        ("model.vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
        ("mtp.0.embed.weight", None),
        ("model.mtp.2.head.weight", None),
        ("mtp.2.markov_head.embed.weight", "mtp.2.markov_head.embed.weight"),
        ("mtp.2.markov_head.head.weight", "mtp.2.markov_head.head.weight"),
    ],
)
def test_older_names(old, new):
    assert released_name(old) == new


def test_released_names_are_kept():
    names = expected_tensors(read_config(GOLDEN / "released_config.json"))
    assert all(released_name(name) == name for name in names)


# Reading.


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_values_are_exact(folder, weights):
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    loaded = take_all(WeightSource(folder, config, weights=weights), config)
    for name, value in loaded.items():
        if name in stored:
            assert value.dtype == stored[name].dtype
            assert torch.equal(value, stored[name]), name
        else:
            assert torch.equal(value.double(), by_hand(stored, name)), name


def test_memory_and_file_give_the_same():
    config = read_config(EVERYTHING)
    tensors = load_file(EVERYTHING / "model.safetensors")
    from_file = take_all(WeightSource(EVERYTHING, config), config)
    from_memory = take_all(WeightSource(tensors, config, weights="dense"), config)
    assert from_file.keys() == from_memory.keys()
    assert all(torch.equal(value, from_memory[name]) for name, value in from_file.items())


def test_single_file_and_older_names_are_read(tmp_path):
    config = read_config(EVERYTHING)
    tensors = load_file(EVERYTHING / "model.safetensors")
    old = {
        "model." + name.replace(".attn.", ".self_attn.") if name.startswith("layers.") else name: value
        for name, value in tensors.items()
    }
    old["mtp.0.embed.weight"] = tensors["embed.weight"].clone()
    save_file(old, tmp_path / "old.safetensors")
    loaded = take_all(WeightSource(tmp_path / "old.safetensors", config), config)
    assert torch.equal(loaded["layers.0.attn.attn_sink"], tensors["layers.0.attn.attn_sink"])


def test_unpadded_header_is_read(tmp_path):
    """The format asks for no alignment; only the common writers pad."""
    config = read_config(EVERYTHING)
    data = (EVERYTHING / "model.safetensors").read_bytes()
    header_bytes = struct.unpack("<Q", data[:8])[0]
    for pad in range(1, 4):
        header = data[8 : 8 + header_bytes].rstrip() + b" " * pad
        (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + header_bytes :])
        loaded = take_all(WeightSource(tmp_path / "m.safetensors", config), config)
        assert torch.equal(loaded["embed.weight"], load_file(EVERYTHING / "model.safetensors")["embed.weight"])


def test_widening_and_progress():
    config = read_config(EVERYTHING)
    calls = []
    weights = WeightSource(EVERYTHING, config, progress=lambda done, total: calls.append((done, total)))
    gate = weights.tensor("layers.0.ffn.gate.weight", torch.float32)
    assert gate.dtype == torch.float32
    assert calls[-1][0] == gate.numel() * 2
    for layer in config.engram_layer_ids:
        weights.table(f"layers.{layer}.engram.embed")
    assert calls[-1][0] == gate.numel() * 2
    expected = expected_tensors(config)
    assert calls[-1][1] == sum(spec.num_bytes for name, spec in expected.items() if ".engram.embed." not in name)


def test_every_tensor_is_taken_exactly_once():
    config = read_config(EVERYTHING)
    weights = WeightSource(EVERYTHING, config)
    weights.tensor("norm.weight")
    with pytest.raises(CheckpointError, match=r"norm\.weight: taken twice"):
        weights.tensor("norm.weight")
    with pytest.raises(CheckpointError, match=r"layers\.9\.attn\.wkv\.weight: not a tensor"):
        weights.linear("layers.9.attn.wkv")
    with pytest.raises(CheckpointError, match=r"aligner\.w1\.bias.* and \d+ more: .*used by no module"):
        weights.finish()


def test_choice_of_weights(monkeypatch):
    config = read_config(EVERYTHING)
    loaded = take_all(WeightSource(EVERYTHING, config), config)
    tables = [f"layers.{layer}.engram.embed" for layer in config.engram_layer_ids]
    assert dense_bytes(config) == sum(value.nbytes for name, value in loaded.items() if name not in tables)
    for free, dense in ((2 * dense_bytes(config), True), (2 * dense_bytes(config) - 2, False)):
        monkeypatch.setattr(source, "available_bytes", lambda device, free=free: free)
        assert WeightSource(EVERYTHING, config).is_dense is dense
        assert WeightSource(EVERYTHING, config, weights="dense").is_dense
        assert not WeightSource(EVERYTHING, config, weights="packed").is_dense
    with pytest.raises(CheckpointError, match="weights: expected auto, dense or packed, got 'fp8'"):
        WeightSource(EVERYTHING, config, weights="fp8")
    monkeypatch.undo()
    assert available_bytes(torch.device("cpu")) > 1 << 20


def test_table_rows():
    config = read_config(EVERYTHING)
    stored = load_file(EVERYTHING / "model.safetensors")
    table = WeightSource(EVERYTHING, config).table("layers.1.engram.embed")
    rows_TA = torch.tensor([[0, 433, 7], [7, 7, 1]])
    codes = stored["layers.1.engram.embed.weight"].view(torch.uint8)
    scales = stored["layers.1.engram.embed.scale"].view(torch.uint8)
    expected = dequantize_e4m3_e8m0(codes[rows_TA], scales[rows_TA]).flatten(1)
    fetched = table.fetch(rows_TA)
    assert fetched.dtype == torch.bfloat16
    assert fetched.shape == (2, 3 * 32)
    assert torch.equal(fetched, expected)
    assert table.fetch(rows_TA[:0]).shape == (0, 3 * 32)


# Broken checkpoints. Each test changes one thing of a good folder.


@pytest.fixture
def sharded(tmp_path):
    """A sharded copy of the tiny model that has everything."""
    save_checkpoint(tmp_path, read_config(EVERYTHING), load_file(EVERYTHING / "model.safetensors"), 400_000)
    shards = [Shard(path).specs.values() for path in tmp_path.glob("model-*-of-*.safetensors")]
    assert len(shards) >= 4
    assert all(sum(spec.num_bytes for spec in specs) <= 400_000 for specs in shards)
    return tmp_path


def shard_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        WeightSource(folder, read_config(EVERYTHING))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_sharded_checkpoint_reads_like_the_single_file(sharded):
    config = read_config(sharded)
    assert config == read_config(EVERYTHING)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(spec.num_bytes for spec in expected_tensors(config).values())
    one = take_all(WeightSource(EVERYTHING, config), config)
    many = take_all(WeightSource(sharded, config), config)
    assert all(torch.equal(value, many[name]) for name, value in one.items())


def test_missing_folder_and_index(sharded, tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no model.safetensors")
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "model.safetensors.index.json: missing")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "expected JSON"),
        ("[]", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": 3}}', "a: expected the name of a file"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "a: expected the name of a file beside the index, got '../b."),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "a given twice"),
        ("\ufeff{}", "expected JSON"),
    ],
)
def test_unreadable_index(sharded, text, word):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "model.safetensors.index.json", word)


def test_missing_shard(sharded):
    shard = shard_with(sharded, "norm.weight")
    shard.unlink()
    refused(sharded, f"{shard}: missing shard")
    shard.mkdir()
    refused(sharded, f"{shard}: missing shard")


def test_shard_that_the_system_refuses(sharded):
    name = "m" * 300
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    refused(sharded, f"{sharded / name}: cannot be read (File name too long)")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_truncated_shard(sharded, kept):
    shard = shard_with(sharded, "norm.weight")
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    refused(sharded, str(shard), *["truncated: header"] * (kept == 100))
    if kept in (0.5, -1):
        refused(sharded, "truncated", "the file ends")


def test_bytes_after_the_data(sharded):
    shard = shard_with(sharded, "norm.weight")
    shard.write_bytes(shard.read_bytes() + b"\0" * 8)
    refused(sharded, str(shard), "download the file again")


def test_tensor_in_two_shards(sharded):
    shard = shard_with(sharded, "norm.weight")
    other = next(path for path in sorted(sharded.glob("*.safetensors")) if path != shard)
    rewrite(other, lambda tensors: tensors.update({"norm.weight": load_file(shard)["norm.weight"]}))
    refused(sharded, "norm.weight")


def test_two_names_for_one_tensor(tmp_path):
    tensors = load_file(EVERYTHING / "model.safetensors")
    tensors["model.norm.weight"] = tensors["norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "norm.weight is also in")


def test_index_and_shards_disagree(sharded):
    index_path = sharded / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = index["weight_map"].pop("norm.weight")
    index_path.write_text(json.dumps(index))
    refused(sharded, shard, "norm.weight", "says nothing of it")
    index["weight_map"] |= {"norm.weight": shard, "ghost.weight": shard}
    index_path.write_text(json.dumps(index))
    refused(sharded, shard, "ghost.weight", "not in the shard")


def test_missing_and_unknown_tensors(tmp_path):
    tensors = load_file(EVERYTHING / "model.safetensors")
    gone = tensors.pop("layers.3.attn.wkv.scale")
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "layers.3.attn.wkv.scale: missing")
    save_file(tensors | {"layers.3.attn.wkv.scales": gone}, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "layers.3.attn.wkv.scales", "unknown tensor")


@pytest.mark.parametrize(
    ("name", "change", "got"),
    [
        ("norm.weight", lambda t: t.float(), "got F32 [64]"),
        ("layers.0.attn.attn_sink", lambda t: t.bfloat16(), "got BF16 [8]"),
        ("layers.0.attn.wkv.weight", lambda t: t.view(torch.int8), "got I8 [64, 64]"),
        ("layers.0.attn.wkv.weight", lambda t: t[:32].clone(), "got F8_E4M3 [32, 64]"),
        ("layers.0.attn.wkv.scale", lambda t: t.view(torch.uint8), "got U8"),
        ("embed.weight", lambda t: t.t().contiguous(), "got BF16 [64, 384]"),
    ],
)
def test_wrong_dtype_or_shape(tmp_path, name, change, got):
    tensors = load_file(EVERYTHING / "model.safetensors")
    save_file(tensors | {name: change(tensors[name])}, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", name, got)


@pytest.mark.parametrize(
    ("name", "bad", "largest"),
    [
        ("layers.0.attn.wkv.scale", b"\xff", b"\xfe"),
        ("layers.3.ffn.experts.2.w2.scale", b"\xff", b"\xfe"),
        ("layers.1.engram.embed.scale", b"\xff", b"\xfe"),
        ("mtp.0.main_proj.weight", b"\x7f", b"\x7e"),
        ("layers.2.attn.indexer.wq_b.weight", b"\xff", b"\xfe"),
        ("layers.0.ffn.gate.bias", b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f"),
        ("layers.0.attn.attn_sink", b"\x00\x00\x80\xff", b"\xff\xff\x7f\xff"),
        ("norm.weight", b"\x81\x7f", b"\x7f\x7f"),
        ("layers.2.attn.indexer.weights_proj.weight", b"\x80\xff", b"\x7f\xff"),
    ],
)
@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_nan_and_infinity(tmp_path, monkeypatch, name, bad, largest, weights):
    monkeypatch.setattr(source, "_SCAN_BYTES", 128)  # the bad value lies beyond the first part of the scan
    config = read_config(EVERYTHING)
    tensors = load_file(EVERYTHING / "model.safetensors")

    def opened(last_value: bytes) -> WeightSource:
        tensors[name].view(torch.uint8).view(-1)[-len(bad) :] = torch.tensor(list(last_value), dtype=torch.uint8)
        save_file(tensors, tmp_path / "model.safetensors")
        return WeightSource(tmp_path, config, weights=weights)

    take_all(opened(largest), config)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {name}: holds NaN or infinity"):
        take_all(opened(bad), config)


def header_file(tmp_path: Path, header: bytes, data: bytes = b"") -> Path:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}, "expected a dtype"),
        ({"dtype": "I8", "shape": [9], "data_offsets": [0, 8]}, "expected 9 B"),
        ({"dtype": "I8", "shape": [-8], "data_offsets": [0, -8]}, "integers from 0"),
        ({"dtype": "I8", "shape": ["8"], "data_offsets": [0, 8]}, "integers from 0"),
        ({"dtype": "I8", "shape": [10**3000] * 2, "data_offsets": [0, 8]}, "integers from 0"),
        ({"dtype": "I8", "shape": [8] * 20_000, "data_offsets": [0, 8]}, "integers from 0"),
        ({"dtype": "I8", "shape": [8], "data_offsets": [10**4299, 10**4299 + 8]}, "truncated"),
        ({"dtype": "I8", "shape": [8]}, "data_offsets"),
        ({"dtype": "I8", "shape": [8], "data_offsets": [8, 16]}, "truncated"),
        ({"dtype": "I8", "shape": [8], "data_offsets": [-8, 0]}, "got data_offsets [-8, 0]"),
        ({"dtype": "I8", "shape": [4], "data_offsets": [4, 8]}, "expected to start where the header ends"),
        ({"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}, "download the file again"),
        ([], "data_offsets"),
    ],
)
def test_bad_header_entry(tmp_path, entry, word):
    path = header_file(tmp_path, json.dumps({"t": entry}).encode(), b"\0" * 8)
    with pytest.raises(CheckpointError) as caught:
        Shard(path)
    message = str(caught.value).replace(str(header_file(tmp_path, b"")), "F")
    assert word in message
    assert "F: " in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "header",
    [b"garbage", b"\xff\xfe", "{}".encode("utf-16"), b"[]", b"[" * 50_000, b'{"a":', b'{"a": {}, "a": {}}'],
    ids=["text", "utf", "utf-16", "list", "deep", "cut", "twice"],
)
def test_garbage_header(tmp_path, header):
    path = header_file(tmp_path, header)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: expected a JSON"):
        Shard(path)


def test_overlapping_tensors(tmp_path):
    entry = {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}
    path = header_file(tmp_path, json.dumps({"a": entry, "b": entry}).encode(), b"\0" * 8)
    with pytest.raises(CheckpointError, match="b: expected to start where a ends"):
        Shard(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_header_is_read_or_refused(data):
    """Bytes of the header replaced, inserted or cut out, the file cut short: a shard or one typed error."""
    file = bytearray((GOLDEN / "models" / "swa" / "model.safetensors").read_bytes())
    header_bytes = struct.unpack("<Q", file[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, header_bytes + 8))
        stop = start + data.draw(st.integers(0, 20))
        file[start:stop] = data.draw(
            st.binary(max_size=20) | st.sampled_from([b"9" * 4000, b"null", b"-1", b"[" * 2000])
        )
    if data.draw(st.booleans()):
        file[:8] = struct.pack("<Q", header_bytes + data.draw(st.integers(-40, 40)))
    if data.draw(st.booleans()):
        del file[data.draw(st.integers(0, len(file))) :]
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as changed:
        changed.write(file)
        changed.flush()
        try:
            message = Shard(Path(changed.name)).label
        except CheckpointError as error:
            message = str(error)
    assert changed.name in message


def test_not_a_safetensors_file(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"PK\x03\x04" + b"\xff" * 100)
    with pytest.raises(CheckpointError, match="no valid header length"):
        WeightSource(path, read_config(EVERYTHING))


# Writing.


def test_saving_refuses_what_reading_would(tmp_path):
    config = read_config(EVERYTHING)
    tensors = load_file(EVERYTHING / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight: missing"):
        save_checkpoint(tmp_path, config, {name: value for name, value in tensors.items() if name != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"norm\.weight: expected a dtype"):
        save_checkpoint(tmp_path, config, tensors | {"norm.weight": tensors["norm.weight"].double()})
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path, config, tensors)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        save_checkpoint(tmp_path, config, tensors)


@pytest.mark.parametrize("max_shard_bytes", [400_000, 5_000_000], ids=["shards", "file"])
def test_files_may_be_read_by_whom_the_umask_says(tmp_path, max_shard_bytes):
    before = os.umask(0o027)
    try:
        config = read_config(EVERYTHING)
        save_checkpoint(tmp_path, config, load_file(EVERYTHING / "model.safetensors"), max_shard_bytes)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


@pytest.mark.parametrize("max_shard_bytes", [400_000, 5_000_000], ids=["shards", "file"])
def test_a_full_disk_leaves_nothing_that_loads(tmp_path, max_shard_bytes):
    config = read_config(EVERYTHING)
    tensors = load_file(EVERYTHING / "model.safetensors")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (370_000, limit[1]))  # enough for some of the shards
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*File too large"):
            save_checkpoint(tmp_path, config, tensors, max_shard_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    refused(tmp_path, str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file: cannot be written"):
        save_checkpoint(tmp_path / "file", config, tensors)


# Random models.


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_random_tensors_fit_and_repeat(folder):
    config = read_config(folder)
    tensors = random_model.random_tensors(config, seed=3)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        name: (DTYPES[spec.dtype], spec.shape) for name, spec in expected_tensors(config).items()
    }
    for name, value in take_all(WeightSource(tensors, config, weights="dense"), config).items():
        assert torch.isfinite(value.float()).all(), name
    again = random_model.random_tensors(config, seed=3)
    other = random_model.random_tensors(config, seed=4)
    assert all(torch.equal(tensors[name].view(torch.uint8), again[name].view(torch.uint8)) for name in tensors)
    assert not torch.equal(tensors["embed.weight"], other["embed.weight"])


def test_random_weights_are_not_plain_noise():
    tensors = random_model.random_tensors(read_config(EVERYTHING))
    scales = tensors["layers.2.ffn.experts.0.w1.scale"].view(torch.uint8)
    assert scales.max() - scales.min() >= 3  # several binades
    weight = tensors["layers.2.attn.wq_b.weight"].float()
    assert weight.abs().max() > 200  # uses the range of E4M3
    assert tensors["layers.2.attn.attn_sink"].abs().min() > 0
    assert tensors["layers.2.ffn.gate.bias"].abs().min() > 0


def test_default_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = random_model.default_model_folder()
    assert folder.parent == tmp_path / "leadline"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert random_model.default_model_folder() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    config = read_config(folder)
    assert config == random_model.default_config()
    tokenizer = Tokenizer.load(folder, config)
    assert tokenizer.has_control_tokens
    assert tokenizer.encode("<｜System｜>") == [config.dspark_noise_token_id]
    assert tokenizer.encode("<｜deepseek_image｜>") == [config.image_token_id]
    text = "Grüße, 世界 👋\n\t<think>x</think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert build_hash_tables(config).keys() == set(config.engram_layer_ids)  # checks the number of rows
    assert token_map(tokenizer, config)[config.engram_pad_token_id] == config.engram_pad_token_id
    take_all(WeightSource(folder, config), config)


def test_default_model_folder_errors(tmp_path, monkeypatch):
    (tmp_path / "leadline").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="set XDG_CACHE_HOME"):
        random_model.default_model_folder()


def test_interrupted_first_use_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(random_model, "_write_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        random_model.default_model_folder()
    assert list((tmp_path / "leadline").iterdir()) == []


def test_what_a_killed_first_use_left_goes_away(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = tmp_path / "leadline" / "unfinished"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half of it")
    folder = random_model.default_model_folder()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_first_uses_at_once_write_one_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    writers = []

    def write(folder, config, **_):
        writers.append(folder)
        folder.mkdir()
        time.sleep(0.2)

    monkeypatch.setattr(random_model, "write_random_checkpoint", write)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: random_model.default_model_folder(), range(3)))
    assert len(writers) == len(set(folders)) == 1
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_a_full_disk_and_no_home_are_errors_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("leadline.checkpoint.save.save_file", full)
        with pytest.raises(
            CheckpointError, match=r"cannot write the default model .*No space left.*set XDG_CACHE_HOME"
        ):
            random_model.default_model_folder()
    assert list((tmp_path / "leadline").iterdir()) == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.os.path.expanduser", lambda path: path)  # as without HOME and a user's entry
    with pytest.raises(CheckpointError, match=r"no place to write it to .*set XDG_CACHE_HOME"):
        random_model.default_model_folder()


def test_vocabulary_without_room_for_the_tokenizer(tmp_path):
    config = read_config(GOLDEN / "models" / "swa")
    random_model.write_random_checkpoint(tmp_path / "a", config)
    assert Tokenizer.load(tmp_path / "a", config).vocab_size == 384
    small = json.loads((GOLDEN / "models" / "swa" / "config.json").read_text())
    small["text_config"]["vocab_size"] = 200
    with pytest.raises(CheckpointError, match="vocab_size above"):
        random_model.write_random_checkpoint(tmp_path / "b", ModelConfig.from_dict(small))


# Memory.

# Loads a checkpoint the way a model does and prints the growth of peak memory and the bytes kept, or the peak alone.
_LOAD = """
import re, sys, torch
from leadline.checkpoint.schema import expected_tensors
from leadline.checkpoint.source import Weight, WeightSource
from leadline.config.engram import primes_from
from leadline.config.model import read_config
folder, weights = sys.argv[1:]
config = read_config(folder)
torch.randn(64, 64) @ torch.randn(64, 64)
def peak():  # ru_maxrss would include the parent process
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
Weight.from_fp4(torch.zeros(64, 32, dtype=torch.int8), torch.ones(64, 2).to(torch.float8_e8m0fnu)).dense_NK()
source = WeightSource(folder, config, weights=weights)
before = peak()
kept = []
for name, spec in expected_tensors(config).items():
    base = name.removesuffix(".weight")
    if name.endswith("engram.embed.weight"):
        kept.append(source.table(base))
        kept[-1].fetch(torch.arange(48)[None])
    elif spec.dtype in ("I8", "F8_E4M3"):
        kept.append(source.linear(base))
    elif spec.dtype != "F8_E8M0":
        kept.append(source.tensor(name))
source.finish()
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from /proc")
def test_peak_memory_of_a_load(tmp_path):
    """Dense: the bf16 weights and a few tensors, although all stored bytes pass by. Tables: not read at all."""
    data = read_config(GOLDEN / "models" / "engram").to_dict()
    data["text_config"] |= {"hidden_size": 1536, "moe_intermediate_size": 2048, "num_hidden_layers": 2}
    data["text_config"] |= {"compress_ratios": [0, 0], "kv_source_layer_ids": [], "index_source_layer_ids": []}
    data["text_config"] |= {"engram_layer_ids": [1], "engram_vocab_size": 333_333, "engram_head_dim": 64}
    data["text_config"]["engram_num_embeddings"] = [sum(itertools.islice(primes_from(333_333), 6))]
    data["text_config"]["n_routed_experts"] = 8
    config = ModelConfig.from_dict(data)
    expected = expected_tensors(config)
    tensors = {name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for name, spec in expected.items()}
    save_checkpoint(tmp_path, config, tensors, max_shard_bytes=40_000_000)
    del tensors
    table = sum(spec.num_bytes for name, spec in expected.items() if "engram.embed" in name)
    stored = sum(spec.num_bytes for spec in expected.values()) - table
    # Decoding passes through int32 indices, bf16 values and their product: eight times the largest tensor with holes
    # of the heap. Around each page that is read the system maps up to 64 KiB.
    few_tensors = 8 * (1536 * 2048 * 2) + len(expected) * 65536

    def growth(weights: str) -> int:
        command = [sys.executable, "-c", _LOAD, str(tmp_path), weights]
        # Without holes of the heap, which come and go from run to run, by as much as the tensors are large.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)

    dense, packed = growth("dense"), growth("packed")
    assert dense >= dense_bytes(config)  # the measure sees what is kept
    assert dense <= dense_bytes(config) + few_tensors
    assert packed <= stored + few_tensors
    assert few_tensors < 0.6 * min(stored, table)  # keeping the stored bytes, or reading the table, would show


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("copied_bytes", [0, 1 << 20], ids=["views", "copies"])
def test_pages_are_handed_back(monkeypatch, weights, copied_bytes):
    """After a copy, and after a look at what stays a view; a table, and FP4 that stays a view, are not looked at."""
    released = set()
    monkeypatch.setattr(Shard, "release", lambda self, name: released.add(name))
    monkeypatch.setattr(source, "_COPIED_BYTES", copied_bytes)
    config = read_config(EVERYTHING)
    take_all(WeightSource(EVERYTHING, config, weights=weights), config)
    is_fp4_kept = weights == "packed" and copied_bytes == 0
    assert expected_tensors(config).keys() - released == {
        name
        for name, spec in expected_tensors(config).items()
        if name.endswith("engram.embed.weight")
        or (name.endswith("engram.embed.scale") and spec.num_bytes < copied_bytes)
        or (spec.dtype == "I8" and is_fp4_kept)
    }


def test_tables_beyond_the_memory_can_be_mapped(tmp_path):
    """A sparse file of 64 GB: opening it and fetching rows must not need that memory."""
    rows, width = 1 << 28, 256
    entry = {"dtype": "F8_E4M3", "shape": [rows, width], "data_offsets": [0, rows * width]}
    path = tmp_path / "big.safetensors"
    header = json.dumps({"layers.1.engram.embed.weight": entry}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    view = Shard(path).view("layers.1.engram.embed.weight").view(torch.uint8)
    assert view.index_select(0, torch.tensor([0, rows - 1, rows // 2])).sum() == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
