"""The command line on the real small model, which the first command of a newcomer runs: pictures in, text out."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from leadline.checkpoint.random_model import default_config
from leadline.cli import main as cli_main
from leadline.config.sampling import SamplingParams
from leadline.errors import CheckpointError
from leadline.llm import LLM
from leadline.text.images import resize_plan
from tests.model.driver import MODELS

pytestmark = pytest.mark.tiny


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = {}
    for name, size, colour in (("red", (90, 60), "red"), ("blue", (90, 60), "blue"), ("large", (400, 300), "green")):
        paths[name] = folder / f"{name}.png"
        Image.new("RGB", size, colour).save(paths[name])
    return paths


def generate(*args: str | Path) -> dict[str, Any]:
    command = ["generate", "What is this?", "--json", "-n", "6", "-t", "0", *map(str, args)]
    result = CliRunner().invoke(cli_main.app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_generate_reads_pictures(pictures: dict[str, Path]) -> None:
    vision = default_config().vision
    assert vision is not None
    text_only = generate()
    answers = {name: generate("--image", path) for name, path in pictures.items()}
    both = generate("--image", pictures["red"], "--image", pictures["large"])
    sizes = {"red": resize_plan(90, 60, vision).num_tokens, "large": resize_plan(400, 300, vision).num_tokens}
    assert sizes["red"] < sizes["large"]
    length = len(text_only["prompt_token_ids"])
    assert len(answers["red"]["prompt_token_ids"]) == length + sizes["red"]
    assert len(answers["large"]["prompt_token_ids"]) == length + sizes["large"]
    assert len(both["prompt_token_ids"]) == length + sizes["red"] + sizes["large"]
    assert both["prompt_token_ids"].count(default_config().image_token_id) == sum(sizes.values())
    texts = [document["answers"][0]["text"] for document in (text_only, both, *answers.values())]
    assert len(set(texts)) == len(texts)  # every picture changes the answer, its colour alone as well
    assert generate("--image", pictures["red"])["answers"] == answers["red"]["answers"]


def test_a_model_that_reads_no_pictures_says_so(
    pictures: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text_only = str(MODELS / "engram")
    command = ["leadline", "generate", "x", "--model", text_only, "--image", str(pictures["red"])]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    captured = capsys.readouterr()
    assert stopped.value.code == 1
    assert captured.err.splitlines()[-1] == "error: images: expected none, got 1; this model does not read images"
    assert captured.out == ""


def test_a_picture_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    monkeypatch.setattr(sys, "argv", ["leadline", "generate", "x", "--image", str(path)])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: image '{path}': expected one of PNG")


def test_images_of_one_size_are_told_apart_by_the_prefix_cache(tmp_path: Path) -> None:
    """The second prompt has the same token ids as the first, and shares nothing with it behind the image's start."""
    sources = []
    for name, colour in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        sources.append(tmp_path / f"{name}.png")
        Image.new("RGB", (300, 300), colour).save(sources[-1])
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    text = "What does the picture show? " * 40
    cached, cold = LLM(), LLM(max_snapshots=0)
    for source in (*sources, sources[0]):
        (warm,), (fresh,) = (llm.generate(text, params, images=[[source]]) for llm in (cached, cold))
        assert warm.prompt_token_ids == fresh.prompt_token_ids
        assert warm.outputs[0].token_ids == fresh.outputs[0].token_ids
        assert warm.outputs[0].logprobs == fresh.outputs[0].logprobs
    stats = cached.engine.stats()
    assert stats.cached_tokens > 0  # the third prompt is the first one again
    assert stats.cached_tokens < len(warm.prompt_token_ids)


def test_a_saved_prefix_cache_belongs_to_the_bytes_of_its_model(tmp_path: Path) -> None:
    """Same names, sizes and headers, other weights: refused, or its answers would be those of no model."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        shutil.copytree(MODELS / "everything", folder)
    shard = next(folders[1].glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    models = [LLM(folder, max_cache_tokens=1024) for folder in folders]
    file = tmp_path / "prefixes"
    models[0].generate([list(range(5, 200))], SamplingParams(temperature=0, max_tokens=2))
    models[0].save_prefixes(file)
    LLM(folders[0], max_cache_tokens=1024).load_prefixes(file)
    with pytest.raises(CheckpointError):
        models[1].load_prefixes(file)


def test_a_prefix_cache_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    llm = LLM(MODELS / "everything", max_cache_tokens=1024)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "folder", tmp_path / "missing" / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be written there"):
            llm.save_prefixes(path)
        with pytest.raises(CheckpointError, match="name a file that `save_prefixes` wrote") as caught:
            llm.load_prefixes(path)
        assert "delete" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    with pytest.raises(CheckpointError, match="delete it"):
        llm.load_prefixes(tmp_path / "file")
