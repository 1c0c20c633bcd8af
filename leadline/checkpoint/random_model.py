"""Models with random weights in the published layout: for tests, and the small one that runs without a download.

Weights of plain normal noise hide faults (a swapped scale, a missing sink, a lost outlier changes nothing), so these
have rows of different size over several binades, a few outlier channels, non-zero sinks and biases. The text such a
model writes is noise; its next-token distribution is not flat and depends on the whole context.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from leadline.checkpoint.save import save_checkpoint
from leadline.checkpoint.schema import BLOCK, TensorSpec, expected_tensors
from leadline.config.model import ModelConfig
from leadline.errors import CheckpointError
from leadline.formats.fp4 import quantize_fp4_e8m0
from leadline.formats.fp8 import quantize_e4m3_e8m0
from leadline.text.tokenizer import CONTROL_TOKENS

_FIRST_BYTE_ID = 3  # after begin, end and padding come the 256 bytes, then the control tokens
_NAMED_TOKENS = tuple(token for token in CONTROL_TOKENS if token != "<｜deepseek_image｜>")


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `config` in its stored type. A tensor depends on its name, its shape and `seed` only."""
    expected = expected_tensors(config)
    tensors: dict[str, Tensor] = {}
    for name, spec in expected.items():
        if name.endswith(".scale"):
            continue  # made with its weight
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if spec.dtype in ("BF16", "F32"):
            values = _values(name, spec, config, generator)
            tensors[name] = values.to(torch.bfloat16) if spec.dtype == "BF16" else values
            continue
        rows, columns = spec.shape[0], spec.shape[1] * (2 if spec.dtype == "I8" else 1)
        matrix = _matrix(rows, columns, _GAINS.get(name.split(".")[-2], 1.0), generator)
        scale_name = name.removesuffix("weight") + "scale"
        if spec.dtype == "I8":
            codes, scale = quantize_fp4_e8m0(matrix.to(torch.bfloat16))
            tensors[name] = codes.view(torch.int8)
        else:
            is_table = ".engram.embed." in name
            codes, scale = quantize_e4m3_e8m0(matrix.to(torch.bfloat16)) if is_table else _quantize_tiles(matrix)
            tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[scale_name] = scale.view(torch.float8_e8m0fnu)
    return tensors


# Root mean square of a projection's output for inputs of 1, where 1 will not do: queries need contrast, and the
# feed-forward output has to stand up to the residual streams.
_GAINS = {"wq_b": 2.0, "w2": 2.0, "wo_b": 2.0}


def _matrix(rows: int, columns: int, gain: float, generator: torch.Generator) -> Tensor:
    """fp32 [rows, columns]: rows log-normal over several binades, one input channel in 64 four times as large."""
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= torch.exp2(0.7 * torch.randn(rows, 1, generator=generator))
    matrix *= torch.where(torch.rand(columns, generator=generator) < 1 / 64, 4.0, 1.0)
    return matrix * (gain / math.sqrt(columns) / matrix.square().mean().sqrt())


def _quantize_tiles(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes [N, K] and E8M0 codes [N / 32, K / 32], one scale per 32 x 32 tile, as bytes."""
    rows, columns = matrix.shape
    tiles = matrix.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    exponent = torch.frexp(tiles.abs().amax(dim=(1, 3)) / 448).exponent  # the power of two just above
    codes = (tiles / torch.exp2(exponent[:, None, :, None])).view(rows, columns).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (exponent + 127).to(torch.uint8)


def _values(name: str, spec: TensorSpec, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """fp32 values of an unquantised tensor: the first rule of `_RULES` that knows its name."""

    def normal(mean: float, spread: float) -> Tensor:
        return mean + spread * torch.randn(spec.shape, generator=generator)

    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        streams = config.hc_mult
        base = normal(0.0, 1.2)
        base[2 * streams :].view(streams, streams).diagonal().add_(1.5)  # streams mostly stay themselves
        return base
    for pattern, mean, spread in _RULES:
        if re.search(pattern, name):
            return normal(mean, spread)
    columns = spec.shape[-1]
    logit_spread = {"head.weight": 2.5, "ffn.gate.weight": 2.0}
    gain = next((gain for end, gain in logit_spread.items() if name.endswith(end)), 1.0)
    return _matrix(spec.shape[0], columns, gain, generator)


# Name, mean, spread.
_RULES = (
    (r"embed\.weight$", 0.0, 0.6),
    (r"norm\d?\.weight$", 1.0, 0.15),
    (r"engram\.[qk]_weight$", 1.0, 0.2),
    (r"attn_sink$", 1.0, 1.0),
    (r"_scale$", 1.0, 0.2),
    (r"gate\.bias", 0.0, 0.15),
    (r"bias$", 0.0, 0.05),
    (r"image_(start|end|newline)$", 0.0, 0.6),
)


def write_random_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    seed: int = 0,
    tokenizer: bool = True,
    adjust: Callable[[dict[str, Tensor]], None] | None = None,
) -> None:
    """Writes `random_tensors(config, seed)` as a checkpoint, with a byte-level tokenizer unless `tokenizer` is false.

    `adjust` may change the tensors before they are written.

    Raises: CheckpointError if the folder is in use, or if the vocabulary has no room for the bytes and control tokens.
    """
    tensors = random_tensors(config, seed)
    if adjust is not None:
        adjust(tensors)
    save_checkpoint(folder, config, tensors)
    if tokenizer:
        _write_tokenizer(Path(folder), config)


def _write_tokenizer(folder: Path, config: ModelConfig) -> None:
    """`tokenizer.json` with one token per byte, DeepSeek's control tokens, and placeholders up to `vocab_size`."""
    specials = {
        config.bos_token_id: "<｜begin▁of▁sentence｜>",
        config.eos_token_id: "<｜end▁of▁sentence｜>",
        config.pad_token_id: "<｜▁pad▁｜>",
    }
    control = dict(enumerate(_NAMED_TOKENS, start=_FIRST_BYTE_ID + 256))
    has_image_id = _FIRST_BYTE_ID + 256 + len(control) <= config.image_token_id < config.vocab_size
    control[config.image_token_id if has_image_id else max(control) + 1] = "<｜deepseek_image｜>"
    if set(specials) != {0, 1, 2} or max(control) >= config.vocab_size:
        raise CheckpointError(
            f"{folder}: the byte-level tokenizer needs begin, end and padding as ids 0 to 2 and a vocab_size above "
            f"{max(control)}, got {sorted(specials)} and {config.vocab_size}; write the checkpoint without tokenizer"
        )
    names = {id_: specials.get(id_) or control.get(id_) for id_ in range(config.vocab_size)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names |= dict(enumerate(alphabet, start=_FIRST_BYTE_ID))
    placeholders = (id_ for id_, name in names.items() if name is None)
    names |= {id_: f"<｜place▁holder▁no▁{number}｜>" for number, id_ in enumerate(placeholders)}
    backend = tokenizers.Tokenizer(models.BPE(vocab={str(name): id_ for id_, name in names.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for id_, name in names.items():
        if id_ not in range(_FIRST_BYTE_ID, _FIRST_BYTE_ID + 256):
            is_special = id_ not in control  # the published file flags none of the control tokens as special
            backend.add_tokens([tokenizers.AddedToken(str(name), special=is_special, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[config.bos_token_id],
        "eos_token": specials[config.eos_token_id],
        "pad_token": specials[config.pad_token_id],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")


# In the flat spelling. Every feature of the released model at a fraction of its size; the hash tables' rows are sums of
# primes from 1000 up, and 259 ids remain of the vocabulary below (architecture.md section 4.11).
_DEFAULT_CONFIG = {
    "vocab_size": 288, "dim": 384, "moe_inter_dim": 192, "n_layers": 12, "n_heads": 8, "head_dim": 64,
    "rope_head_dim": 32, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 4, "swiglu_limit": 10.0,
    "norm_eps": 1e-20,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "n_routed_experts": 16, "n_shared_experts": 1, "n_activated_experts": 2, "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "window_size": 128, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0], "kv_source_layers": [2, 4, 6],
    "index_source_layers": [2, 4, 6, 8, 10],
    "index_n_heads": 8, "index_head_dim": 64, "index_topk": 64, "candidate_source_layer": 6,
    "candidate_topk_blocks": 64, "candidate_block_size": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4], "engram_num_embeddings": [12458, 13416], "engram_max_ngram_size": 4,
    "engram_vocab_size": 1000, "engram_n_heads": 4, "engram_head_dim": 64, "engram_pad_id": 2,
    "engram_compressed_vocab_size": 259,
    "n_mtp_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 259, "dspark_markov_rank": 32,
    "dspark_target_layer_ids": [9, 10, 11], "dspark_n_routed_experts": 8, "dspark_n_activated_experts": 2,
    "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "original_seq_len": 65536,
    "image_token_id": 266, "dtype": "fp8", "expert_dtype": "fp4",
    "vision_n_layers": 2, "vision_dim": 64, "vision_n_heads": 2, "vision_inter_dim": 96, "vision_patch_size": 14,
    "vision_rope_theta": 10000, "vision_downsample_ratio": 3, "vision_max_n_token": 128, "vision_min_pixels": 7056,
    "vision_max_wh_ratio": None,
}  # fmt: skip


def default_config() -> ModelConfig:
    """The configuration of the small model that runs when no other is named."""
    return ModelConfig.from_dict(_DEFAULT_CONFIG)


def default_model_folder() -> Path:
    """The folder of the small default model, written on first use below the user's cache folder.

    Written beside it by one process at a time and moved into place: a concurrent or interrupted first use leaves a
    whole model or none, and what a killed one left goes away. A change of its configuration or of this file leads to a
    new folder.

    Raises: CheckpointError if there is no home folder, or the cache folder cannot be written.
    """
    config = default_config()
    recipe = json.dumps(config.to_dict()).encode() + Path(__file__).read_bytes()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "leadline"
    except RuntimeError as error:
        raise CheckpointError(f"default model: no place to write it to ({error}); set XDG_CACHE_HOME") from error
    folder = cache / f"default-model-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if os.path.isdir(folder):
        return folder
    unfinished = cache / "unfinished"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone_in(cache):
            if not folder.is_dir():  # otherwise another process was first
                try:
                    shutil.rmtree(unfinished, ignore_errors=True)  # of one that was killed
                    write_random_checkpoint(unfinished, config, adjust=_prefer_printable)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{cache}: cannot write the default model ({error}); set XDG_CACHE_HOME") from error
    return folder


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits for other processes in the same block; the end of a process, however it comes, lets the next one in."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _prefer_printable(tensors: dict[str, Tensor]) -> None:
    """Damps the output of every token but printable ASCII and newline, so that samples can be read and go on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    loud = [_FIRST_BYTE_ID + i for i, symbol in enumerate(alphabet) if "!" <= symbol <= "~" or symbol in "ĠĊ"]
    damping = torch.full((tensors["head.weight"].shape[0], 1), 0.25, dtype=torch.bfloat16)
    damping[loud] = 1.0
    tensors["head.weight"] *= damping
