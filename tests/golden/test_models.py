"""The eight recorded models, layer by layer and end to end, through the code of `leadline verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from leadline.errors import VerificationError
from leadline.model.model import Model
from leadline.verify.formats import check_formats
from leadline.verify.operators import check_operators
from leadline.verify.parts import Part
from leadline.verify.recording import LOGIT_MEDIAN, LOGIT_P95, check_decode, check_recording, read_recording

pytestmark = pytest.mark.golden

GOLDEN = Path(__file__).parent
NOISE = json.loads((GOLDEN / "index.json").read_text())["models"]

# Parts of a chained run and the rerun whose noise bounds their median error.
RERUN = {
    "prefill logits": "prefill",
    "decode logits": "decode",
    "one_token logits": "decode",
    "two_tokens logits": "decode",
    "draft logits": "draft",
    "draft confidence": "draft_confidence",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads cost more than they bring at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(name: str) -> Model:
    return Model.load(GOLDEN / "models" / name)


def compare(name: str, model: Model) -> list[Part]:
    return check_recording(model, read_recording(GOLDEN / "models" / name / "golden.safetensors"))


def failures(parts: list[Part]) -> list[str]:
    return [f"{part.name}: {check}" for part in parts for check in part.checks if not check.passed]


@pytest.mark.parametrize("name", sorted(NOISE))
def test_recorded_model(name: str) -> None:
    model = load(name)
    parts = compare(name, model)
    assert not failures(parts)
    assert not failures(check_decode(model))
    names = {part.name for part in parts}
    assert len(names) == len(parts)
    for k in range(model.config.num_hidden_layers):
        assert {f"layer {k} stream", f"layer {k} pre_mix"} <= names
    assert ("selected rows" in names) == bool(model.plan.kv_sources)
    assert ("image rows" in names) == (model.vision is not None)
    assert ("draft tokens" in names) == model.has_draft
    # The noise of one rerun bounds more tightly than the recording's, which is the largest of three.
    errors = {part.name: [check.value for check in part.checks] for part in parts if part.name in RERUN}
    assert {"prefill logits", "decode logits", "one_token logits", "two_tokens logits"} <= errors.keys()
    for part, (median, *large) in errors.items():
        noise = NOISE[name][RERUN[part]]
        assert median <= LOGIT_MEDIAN * noise, part
        assert max(large) <= LOGIT_P95 * noise, part


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize("name", sorted(NOISE))
def test_recorded_model_on_a_gpu(name: str, weights: Literal["dense", "packed"]) -> None:
    model = Model.load(GOLDEN / "models" / name, device="cuda", weights=weights)
    assert not failures(check_operators(model.device))
    assert not failures(compare(name, model))
    assert not failures(check_decode(model))


def test_formats() -> None:
    assert not failures(check_formats())


def ignore_sink(model: Model) -> None:
    weights = model.layers[2].attention.weights
    weights.attn_sink = torch.full_like(weights.attn_sink, -torch.inf)


def swap_experts(model: Model) -> None:
    one, other = model.layers[2].block.ffn, model.layers[3].block.ffn
    one.experts, other.experts = other.experts, one.experts


def break_norm(model: Model) -> None:
    model.layers[2].block.ffn_norm = model.layers[2].block.ffn_norm * torch.nan


@pytest.mark.parametrize("prompt", ["one_token", "two_tokens"])
def test_a_wrong_short_prompt_fails(prompt: str) -> None:
    recording = read_recording(GOLDEN / "models" / "swa" / "golden.safetensors")
    recording[f"{prompt}/prefill_logits"][-1] *= 1.25
    failed = failures(check_recording(load("swa"), recording))
    assert [message.split(":")[0] for message in failed] == [f"{prompt} logits"]


@pytest.mark.parametrize("damage", [ignore_sink, swap_experts, break_norm])
def test_a_broken_layer_fails_and_names_itself(damage) -> None:
    model = load("swa")
    damage(model)
    failed = [part.name for part in compare("swa", model) if not part.passed]
    assert failed[0] == "layer 2 stream"
    assert not any(name.startswith(("layer 0", "layer 1", "embedded")) for name in failed)


def test_a_wrong_selection_fails() -> None:
    """Swaps near the cut are allowed; the lowest scores instead of the highest are not."""
    model = load("shared_index")
    indexer = model.layers[4].attention.indexer
    assert indexer is not None
    indexer.weight_scale = -indexer.weight_scale
    failed = {part.name for part in compare("shared_index", model) if not part.passed}
    assert {"layer 4 stream", "selected rows"} <= failed
    assert not {f"layer {k} stream" for k in range(4)} & failed


def test_a_broken_head_fails() -> None:
    """Every layer agrees, so only logits and choices can tell."""
    model = load("swa")
    model.head = model.head.roll(1, 0)
    failed = {part.name for part in compare("swa", model) if not part.passed}
    assert failed == {"prefill logits", "decode logits", "greedy tokens", "one_token logits", "two_tokens logits"}


def test_another_models_recording() -> None:
    with pytest.raises(VerificationError, match="belongs to another model"):
        compare("draft", load("swa"))
