"""`leadline plan`: the numbers of the released model, to the byte."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from leadline.cli.plan import plan, plan_report
from leadline.config.model import read_config
from leadline.errors import ConfigError, RequestError

pytestmark = pytest.mark.unit

GOLDEN = Path(__file__).parent.parent / "golden"
RELEASED = GOLDEN / "released_config.json"


@pytest.fixture(scope="module")
def released() -> dict:
    return plan_report(read_config(RELEASED), context=1_048_576, batch=8, gpus=8)


def test_totals_of_the_released_checkpoint(released):
    """architecture.md section 2.1."""
    checkpoint = released["checkpoint"]
    assert checkpoint["tensors"] == 96_085
    assert checkpoint["bytes"] == 510_286_023_000
    assert checkpoint["parameters"] == 763_205_315_794
    assert {kind["kind"]: kind["elements"] for kind in checkpoint["kinds"]} == {
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
        "FP8": 204_015_223_296,
        "FP4": 557_171_343_360,
        "E8M0 scales": 23_563_015_184,
    }
    assert {kind["kind"]: kind["bytes"] for kind in checkpoint["kinds"]} == {
        "BF16": 2 * 1_976_441_856,
        "F32": 4 * 42_307_282,
        "FP8": 204_015_223_296,
        "FP4": 557_171_343_360 // 2,
        "E8M0 scales": 23_563_015_184,
    }


def test_parts_of_the_released_checkpoint(released):
    """architecture.md sections 2.1 and 2.4; one routed expert takes 18,800,640 B."""
    parts = {part["part"]: part for part in released["checkpoint"]["parts"]}
    billions = {name: part["parameters"] / 1e9 for name, part in parts.items()}
    apart = ("engram tables", "draft stages", "vision")
    assert round(sum(size for name, size in billions.items() if name not in apart), 2) == 551.88
    assert [round(billions[name], 2) for name in apart] == [196.61, 14.23, 0.49]
    assert parts["engram tables"]["bytes"] == 202_758_032_400
    assert parts["routed experts"]["bytes"] == 40 * 384 * 18_800_640
    for total in ("parameters", "bytes"):
        assert sum(part[total] for part in parts.values()) == released["checkpoint"][total]


def test_cache_of_the_released_model(released):
    """architecture.md section 7.2."""
    cache = released["cache"]
    assert cache["bytes_per_token"] == 890
    per_layer = [(source["layer"], source["bytes_per_token"]) for source in cache["sources"]]
    assert per_layer == [(2, 178), (8, 178), (14, 178), (20, 356)]
    assert all((source["row_bytes"], source["key_bytes"]) == (288, 68) for source in cache["sources"])
    assert cache["sequence_state"] == {
        "windows": 40 * 128 * 528,
        "draft_rings": 3 * 128 * 528,
        "open_groups": 12 * 1024,
        "hashed_ids": 24,
    }


def test_memory_is_shared_as_stated(released):
    memory = released["memory"]
    assert memory["device"]["rows"] == 1_048_576 * 890
    assert memory["device"]["sequence_state"] == released["cache"]["bytes_per_sequence"]
    assert memory["bytes_per_device"] == sum(memory["device"].values())
    assert memory["host"]["engram_tables"] == 202_758_032_400
    one = plan_report(read_config(RELEASED), context=1, batch=3)["memory"]
    assert one["device"]["rows"] == 3 * 128 * 890  # whole pages
    weights = one["device"]["routed_experts"] + one["device"]["other_weights"] + one["host"]["engram_tables"]
    assert weights == 510_286_023_000
    assert memory["device"]["routed_experts"] == one["device"]["routed_experts"] // 8


def test_layers_follow_the_plan(released):
    assert len(released["layers"]) == 40
    assert released["layers"][24] == {
        "layer": 24,
        "mode": "REINDEX",
        "ratio": 1,
        "rows_of": 20,
        "selection_of": 24,
        "candidates_of": 20,
        "is_candidate_source": False,
        "has_engram": False,
        "is_draft_target": False,
    }


def test_window_only_model_needs_no_rows():
    report = plan_report(read_config(GOLDEN / "models" / "swa"), context=1000)
    assert report["cache"]["bytes_per_token"] == 0
    assert report["memory"]["device"]["rows"] == 0
    assert report["memory"]["device"]["selection_scratch"] == 0


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"context": 0}, "context: expected an integer from 1 to 1048576, got 0"),
        ({"context": 1_048_577}, "got 1048577"),
        ({"batch": 0}, "batch: expected an integer of at least 1, got 0"),
        ({"gpus": -1}, "gpus: expected an integer of at least 1, got -1"),
    ],
)
def test_sizes_out_of_range(sizes, words):
    with pytest.raises(RequestError, match=words):
        plan_report(read_config(RELEASED), **sizes)


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == 0
    return result.output


def test_command_prints_the_json_of_the_report(released):
    arguments = ("--context", "1048576", "--batch", "8", "--gpus", "8", "--json")
    assert json.loads(run(str(RELEASED), *arguments)) == released


def test_command_prints_tables():
    text = run(str(RELEASED))
    for words in ("890 B per token", "510,286,023,000", "96,085 tensors", "3-7", "candidate source", "4,096 tokens"):
        assert words in text
    assert "1,745 tensors" in run()  # the small default model
    assert "1,024 tokens" in run(str(GOLDEN / "models" / "swa"))  # more do not fit


def test_context_that_nobody_asked_for_fits_the_model():
    assert json.loads(run(str(GOLDEN / "models" / "vision"), "--json"))["memory"]["context"] == 1024


def test_command_refuses_what_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        plan(str(tmp_path))
