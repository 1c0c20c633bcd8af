"""`leadline verify`: what it compares, prints and returns."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from leadline.cli.main import app
from leadline.errors import VerificationError
from leadline.verify import Check, Part

pytestmark = pytest.mark.unit

MODEL = Path(__file__).parent.parent / "golden" / "models" / "swa"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*args):
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["verify", *map(str, args)])


def test_recorded_run_passes():
    result = run(MODEL)
    assert result.exit_code == 0, result.output
    for word in ("formats: E4M3", "decode against prefill", "layer 3 stream", "greedy tokens", "tolerance", "pass"):
        assert word in result.output
    assert "FAIL" not in result.output


def test_without_a_recording_it_says_so(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL / name, tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "no recording" in result.output
    assert "decode against prefill" in result.output
    assert "layer 0" not in result.output


def test_a_difference_fails_with_status_one(tmp_path):
    recording = load_file(MODEL / "golden.safetensors")
    recording["decode_logits"] = recording["decode_logits"].roll(1, -1).contiguous()
    path = tmp_path / "other.safetensors"
    save_file(recording, path)
    result = run(MODEL, "--recording", path, "--json")
    assert result.exit_code == 1
    assert isinstance(result.exception, VerificationError)
    assert "decode logits" in str(result.exception)
    document = json.loads(result.stdout)
    assert document["recording"] == str(path)
    failed = {part["part"] for part in document["parts"] if not part["passed"]}
    assert failed == {"decode logits"}
    broken = next(part for part in document["parts"] if part["part"] == "decode logits")
    assert broken["checks"][0]["value"] > broken["checks"][0]["limit"]


@pytest.mark.parametrize("content", [b"", b"not safetensors"])
def test_an_unreadable_recording(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    result = run(MODEL, "--recording", path)
    assert result.exit_code == 1
    assert isinstance(result.exception, VerificationError)
    assert "expected a recording" in str(result.exception)


def test_a_missing_or_foreign_recording(tmp_path):
    result = run(MODEL, "--recording", tmp_path / "none.safetensors")
    assert isinstance(result.exception, VerificationError)
    result = run(MODEL, "--recording", MODEL / "model.safetensors")
    assert isinstance(result.exception, VerificationError)
    assert "it lacks" in str(result.exception)


def test_nan_fails():
    check = Check(what="mean", value=float("nan"), limit=1.0)
    assert not check.passed
    assert not Part(name="x", worst=0.0, rms=0.0, checks=(check,)).passed
