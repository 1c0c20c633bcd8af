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
from leadline.model.model import Model
from leadline.ops import dispatch
from leadline.verify.operators import check_operators
from leadline.verify.parts import Check, Part
from leadline.verify.recording import check_recording

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
    for word in (
        "formats: E4M3",
        "operators: moe, reference",
        "decode against prefill",
        "layer 3 stream",
        "greedy tokens",
        "tolerance",
        "pass",
    ):
        assert word in result.output
    assert "FAIL" not in result.output


def test_without_a_recording_it_says_so(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL / name, tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "no recording" in result.output
    assert "operators: moe, reference" in result.output
    assert "decode against prefill" in result.output
    assert "layer 0" not in result.output


def slightly_wrong(results):
    """The last row of every result, or a whole number, moved a little."""
    results = [result.clone() for result in (results if isinstance(results, tuple) else (results,))]
    for result in results:
        result[-1] = result[-1] * 1.02 if result.is_floating_point() else result[-1] + 1
    return tuple(results) if len(results) > 1 else results[0]


CPU = torch.device("cpu")
OPERATORS = sorted({row.op for row in dispatch.table(CPU)})


@pytest.fixture
def registry(monkeypatch):
    """A copy that a test may add implementations to."""
    monkeypatch.setattr(dispatch, "_registry", {op: dict(found) for op, found in dispatch._registry.items()})
    monkeypatch.setattr(dispatch, "_chosen", {})


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("op", OPERATORS)
def test_every_implementation_of_an_operator_is_checked(op):
    reference = dispatch.choose(op, None, CPU)
    dispatch.register(op, "wrong", lambda *operands: slightly_wrong(reference(*operands)))
    dispatch.register(op, "elsewhere", reference, lambda device: "needs another device")
    parts = check_operators(CPU)
    assert [part.name for part in parts if not part.passed] == [f"operators: {op}, wrong"]
    assert len(parts) == len(OPERATORS) + 2  # the wrong one, and the rotations


@pytest.mark.usefixtures("registry")
def test_an_operator_that_raises_or_depends_on_neighbours_fails_by_name():
    reference = dispatch.choose("linear_f32", None, CPU)

    def dependent(x, w):
        return reference(x, w) * (1 + 1e-7 * len(x))  # far within the limit

    def broken(*operands):
        raise IndexError("index out of range")

    dispatch.register("linear_f32", "dependent", dependent)
    dispatch.register("linear_f32", "broken", broken)
    one, other = (part for part in check_operators(CPU) if not part.passed)
    assert (one.name, one.checks[0].passed) == ("operators: linear_f32, dependent", True)
    assert [check.what for check in one.checks if not check.passed] == ["other bits alone"]
    assert (other.name, other.checks[0].what) == ("operators: linear_f32, broken", "IndexError: index out of range")


def test_a_difference_fails_with_status_one(tmp_path):
    recording = load_file(MODEL / "golden.safetensors")
    recording["decode_logits"] = recording["decode_logits"].roll(1, -1).contiguous()
    path = tmp_path / "other.safetensors"
    save_file(recording, path)
    result = run(MODEL, path, "--json")
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
    result = run(MODEL, path)
    assert result.exit_code == 1
    assert isinstance(result.exception, VerificationError)
    assert "expected a recording" in str(result.exception)


def test_a_missing_or_foreign_recording(tmp_path):
    result = run(MODEL, tmp_path / "none.safetensors")
    assert isinstance(result.exception, VerificationError)
    result = run(MODEL, MODEL / "model.safetensors")
    assert isinstance(result.exception, VerificationError)
    assert "it lacks" in str(result.exception)


def test_nan_fails():
    check = Check(what="mean", value=float("nan"), limit=1.0)
    assert not check.passed
    assert not Part(name="x", worst=0.0, rms=0.0, checks=(check,)).passed


def damaged(name, change):
    """The recording of a small model with one tensor changed, or without it."""
    recording = load_file(MODEL.parent / "everything" / "golden.safetensors")
    tensor = recording.pop(name)
    return recording if change is None else recording | {name: change(tensor).contiguous()}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("noise_decode", None, "expected the shape .* got nothing"),
        ("prefill_experts", None, "expected the shape .* got nothing"),
        ("input_ids", lambda x: x[:0], "one of them has none of it"),
        ("input_ids", lambda x: x + 10**6, "expected integers from 0 to 383, got torch.int32 up to"),
        ("tokens", lambda x: x.float(), "expected integers from 0 to 383, got torch.float32"),
        ("prefill_stream", lambda x: x.flatten(1), "expected the shape"),
        ("decode_stream", lambda x: x[..., :-1], "expected the shape"),
        ("decode_logits", lambda x: x[:0], "expected the shape"),
        ("prefill_logits", lambda x: x[:, :-1], "expected the shape"),
        ("draft_logits_steps", lambda x: x + 1000, "expected integers"),
        ("one_token/tokens", None, "expected the shape"),
        ("image_pixels", None, "expected the shape"),
        ("image_patches", lambda x: x[1:], "expected the shape"),
        ("token_types", lambda x: x * 0 - 1, "expected .* positions of the image, got 0"),
    ],
)
def test_a_damaged_recording_names_the_tensor(name, change, words):
    model = Model.load(MODEL.parent / "everything")
    with pytest.raises(VerificationError, match=rf"^recording: {name}: .*{words}"):
        check_recording(model, damaged(name, change))
