"""Values that no output shows clearly: the grids of what products and attention read, and who selects among what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.formats.rows import compressed_row, window_row
from leadline.model import attention, block, draft, engram, indexer
from leadline.model.model import Model
from leadline.ops.quantize import act_quant, index_quant
from tests.model.driver import MODELS, feed, new_cache, run_of, text, with_image
from tests.model.random_models import Shape, model_of

pytestmark = pytest.mark.tiny


def test_every_operand_is_on_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def spy(module: Any, name: str, look: Any) -> None:
        real = getattr(module, name)

        def call(*given: Any, **options: Any) -> Any:
            look(*given)
            return real(*given, **options)

        monkeypatch.setattr(module, name, call)

    def linear(where: str) -> Any:
        def look(x: Tensor, weight: Any) -> None:
            if weight.kind != "bf16":
                seen.add(where)
                assert torch.equal(act_quant(x), x)

        return look

    def experts(x: Tensor, *_: Any) -> None:
        seen.add("experts")
        assert torch.equal(act_quant(x), x)

    def attend(where: str) -> Any:
        def look(
            q: Tensor, window: Any, window_idx: Tensor, selected: Any, selected_idx: Tensor | None, *_: Any
        ) -> None:
            for layout, rows, idx in ((window_row, window, window_idx), (compressed_row, selected, selected_idx)):
                if rows is None or not bool((idx >= 0).any()):
                    continue
                seen.add(f"{where} {layout.__name__}")
                values = rows.gather(idx[idx >= 0])
                grid = layout(values.shape[-1])
                assert torch.equal(grid.unpack(*grid.pack(values)), values)

        return look

    def select(q: Tensor, weight: Tensor, *_: Any) -> None:
        seen.add("select")
        assert torch.equal(index_quant(q), q)
        assert torch.equal(weight.bfloat16().float(), weight)

    for module in (attention, draft, engram):
        spy(module, "linear", linear(module.__name__.rsplit(".", 1)[1]))
    spy(block, "moe", experts)
    for module in (attention, draft):
        spy(module, "sparse_attention", attend(module.__name__.rsplit(".", 1)[1]))
    for name in ("select_rows", "select_rows_and_blocks", "select_in_blocks"):
        spy(indexer, name, select)

    model = Model.load(MODELS / "everything", weights="packed")
    for layer in model.layers:
        if layer.engram is not None:  # only below the smallest scale are table rows off the grid of activations

            def fetch(rows: Tensor, table: Any = layer.engram.embed) -> Tensor:
                return table.fetch(rows) * 2.0**-20

            monkeypatch.setattr(layer.engram, "embed", SimpleNamespace(fetch=fetch))
    tokens = with_image("everything")
    cache = new_cache(model)
    sequence = cache.open()
    feed(model, cache, sequence, tokens, [len(tokens) - 1, 1], prompt_length=len(tokens))
    offered: list[Tensor] = []

    def choose(_: int, logits: Tensor) -> Tensor:
        offered.append(logits)
        return logits.argmax(-1)

    drafted = model.draft(cache, [sequence], torch.tensor([7]), choose)
    assert torch.equal(torch.stack(offered, 1), drafted.logits)  # drafts are chosen from the corrected logits
    assert torch.equal(drafted.logits.argmax(-1), drafted.token_ids)
    rows = {f"{where} window_row" for where in ("attention", "draft")} | {"attention compressed_row"}
    assert seen == {"attention", "draft", "engram", "experts", "select"} | rows


def test_the_first_layer_reads_the_first_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams start equal, so it matters only where an n-gram module comes before the first layer."""
    given: list[tuple[Tensor, Tensor]] = []
    real = block.collapse

    def spy(h_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        given.append((h_TSD, pre_TS))
        return real(h_TSD, pre_TS)

    monkeypatch.setattr(block, "collapse", spy)
    model = model_of(Shape("-", False, engram=(0,), targets=(), window=8, topk=4, experts=1, seed=0))
    cache = new_cache(model)
    model.step([run_of(cache.open(), text(model, 9))], cache)
    h_TSD, pre_TS = given[0]
    assert not torch.equal(h_TSD[:, 0], h_TSD[:, 1])
    assert pre_TS.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 9


def test_every_consumer_selects_inside_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those above another consumer, for prompts and single tokens, and with layers between that reuse."""
    blocks: list[Tensor] = []
    real = indexer.select_in_blocks

    def spy(*given: Any) -> Tensor:
        blocks.append(given[4])
        return real(*given)

    monkeypatch.setattr(indexer, "select_in_blocks", spy)
    shape = Shape("1iri", True, engram=(), targets=(), window=8, topk=4, experts=1, seed=0)
    model = model_of(shape)
    size, most = model.config.candidate_block_size, model.config.candidate_topk_blocks
    cache = new_cache(model)
    sequence, tokens = cache.open(), text(model, 72)
    for part in (tokens.part(0, 70), tokens.part(70, 71), tokens.part(71, 72)):
        selected: dict[str, Tensor] = {}
        blocks.clear()
        model.step([run_of(sequence, part)], cache, lambda name, value, found=selected: found.update({name: value}))
        first, second = blocks
        assert torch.equal(first, second)
        assert bool((first[-1] >= 0).sum() == most < sequence.length // size)  # restricted
        for layer in (1, 3):
            row_TK = selected[f"layer{layer}.selected"]
            inside = (row_TK[:, :, None] // size == first[:, None]).any(-1)
            assert bool((inside | (row_TK < 0)).all())
        assert not torch.equal(selected["layer1.selected"], selected["layer3.selected"])
