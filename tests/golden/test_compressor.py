"""The compressor of a source layer on recorded inputs: a prompt, then single tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leadline.cache.pool import STATE_ROWS, KVCache
from leadline.config.layers import plan_layers
from leadline.config.model import read_config
from leadline.formats.rows import compressed_row
from leadline.model import compressor as compressor_module
from leadline.model.compressor import Compressor
from leadline.model.step import Run, StepBatch
from leadline.ops.linear import Weight
from leadline.ops.rope import apply_rope, frequencies, turns
from tests.golden.test_operators import bf16_steps

pytestmark = pytest.mark.golden

HERE = Path(__file__).parent
DATA = load_file(HERE / "compressor.safetensors")
STATE_REL = 1e-5
CONFIG = read_config(HERE / "models" / "shared_index" / "config.json")  # has the recorded sizes
PLAN = plan_layers(CONFIG)
FREQS = frequencies(CONFIG.qk_rope_head_dim, CONFIG.compress_rope_theta, CONFIG.rope_scaling)


class Recorded:
    """The recorded weights under the names of a layer; its index keys, which are not recorded, are ones."""

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if name == "indexer.k_norm.weight":
            return torch.ones(CONFIG.index_head_dim, dtype=dtype)
        return DATA[f"ratio{self.ratio}/{name.split('.')[1]}"].to(dtype)

    def linear(self, name: str) -> Weight:
        if name == "indexer.wk":
            return Weight.from_bf16(torch.ones(CONFIG.index_head_dim, CONFIG.head_dim, dtype=torch.bfloat16))
        return Weight.from_bf16(self.tensor(name + ".weight", torch.bfloat16))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("prompt", [1, 2, 3, 7, 8])
def test_compressor(ratio: int, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {k.rsplit("/", 1)[1]: v for k, v in DATA.items() if k.startswith(f"ratio{ratio}/prefill{prompt}/")}
    layer = next(layer for layer in PLAN.kv_sources if PLAN.layers[layer].ratio == ratio)
    compressor = Compressor(CONFIG, PLAN.layers[layer], Recorded(ratio), "")  # type: ignore[arg-type]
    latents: list[Tensor] = []
    norm = compressor_module.rms_norm

    def spy(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = norm(x, weight, eps)
        if weight is compressor.norm:
            latents.append(out)
        return out

    monkeypatch.setattr(compressor_module, "rms_norm", spy)
    for b, x in enumerate(case["x"]):
        latents.clear()
        cache = KVCache(CONFIG, PLAN, max_tokens=32, max_sequences=1, max_step_tokens=32, poison=True)
        sequence = cache.open()
        for call, made in enumerate(case["groups_made"].tolist()):
            start, end = (0, prompt) if call == 0 else (sequence.length, sequence.length + 1)
            run = Run(sequence, torch.zeros(end - start, dtype=torch.int64), logits_from=end, prompt_length=prompt)
            step = StepBatch([run], CONFIG, PLAN, cache, {"window": FREQS, "compressed": FREQS})
            compressor(x[start:end], step, cache)
            step.finish()
            assert len(step.new_rows(ratio).number_N) == made
            if ratio == 2:  # what waits for its partner: slots of groups that are done are recorded as zeros
                ring = cache.open_groups[cache.pair_sources.index(layer), sequence.slot]
                waiting = ring[(end - 1) % STATE_ROWS] if end % 2 else torch.zeros(2, CONFIG.head_dim)
                for name, value in zip(("kv_state", "score_state"), waiting, strict=True):
                    torch.testing.assert_close(value, case[name][call, b, 0], rtol=STATE_REL, atol=STATE_REL)
                    assert not case[name][call, b, 1].any()
        found, expected = torch.cat(latents), case["latents"][b]
        assert bf16_steps(found, expected) <= 1
        turn = turns(torch.arange(len(expected)) * ratio, FREQS)
        assert bf16_steps(apply_rope(expected, turn), case["rotated"][b]) <= 1
        layout = compressed_row(CONFIG.head_dim)
        assert torch.equal(layout.unpack(*layout.pack(case["rotated"][b])), case["cache_rows"][b])
        same = (found == expected).all(1)
        assert same.float().mean() > 0.9
        stored = cache.compressed[layer].rows.gather(sequence.pool_rows(ratio)[: len(expected)])
        assert torch.equal(stored[same], case["cache_rows"][b][same])
