"""Sparse attention against recorded outputs (golden README: sparse_attention.safetensors)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline.formats.rows import DenseRows
from leadline.ops.sparse_attention import sparse_attention

pytestmark = pytest.mark.golden

# The README's tolerance: probabilities are rounded to bf16 before they weight the values.
EXACT_ATOL, EXACT_RMS = 2**-7, 4e-3
# The rounding points are those of the recorded bf16 outputs: only another fp32 summation order can move an element.
# Measured: all equal.
SAME_SHARE = 0.99

CASES = ["plain", "holes", "topk130_sinks", "head_dim_512", "first_block_empty", "single_key", "peaked", "decode"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(Path(__file__).parent / "sparse_attention.safetensors")


@pytest.mark.parametrize("split", ["window", "half", "selected"])
@pytest.mark.parametrize("case", CASES)
def test_recorded_outputs(recorded: dict[str, Tensor], case: str, split: str) -> None:
    """Where the list is cut into window and selected rows makes no difference."""
    q, kv, idx, sink = (recorded[f"{case}/{name}"] for name in ("q", "kv", "idx", "sink"))
    cut = {"window": idx.shape[-1], "half": idx.shape[-1] // 2, "selected": 0}[split]
    got = torch.stack(
        [
            sparse_attention(
                q[b],
                DenseRows(kv[b]),
                idx[b, :, :cut],
                None if split == "window" else DenseRows(kv[b]),
                None if split == "window" else idx[b, :, cut:],
                sink,
                q.shape[-1] ** -0.5,
            )
            for b in range(q.shape[0])
        ]
    )
    expected = recorded[f"{case}/out_exact_f32"]
    difference = got.float() - expected
    assert float(difference.abs().max()) <= EXACT_ATOL * float(kv.abs().max())
    assert float(difference.square().mean().sqrt()) <= EXACT_RMS * float(expected.square().mean().sqrt())
    assert float((got == recorded[f"{case}/out"]).float().mean()) >= SAME_SHARE
    empty = (idx < 0).all(-1)
    assert not bool(got[empty].any())
