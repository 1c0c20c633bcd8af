"""Resize plans, patches, tower and aligner against the recorded reference."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from leadline.config.model import ModelConfig, VisionConfig, read_config
from leadline.model.vision import VisionTower, span_rows
from leadline.text.images import expand_images, prepare_image, resize_plan

pytestmark = pytest.mark.golden

GOLDEN = Path(__file__).parent
DATA = load_file(GOLDEN / "vision.safetensors")
RELEASED = read_config(GOLDEN / "released_config.json")
MODELS = {name: read_config(GOLDEN / "models" / name / "config.json") for name in ("vision", "everything")}
MODEL = MODELS["vision"]
IMAGES = {0: (5, 6), 1: (10, 3), 2: (3, 15), 3: (7, 7)}  # rows and columns of patches

# Stated with the recorded data: another bicubic filter may move a few bytes, everything else is one rounding.
PATCH_ERROR = 1 / 64
PATCH_ERROR_SHARE = 0.02
# The recorded data allows 1e-2. Attention with fp32 probabilities reproduces it bit for bit on the machine it was made
# on; another summation order costs up to 0.007, probabilities rounded to bf16 0.01.
FEATURE_RMS = 8e-3


class _Recorded:
    """The recorded weights, with the part of a weight source's interface that the tower uses."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return DATA[f"weights/{name}"].to(dtype or torch.bfloat16)


def recorded_config() -> ModelConfig:
    """The sizes of the recorded tower: those of the small vision model, with another text width."""
    return dataclasses.replace(MODEL, hidden_size=128)


def small_vision() -> VisionConfig:
    assert MODEL.vision is not None
    return MODEL.vision


def rms_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()


@pytest.mark.parametrize(("name", "ratio"), [("plan", None), ("plan_ratio3", 3)])
def test_resize_plans(name: str, ratio: float | None) -> None:
    assert RELEASED.vision is not None
    limits = dataclasses.replace(RELEASED.vision, max_wh_ratio=ratio)
    for width, height, *expected in DATA[name].tolist():
        plan = resize_plan(width, height, limits)
        found = [plan.patch_rows, plan.patch_columns, plan.token_rows, plan.token_columns]
        assert found == expected, f"{width} x {height}"


@pytest.mark.parametrize("number", IMAGES)
def test_patches_and_span(number: int) -> None:
    image = Image.fromarray(DATA[f"image{number}/pixels"].numpy())
    prepared = prepare_image(image, small_vision())
    assert (prepared.plan.patch_rows, prepared.plan.patch_columns) == IMAGES[number]
    assert prepared.plan.token_types().tolist() == DATA[f"image{number}/token_types"].tolist()
    expected = DATA[f"image{number}/patches"].flatten(1)
    assert prepared.patches.shape == expected.shape
    assert prepared.patches.dtype == torch.bfloat16
    error = (prepared.patches.float() - expected.float()).abs()
    assert error.max().item() <= PATCH_ERROR
    assert (error > 0).float().mean().item() <= PATCH_ERROR_SHARE


@pytest.mark.parametrize("number", IMAGES)
def test_tower_and_aligner(number: int) -> None:
    tower = VisionTower(recorded_config(), _Recorded())
    grid_h, grid_w = IMAGES[number]
    patches_ND = DATA[f"image{number}/patches"].flatten(1)
    features = tower.features(patches_ND, grid_h, grid_w)
    aligned = tower.encode(patches_ND, grid_h, grid_w)
    assert features.dtype == aligned.dtype == torch.bfloat16
    assert rms_error(features, DATA[f"image{number}/vit"]) <= FEATURE_RMS
    assert aligned.shape == DATA[f"image{number}/aligned"].shape
    assert rms_error(aligned, DATA[f"image{number}/aligned"]) <= FEATURE_RMS


def test_the_aligner_takes_the_exact_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = VisionTower(recorded_config(), _Recorded())
    x = -2.25  # where the approximation by tanh is 1.4 % off
    monkeypatch.setattr(tower, "_align1", lambda squares: torch.full((len(squares), 4), x, dtype=torch.bfloat16))
    monkeypatch.setattr(tower, "_align2", lambda rows: rows)
    (row,) = tower.align(torch.zeros(9, small_vision().hidden_size, dtype=torch.bfloat16), 3, 3)
    expected = torch.full((4,), x * 0.5 * math.erfc(-x / math.sqrt(2)))
    torch.testing.assert_close(row.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_whole_prompt(name: str) -> None:
    """Pixels to embedded prompt on a small model: the placeholder grows, its rows replace the embeddings."""
    folder, model = GOLDEN / "models" / name, MODELS[name]
    assert model.vision is not None
    recorded = load_file(folder / "golden.safetensors")
    tensors = load_file(folder / "model.safetensors")

    class Checkpoint:
        def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            return tensors[name].to(dtype or torch.bfloat16)

    prepared = prepare_image(Image.fromarray(recorded["image_pixels"].numpy()), model.vision)
    assert [prepared.plan.patch_rows, prepared.plan.patch_columns] == recorded["image_grid"].tolist()
    start, types = recorded["image_start"].item(), recorded["token_types"]
    ids = recorded["input_ids"].tolist()
    short = [*ids[: start + 1], *ids[start + prepared.plan.num_tokens :]]
    token_ids, token_types = expand_images(short, [prepared.plan], model.image_token_id)
    assert token_ids.tolist() == ids
    assert token_types.tolist() == types.tolist()
    patches_ND = recorded["image_patches"].flatten(1)
    aligned = VisionTower(model, Checkpoint()).encode(patches_ND, *recorded["image_grid"].tolist())
    learned = (tensors[name] for name in ("image_start", "image_newline", "image_end"))
    rows = span_rows(aligned, token_types, *learned)
    expected = recorded["embedded"][token_types >= 0]
    assert torch.equal(rows[token_types[token_types >= 0] != 1], expected[token_types[token_types >= 0] != 1])
    assert rms_error(rows, expected) <= FEATURE_RMS
