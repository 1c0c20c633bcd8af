"""The model against itself and against a recording of the published reference.

A recording is a file of the reference's inner values for one prompt and some steps after it. It is compared twice:
    fed      every layer is given the recorded streams and collapse weights of the layer below it, so that errors do
             not pile up and a wrong layer names itself
    chained  the model runs on its own, step by step on the recorded tokens: logits, greedy choices, drafts
Rounding to FP8 and FP4 turns a last-bit difference into a whole code now and then, and a changed code can change a
selection or a route. Chained results are therefore compared statistically, against the noise stored in the recording.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leadline.config.model import ModelConfig
from leadline.config.token_types import TokenType
from leadline.errors import VerificationError
from leadline.model.block import Block
from leadline.model.draft import DraftOutput
from leadline.model.model import Model
from leadline.model.step import Run
from leadline.text.images import prepare_image
from leadline.verify.parts import Part, check, exact, part

RECORDING = "golden.safetensors"

# Layers fed with recorded inputs, same rounding points as the reference. Another summation order alone costs at most
# 0.0004 on average and 0.015 at a single position; the smallest known mistakes cost 0.02 on average.
LAYER_MEAN, LAYER_WORST = 0.002, 0.02
# The mean with positions whose selection swapped a row: one such position was 0.07 away, by the same inputs.
LAYER_MEAN_SWAPPED = 0.004
# Share of positions whose experts may differ under the same inputs: near ties.
CHANGED_ROUTES = 0.01
# Index scores stay fp32 here and are rounded to bf16 in the reference, so entries close to the cut may swap: a few
# positions in a hundred exchange one row, of scores less than one per cent apart. The limit for one set is the one
# stated for other rounding points; on average far less may be exchanged. A layer's limit on single positions holds
# where the selection is equal.
SWAPPED_MEAN, SWAPPED_WORST = 0.01, 0.15
# Logits of the chained run against the noise of the recording: a correct run is about as far away as the reference
# is from itself under other rounding; mistakes are mostly several times as far.
LOGIT_MEDIAN, LOGIT_P95 = 1.5, 4.0
# A greedy choice is binding where its margin is beyond any noise seen; at four times, one in 1400 was still broken.
MARGIN = 6.0
# Tower and aligner: one rounding of attention probabilities to bf16 costs 0.01. Another bicubic filter moves a
# few bytes.
VISION_RMS = 0.01
PATCH_STEP, PATCH_SHARE = 1 / 64, 0.02
# Decoding and prefilling the same tokens: equal on most machines, another summation order where a library chooses
# its kernel by the number of rows. Logit error as in the recordings: median 0.02 there, single steps 0.06.
DECODE_MEDIAN, DECODE_WORST = 0.02, 0.06
DECODE_TOKENS, DECODE_SPLIT = 41, 24  # odd lengths, open groups and more than one selection

Recording = dict[str, Tensor]


def read_recording(path: str | Path) -> Recording:
    """Read a recording.

    Raises: VerificationError: unreadable, or not a recording.
    """
    try:
        recording = load_file(path)
    except (OSError, SafetensorError) as error:
        raise VerificationError(f"{path}: expected a recording in safetensors format, got: {error}") from None
    needed = {"input_ids", "tokens", "embedded", "prefill_stream", "decode_stream", "prefill_logits", "decode_logits"}
    if missing := sorted(needed - recording.keys()):
        raise VerificationError(f"{path}: not a recording, it lacks {', '.join(missing)}; name another file")
    return recording


def check_decode(model: Model) -> list[Part]:
    """Random ids token by token against one prefill of all of them: the model against itself, without a recording."""
    limit = min(model.config.vocab_size, model.config.image_token_id)  # ids below it are text in every vocabulary
    n = min(DECODE_TOKENS, model.config.max_position_embeddings)
    ids = torch.randint(limit, (n,), generator=torch.Generator().manual_seed(0)).to(model.device)
    split = min(DECODE_SPLIT, n - 1)
    once, _, _ = _run_chained(model, ids, ids[:0])
    prompt, steps, _ = _run_chained(model, ids[:split], ids[split:])
    error = _logit_error(torch.cat((prompt, steps)), once)
    checks = (check("median", error.median(), DECODE_MEDIAN), check("worst", error.max(), DECODE_WORST))
    return [part("decode against prefill", error, *checks)]


@torch.inference_mode()
def check_recording(model: Model, recording: Recording) -> list[Part]:
    """All parts of a recording, layer by layer and chained.

    Raises: VerificationError: the recording is incomplete, or of a model with another structure.
    """
    _check_structure(model.config, recording)
    recording = {name: value.to(model.device) for name, value in recording.items()}
    return _check_embedded(model, recording) + _check_layers(model, recording) + _check_chained(model, recording)


def _need(recording: Recording, name: str, *shape: int, ids_below: int | None = None) -> None:
    """Raises: VerificationError unless the tensor is there in its shape, not empty, and holds ids if it should."""
    found = recording.get(name)
    if found is None or tuple(found.shape) != shape or 0 in shape:
        got = "nothing" if found is None else list(found.shape)
        without = ", and one of them has none of it" if 0 in shape else ""
        reason = f"{name}: expected the shape {list(shape)} of this model and prompt{without}, got {got}"
    elif ids_below is not None and (found.is_floating_point() or int(found.min()) < 0 or int(found.max()) >= ids_below):
        reason = f"{name}: expected integers from 0 to {ids_below - 1}, got {found.dtype} up to {found.max()}"
    else:
        return
    raise VerificationError(f"recording: {reason}; it is damaged or belongs to another model")


def _check_structure(c: ModelConfig, recording: Recording) -> None:
    """Raises: VerificationError unless all that is compared is there in its shape, with ids of the vocabulary."""

    def length(name: str) -> int:
        return recording[name].numel() if name in recording else 0

    def run(where: str, rows: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Checks a prompt, its steps, and the rows recorded of both by name; returns both lengths."""
        prompt, steps = length(f"{where}input_ids"), max(0, length(f"{where}tokens") - 1)
        _need(recording, f"{where}input_ids", prompt, ids_below=c.vocab_size)
        _need(recording, f"{where}tokens", steps + 1, ids_below=c.vocab_size)
        for name, row in rows.items():
            _need(recording, f"{where}prefill_{name}", prompt, *row)
            _need(recording, f"{where}decode_{name}", steps, *row)
        return prompt, steps

    logits, mixed, layers = {"logits": (c.vocab_size,)}, (c.hc_mult, c.hidden_size), c.num_hidden_layers
    optional: dict[str, tuple[int, ...]] = {"main_hidden": (c.hidden_size * len(c.dspark_target_layer_ids),)}
    optional |= {f"selected_layer{k}": (c.index_topk,) for k in range(layers)}
    optional |= {f"after_engram_layer{k}": mixed for k in range(layers)}
    prompt, steps = run("", logits | {name: row for name, row in optional.items() if f"prefill_{name}" in recording})
    experts = (c.num_experts_per_tok,)
    for name, row in {"stream": mixed, "pre_mix": mixed[:1], "experts": experts, "expert_weights": experts}.items():
        _need(recording, f"prefill_{name}", layers, prompt, *row)
        _need(recording, f"decode_{name}", steps, layers, *row)
    _need(recording, "embedded", prompt, c.hidden_size)
    _need(recording, "noise_prefill", prompt)
    _need(recording, "noise_decode", steps)
    _need(recording, "top1_margin", steps + 1)
    if "draft_tokens" in recording:
        drafts, shown = c.dspark_block_size if c.num_nextn_predict_layers else 0, length("draft_logits_steps")
        _need(recording, "draft_tokens", steps, drafts + 1, ids_below=c.vocab_size)
        _need(recording, "draft_confidence", steps, drafts)
        _need(recording, "draft_logits_steps", shown, ids_below=steps)
        _need(recording, "draft_logits", shown, drafts, c.vocab_size)
    for where in ("one_token/", "two_tokens/"):
        if f"{where}input_ids" in recording:
            run(where, logits)
    if "token_types" in recording:
        if c.vision is None:
            raise VerificationError("recording: token_types: expected none, as this model reads no images")
        _need(recording, "token_types", prompt)
        sides = recording["image_pixels"].shape[:2] if "image_pixels" in recording else (0, 0)
        _need(recording, "image_pixels", *sides, 3, ids_below=256)


def _check_embedded(model: Model, recording: Recording) -> list[Part]:
    ids, embedded = recording["input_ids"].long(), recording["embedded"]
    types = recording.get("token_types")
    if types is None:
        return [exact("embedded", model.embed[ids], embedded)]
    is_text = types == TokenType.TEXT
    assert model.config.vision is not None
    image = prepare_image(
        Image.fromarray(recording["image_pixels"].to("cpu", torch.uint8).numpy()), model.config.vision
    )
    patch = model.config.vision.patch_size
    _need(recording, "image_patches", len(image.patches), 3, patch, patch)
    patches = recording["image_patches"].flatten(1)
    moved = (image.patches.to(patches) - patches).float().abs()
    rows = model.encode_images([replace(image, patches=patches)])
    expected = embedded[~is_text]
    if rows.shape != expected.shape:
        raise VerificationError(
            f"recording: token_types: expected {len(rows)} positions of the image, got {len(expected)}; it is damaged"
        )
    total = (rows.float() - expected.float()).square().mean().div(expected.float().square().mean()).sqrt()
    beyond = (moved > PATCH_STEP).float().mean()
    return [
        exact("embedded text", model.embed[ids[is_text]], embedded[is_text]),
        part("image patches", moved, check(f"share beyond {PATCH_STEP:.4f}", beyond, PATCH_SHARE)),
        part("image rows", _relative_error(rows, expected), check("relative rms", total, VISION_RMS)),
    ]


def _images(recording: Recording) -> dict[str, Any]:
    """What a run needs for the images of the prompt: token types and the recorded embeddings; nothing for text."""
    if "token_types" not in recording:
        return {}
    types = recording["token_types"].long()
    return {"token_types": types, "image_rows": recording["embedded"][types != TokenType.TEXT]}


def _fed(block: Block, *recorded: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """The block, except that its successor is given the recorded output instead of this one's own."""

    def run(*given: Any) -> tuple[Tensor, ...]:
        h_TSD, pre_TS = block(*given)
        *_, trace = given
        trace("own_stream", h_TSD)
        trace("own_pre_mix", pre_TS)
        return recorded

    return run


def _run_fed(model: Model, recording: Recording) -> dict[str, Tensor]:
    """Traced values of prompt and decoded positions, every layer fed from the recording."""
    seen: defaultdict[str, list[Tensor]] = defaultdict(list)
    ids, tokens = recording["input_ids"].long(), recording["tokens"].long()
    num_steps = recording["decode_stream"].shape[0]
    cache = model.new_cache(max_tokens=len(ids) + num_steps, max_step_tokens=max(len(ids), num_steps))
    sequence = cache.open()

    def step(token_ids: Tensor, stream: Tensor, pre_mix: Tensor, images: dict[str, Any]) -> None:
        fed = copy.copy(model)
        fed.layers = [copy.copy(layer) for layer in model.layers]
        for k, layer in enumerate(fed.layers):
            layer.block = _fed(layer.block, stream[k], pre_mix[k])  # type: ignore[assignment]
        run = Run(sequence, token_ids, logits_from=0, prompt_length=len(ids), prefill="full", **images)
        fed.step([run], cache, lambda name, value: seen[name].append(value))

    step(ids, recording["prefill_stream"], recording["prefill_pre_mix"], _images(recording))
    # All decoded positions in one run: what a position sees does not depend on how tokens are cut into runs.
    stream, pre_mix = (recording[f"decode_{name}"].transpose(0, 1) for name in ("stream", "pre_mix"))
    step(tokens[:num_steps], stream, pre_mix, {})
    sequence.close()
    return {name: torch.cat(values) for name, values in seen.items()}


def _check_layers(model: Model, recording: Recording) -> list[Part]:
    seen = _run_fed(model, recording)

    def recorded(name: str, layer: int | None = None) -> Tensor:
        prefill, decode = recording[f"prefill_{name}"], recording[f"decode_{name}"]
        return torch.cat((prefill, decode) if layer is None else (prefill[layer], decode[:, layer]))

    def near(name: str, found: Tensor, expected: Tensor, is_same: Tensor | None = None) -> Part:
        error = _relative_error(found, expected)
        if is_same is None or bool(is_same.all()):
            return part(name, error, check("mean", error.mean(), LAYER_MEAN), check("worst", error.max(), LAYER_WORST))
        mean = check("mean", error.mean(), LAYER_MEAN_SWAPPED)
        error_same = error.masked_fill(~is_same, 0.0)
        same = check("mean, same selection", error_same.sum() / is_same.sum(), LAYER_MEAN)
        return part(name, error, mean, same, check("worst, same selection", error_same.max(), LAYER_WORST))

    selections = {
        k: (seen[f"layer{k}.selected"], recorded(f"selected_layer{k}"))
        for k in range(model.config.num_hidden_layers)
        if f"prefill_selected_layer{k}" in recording
    }
    equal_sets = {k: _overlap(*both) == 1 for k, both in selections.items()}
    parts, routes_equal, weights = [], [], []
    for k in range(model.config.num_hidden_layers):
        if f"prefill_after_engram_layer{k}" in recording:
            after = recorded(f"after_engram_layer{k}")
            parts.append(near(f"layer {k} n-gram module", seen[f"layer{k}.after_engram"], after))
        source = model.plan.layers[k].index_source
        is_same = None if source is None else equal_sets[source]
        parts.append(near(f"layer {k} stream", seen[f"layer{k}.own_stream"], recorded("stream", k), is_same))
        parts.append(near(f"layer {k} pre_mix", seen[f"layer{k}.own_pre_mix"], recorded("pre_mix", k), is_same))
        same = (seen[f"layer{k}.experts"] == recorded("experts", k)).all(-1)
        routes_equal.append(same)
        given = recorded("expert_weights", k)
        weights.append((torch.where(same[:, None], seen[f"layer{k}.expert_weights"], given), given))
    routes_changed = 1 - torch.cat(routes_equal).float()
    parts.append(part("experts", routes_changed, check("share changed", routes_changed.mean(), CHANGED_ROUTES)))
    parts.append(near("expert_weights", torch.cat([w[0] for w in weights]), torch.cat([w[1] for w in weights])))
    if selections:
        swapped = 1 - torch.cat([_overlap(*both) for both in selections.values()])
        limits = (check("mean", swapped.mean(), SWAPPED_MEAN), check("worst", swapped.max(), SWAPPED_WORST))
        parts.append(part("selected rows", swapped, *limits))
    if "prefill_main_hidden" in recording:
        parts.append(near("main_hidden", seen["main_hidden"], recorded("main_hidden")))
    return parts


def _overlap(found_TK: Tensor, expected_TK: Tensor) -> Tensor:
    """Per line, the share of expected rows that were found; -1 is none, and two empty lines agree."""
    is_row = expected_TK >= 0
    is_found = (expected_TK[:, :, None] == found_TK[:, None, :]).any(-1) & is_row
    wanted, got = is_row.sum(-1), (found_TK >= 0).sum(-1)
    return torch.where((wanted + got) == 0, 1.0, is_found.sum(-1) / torch.maximum(wanted, got).clamp_min(1))


@torch.inference_mode()
def _run_chained(
    model: Model, ids: Tensor, tokens: Tensor, images: Mapping[str, Any] | None = None, drafts: Tensor | None = None
) -> tuple[Tensor, Tensor, list[DraftOutput]]:
    """Logits of a whole prompt and of single steps on `tokens`, and drafts after every step, given those before."""
    cache = model.new_cache(max_tokens=len(ids) + len(tokens), max_step_tokens=len(ids), poison=True)
    sequence = cache.open()
    run = Run(sequence, ids, logits_from=0, prompt_length=len(ids), prefill="full", **(images or {}))
    prefill = model.step([run], cache).logits[0]
    steps, drafted = [prefill[:0]], []
    for t in range(len(tokens)):
        run = Run(sequence, tokens[t : t + 1], logits_from=sequence.length, prompt_length=len(ids))
        steps.append(model.step([run], cache).logits[0])
        if drafts is not None:
            line = drafts[t]
            drafted.append(model.draft(cache, [sequence], line[:1], lambda i, _, line=line: line[i + 1 : i + 2]))  # type: ignore[misc]
    sequence.close()
    return prefill, torch.cat(steps), drafted


def _check_chained(model: Model, recording: Recording) -> list[Part]:
    ids, tokens = recording["input_ids"].long(), recording["tokens"].long()
    drafts = recording["draft_tokens"].long() if "draft_tokens" in recording else None
    expected = recording["decode_logits"]
    prefill, decode, drafted = _run_chained(model, ids, tokens[: len(expected)], _images(recording), drafts)
    noise_prefill, noise_decode = recording["noise_prefill"], recording["noise_decode"]
    noise = noise_decode.median()

    def near(name: str, error: Tensor, noise: Tensor = noise) -> Part:
        error, unit = error.flatten(), float(noise)
        median = check("median", error.median(), LOGIT_MEDIAN * unit)
        return part(name, error, median, check("95 %", error.quantile(0.95), LOGIT_P95 * unit))

    parts = [
        near("prefill logits", _logit_error(prefill, recording["prefill_logits"]), noise_prefill.median()),
        near("decode logits", _logit_error(decode, expected)),
    ]
    chosen = torch.cat((prefill[-1:], decode)).argmax(-1)
    spread = torch.cat((recording["prefill_logits"][-1:], expected)).std(-1)
    allowed = MARGIN * torch.cat((noise_prefill[-1:], noise_decode)) * spread
    parts.append(_broken("greedy tokens", (chosen != tokens) & (recording["top1_margin"] > allowed)))
    if drafts is not None and drafted:
        logits, confidence = (torch.cat([getattr(d, name) for d in drafted]) for name in ("logits", "confidence"))
        at = recording["draft_logits_steps"].long()
        parts.append(near("draft logits", _logit_error(logits[at], recording["draft_logits"])))
        wanted = recording["draft_confidence"]
        parts.append(near("draft confidence", (confidence - wanted).abs() / wanted.std()))
        best = logits.topk(2).values
        is_clear = best[..., 0] - best[..., 1] > MARGIN * noise_decode[:, None] * logits.std(-1)
        parts.append(_broken("draft tokens", (logits.argmax(-1) != drafts[:, 1:]) & is_clear))
    for name in ("one_token", "two_tokens"):
        if f"{name}/input_ids" in recording:
            expected = torch.cat((recording[f"{name}/prefill_logits"], recording[f"{name}/decode_logits"]))
            steps = recording[f"{name}/tokens"].long()[: len(recording[f"{name}/decode_logits"])]
            prompt = recording[f"{name}/input_ids"].long()
            error = _logit_error(torch.cat(_run_chained(model, prompt, steps)[:2]), expected)
            short = near(f"{name} logits", error)  # too few positions are the prompt's for these to matter there
            worst = check("prompt, worst", error[: len(prompt)].max(), LOGIT_P95 * float(noise))
            parts.append(replace(short, checks=(*short.checks, worst)))
    return parts


def _relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """Per position: rms of the difference over rms of the expected values."""
    found, expected = found.float().flatten(1), expected.float().flatten(1)
    return ((found - expected).square().mean(1) / expected.square().mean(1)).sqrt()


def _logit_error(found: Tensor, expected: Tensor) -> Tensor:
    """Per position: rms of the difference over the standard deviation of the expected logits."""
    return (found - expected).square().mean(-1).sqrt() / expected.std(-1)


def _broken(name: str, is_broken: Tensor) -> Part:
    """Choices that differ in spite of a clear margin."""
    return part(name, is_broken, check("broken", is_broken.sum(), 0.0))
