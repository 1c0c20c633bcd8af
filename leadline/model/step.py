"""One packed step: runs of consecutive positions of several sequences, side by side (decision 0003).

A step has no padding and no start position. Every row knows its own absolute position, and visibility is a formula of
it. What a layer works on is an `ActiveRows`: all rows of the step, or, in the upper layers of a trimmed prefill, the
last rows of each run (architecture.md section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from leadline.cache.pool import STATE_ROWS, KVCache
from leadline.cache.sequence import Sequence
from leadline.config.layers import LayerPlan
from leadline.config.model import ModelConfig
from leadline.errors import PromptError, RequestError
from leadline.ops import rope

Prefill = Literal["halo", "replay", "full"]
PREFILL_MODES: tuple[str, ...] = get_args(Prefill)
TEXT = -1  # token type of everything outside image spans


@dataclass(slots=True)
class Run:
    """Consecutive tokens of one sequence, from its present length on.

    Args:
        sequence: an open sequence with room; the run starts at `sequence.length`.
        token_ids: [n] int64, n >= 1.
        logits_from: first absolute position whose logits are wanted; at or beyond the run's end: none.
        prompt_length: length of the prompt that this run belongs to, or anything up to the run's start once the prompt
            is done. All runs of one prompt name the same number: it decides what the upper layers may leave out.
        prefill: "halo" (exact: upper layers run on the rows that can still matter), "replay" (upper layers run on the
            prompt's last window, as the model's authors deploy it: approximate) or "full" (every layer on every row).
        image_rows: [number of image tokens, D] bf16 embeddings of the tokens with a type other than -1, in order.
        token_types: [n] int64, -1 for text, 0 START, 1 IMAGE, 2 NEWLINE, 3 END; None = all text.
        keep_from: a trimmed prompt ("halo") stores every layer's window rows from this position on, if that is before
            its last window; None: the last window is enough. Who will resume at the last page border names its window.
    """

    sequence: Sequence
    token_ids: Tensor
    logits_from: int
    prompt_length: int
    prefill: Prefill = "halo"
    image_rows: Tensor | None = None
    token_types: Tensor | None = None
    keep_from: int | None = None


class Turns:
    """Rotations of a set of positions, for the window layers and for the layers with compressed rows."""

    def __init__(self, position_T: Tensor, freqs: dict[str, Tensor]) -> None:
        self._position_T = position_T
        self._freqs = freqs
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, theta: str) -> Tensor:
        made = self._made.get(theta)
        if made is None:
            made = self._made[theta] = rope.turns(self._position_T, self._freqs[theta])
        return made


class ActiveRows:
    """The rows of a step that a layer works on: of each run the positions `starts[i]..ends[i]-1`.

    `position_T` int64; `offsets[i]` is the first row of run i, `offsets[-1]` the number of rows.
    """

    def __init__(self, step: StepBatch, starts: tuple[int, ...]) -> None:
        self._step = step
        self.starts = starts
        self.ends = step.ends
        self.offsets = [0]
        for start, end in zip(starts, step.ends, strict=True):
            self.offsets.append(self.offsets[-1] + end - start)
        self.stored_rows: Tensor | None = None  # window pool rows of these positions, made when first stored
        self._windows: dict[tuple[int, ...], tuple[Tensor | None, Tensor]] = {}
        self._visible: dict[int, Tensor] = {}

    @property
    def num_rows(self) -> int:
        return self.offsets[-1]

    @cached_property
    def position_T(self) -> Tensor:
        parts = [torch.arange(s, e) for s, e in zip(self.starts, self.ends, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._step.device)

    @cached_property
    def turns(self) -> Turns:
        return Turns(self.position_T, self._step.freqs)

    def narrow(self, outer: ActiveRows) -> Tensor | None:
        """Index of these rows within `outer`, int64 [rows]; None if both are the same rows."""
        if outer is self:
            return None
        parts = [
            torch.arange(outer.offsets[i + 1] - (self.offsets[i + 1] - self.offsets[i]), outer.offsets[i + 1])
            for i in range(len(self.starts))
        ]
        return torch.cat(parts).to(self._step.device)

    def visible_T(self, ratio: int) -> Tensor:
        """Compressed rows that each row sees: (p + 1) // ratio, int64."""
        visible = self._visible.get(ratio)
        if visible is None:
            visible = self._visible[ratio] = (self.position_T + 1) // ratio
        return visible

    def windows(self, floors: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        """Window rows that these rows see as queries.

        Row at position p of run i sees positions max(floors[i], p - W + 1)..p.

        Returns:
            pool_row_U: int64, pool rows of all positions seen by any of the rows; None for a single row, whose
                indices name pool rows directly.
            window_idx_TW: int64, indices into `pool_row_U`, -1 = nothing.
        """
        made = self._windows.get(floors)
        if made is None:
            made = self._windows[floors] = self._make_windows(floors)
        return made

    def _make_windows(self, floors: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        width = self._step.window
        if self.num_rows == 1:
            i = self.offsets.index(1) - 1
            end = self.ends[i]
            first = max(end - width, 0)
            base = max(first, floors[i])
            seen_U = self._step.runs[i].sequence.window_rows(base, end)
            return None, pad(seen_U, (base - first, width - (end - first)), value=-1).unsqueeze(0)
        pool_rows, idx = [], []
        num_seen = 0
        column_W = torch.arange(width, device=self._step.device)
        for i, (start, end, floor) in enumerate(zip(self.starts, self.ends, floors, strict=True)):
            if start == end:
                continue
            base = max(floor, start - width + 1, 0)
            pool_rows.append(self._step.runs[i].sequence.window_rows(base, end))
            position_T1 = self.position_T[self.offsets[i] : self.offsets[i + 1], None]
            seen_TW = (position_T1 - (width - 1)).clamp_min(0) + column_W
            hidden_TW = (seen_TW > position_T1) | (seen_TW < base)
            idx.append((seen_TW + (num_seen - base)).masked_fill_(hidden_TW, -1))
            num_seen += end - base
        if not idx:
            empty = torch.empty(0, dtype=torch.int64, device=self._step.device)
            return empty, empty.view(0, width).expand(0, width)
        return torch.cat(pool_rows), torch.cat(idx)


class NewRows:
    """Compressed rows of one ratio that a step completes.

    Attributes:
        token_idx_N: row of the step that completes each compressed row.
        number_N: logical row number; slot order follows the runs.
        position_N: position of the group's first token, where the row is rotated.
    """

    def __init__(self, step: StepBatch, ratio: int) -> None:
        position_T = step.all_rows.position_T
        if ratio == 1:
            self.token_idx_N = torch.arange(position_T.shape[0], device=step.device)
        else:
            self.token_idx_N = ((position_T + 1) % ratio == 0).nonzero().flatten()
        self.number_N = position_T[self.token_idx_N] // ratio
        self.position_N = self.number_N * ratio
        self.turns = Turns(self.position_N, step.freqs)
        counts = [end // ratio - start // ratio for start, end in zip(step.starts, step.ends, strict=True)]
        pool_rows = [
            run.sequence.pool_rows(ratio)[end // ratio - count : end // ratio]
            for run, end, count in zip(step.runs, step.ends, counts, strict=True)
        ]
        self.pool_row_N = torch.cat(pool_rows)


class StepBatch:
    """Everything that the layers need to know about a step; built once, passed down, never changed.

    `rows[k]` are the rows that layer k works on, `rows[num_layers]` those whose logits are wanted.

    Raises:
        PromptError: token ids outside the vocabulary, an empty run, image rows that do not fit the token types.
        RequestError: a prefill mode or range that the sequence's stored windows cannot serve.
    """

    def __init__(
        self, runs: list[Run], config: ModelConfig, plan: LayerPlan, cache: KVCache, freqs: dict[str, Tensor]
    ) -> None:
        self.runs = runs
        self.config = config
        self.plan = plan
        self.cache = cache
        self.freqs = freqs
        self.window = config.sliding_window
        self.device = cache.device
        for run in runs:
            _check_run(run, config)
        self.starts = tuple(run.sequence.length for run in runs)
        self.ends = tuple(s + run.token_ids.shape[0] for s, run in zip(self.starts, runs, strict=True))
        ids = [run.token_ids for run in runs]
        self.token_ids_T = (ids[0] if len(ids) == 1 else torch.cat(ids)).to(self.device)
        self.image_T = self._image_mask()
        self._new_rows: dict[int, NewRows] = {}
        self.all_rows = ActiveRows(self, self.starts)
        made: dict[tuple[int, ...], ActiveRows] = {self.starts: self.all_rows}
        needed = [
            layer_starts(
                run.prefill,
                run.prompt_length,
                run.logits_from,
                run.keep_from,
                num_layers=config.num_hidden_layers,
                split_layer=plan.split_layer,
                window=self.window,
            )
            for run in runs
        ]
        self.needed = needed
        self.rows: list[ActiveRows] = []
        for k in range(config.num_hidden_layers + 1):
            starts = tuple(
                min(max(need[k], start), end) for need, start, end in zip(needed, self.starts, self.ends, strict=True)
            )
            if starts not in made:
                made[starts] = ActiveRows(self, starts)
            self.rows.append(made[starts])
        self._check_windows()
        self._reserve()

    def _reserve(self) -> None:
        try:
            for run, end in zip(self.runs, self.ends, strict=True):
                run.sequence.reserve(end)
        except BaseException:
            for run in self.runs:
                run.sequence.trim()
            raise

    def _image_mask(self) -> Tensor | None:
        if all(run.token_types is None for run in self.runs):
            return None
        parts = [
            torch.zeros(run.token_ids.shape[0], dtype=torch.bool)
            if run.token_types is None
            else run.token_types.cpu() != TEXT
            for run in self.runs
        ]
        mask = torch.cat(parts).to(self.device)
        return mask if bool(mask.any()) else None

    def floors(self, layer: int) -> tuple[int, ...]:
        """First window position that queries of `layer` may see, by run: above 0 only under `replay`."""
        return tuple(
            max(0, run.prompt_length - self.window)
            if run.prefill == "replay" and layer > self.plan.split_layer and start < run.prompt_length
            else 0
            for run, start in zip(self.runs, self.starts, strict=True)
        )

    def _check_windows(self) -> None:
        # A trimmed prefill leaves window rows out. Continuing such a sequence needs those that the next rows look at.
        for i, run in enumerate(self.runs):
            start = self.starts[i]
            for k in range(self.config.num_hidden_layers):
                first_query = self.rows[k + 1].starts[i]
                if first_query == self.ends[i]:
                    continue
                first_seen = max(0, first_query - self.window + 1, self.floors(k)[i])
                if first_seen < min(start, run.sequence.window_from[k]):
                    raise RequestError(
                        f"run at position {start}: layer {k} needs window rows from position {first_seen} on, but a "
                        f"trimmed prefill stored them from {run.sequence.window_from[k]} on; give every run of the "
                        "prompt the same prompt_length and logits_from, or use prefill='full'"
                    )

    def new_rows(self, ratio: int) -> NewRows:
        """Compressed rows of this ratio that the step completes."""
        rows = self._new_rows.get(ratio)
        if rows is None:
            rows = self._new_rows[ratio] = NewRows(self, ratio)
        return rows

    @cached_property
    def slot_T(self) -> Tensor:
        slots = torch.tensor([run.sequence.slot for run in self.runs], device=self.device)
        if len(self.runs) == 1:
            return slots.expand(self.ends[0] - self.starts[0])
        lengths = torch.tensor([e - s for s, e in zip(self.starts, self.ends, strict=True)], device=self.device)
        return slots.repeat_interleave(lengths)

    @cached_property
    def is_first_T(self) -> Tensor:
        """Whether a row is the first of its run."""
        first = torch.zeros(self.all_rows.num_rows, dtype=torch.bool, device=self.device)
        first[self.all_rows.offsets[:-1]] = True
        return first

    def ring_tail(self, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last `ring` rows of each run: (row of the step, slot, position mod ring), for rings over positions."""
        o = self.all_rows.offsets
        parts = [torch.arange(max(o[i], o[i + 1] - ring), o[i + 1]) for i in range(len(self.runs))]
        idx = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.device)
        return idx, self.slot_T[idx], self.all_rows.position_T[idx] % ring

    @cached_property
    def state_tail(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ring_tail(STATE_ROWS)

    def finish(self) -> None:
        """Make the step's tokens part of their sequences."""
        for i, run in enumerate(self.runs):
            seq = run.sequence
            for k in range(self.config.num_hidden_layers):
                first = self.rows[k].starts[i]
                # Stored rows must be gapless up to the end: rows left out here make older ones unreachable.
                if first > self.starts[i]:
                    seq.window_from[k] = first
            seq.advance(self.ends[i])


def layer_starts(
    prefill: Prefill,
    prompt_length: int,
    logits_from: int,
    keep_from: int | None,
    *,
    num_layers: int,
    split_layer: int,
    window: int,
) -> list[int]:
    """First position that each layer has to work on, and last of all the first whose logits are wanted.

    The first four arguments are those of `Run`.

    Layers up to `split_layer` see everything, because compressed rows need every token. Above it a layer must store
    the window rows of the prompt's last window and whatever the layer above it looks at: a halo that shrinks by
    window - 1 rows per layer (architecture.md 6.2); under "replay" only the last window (6.3). Positions, not lengths:
    the answer does not depend on how the prompt is cut into runs.
    """
    last_window = max(0, prompt_length - window)
    kept = last_window if keep_from is None else min(last_window, keep_from)
    starts = [0] * (num_layers + 1)
    starts[num_layers] = max(0, logits_from)
    for k in range(num_layers - 1, split_layer, -1):
        if prefill == "halo":
            starts[k] = max(0, min(kept, starts[k + 1] - (window - 1)))
        elif prefill == "replay":
            starts[k] = last_window
    return starts


def _check_run(run: Run, config: ModelConfig) -> None:
    ids = run.token_ids
    if ids.dtype != torch.int64 or ids.ndim != 1 or ids.shape[0] == 0:
        raise PromptError(f"token_ids: expected int64 [n] with n >= 1, got {ids.dtype} {list(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise PromptError(
            f"token_ids: id {low if low < 0 else high} is outside the vocabulary 0..{config.vocab_size - 1}"
        )
    if run.prefill not in PREFILL_MODES:
        raise RequestError(f"prefill: expected one of {', '.join(PREFILL_MODES)}, got {run.prefill!r}")
    if not run.sequence.is_open:
        raise RequestError("run: its sequence is closed; open a new one")
    end = run.sequence.length + ids.shape[0]
    if end > config.max_position_embeddings:
        raise PromptError(
            f"sequence of {end} tokens exceeds the context of {config.max_position_embeddings}; shorten the prompt"
        )
    last_window = max(0, run.prompt_length - config.sliding_window)
    if run.prefill == "replay" and run.sequence.length < run.prompt_length and run.logits_from < last_window:
        raise RequestError(
            f"logits_from {run.logits_from} lies before the prompt's last window, which starts at {last_window}; "
            "prefill='replay' computes nothing there, use 'full' or 'halo'"
        )
    num_images = 0 if run.token_types is None else int((run.token_types != TEXT).sum())
    num_rows = 0 if run.image_rows is None else run.image_rows.shape[0]
    if run.token_types is not None and run.token_types.shape != ids.shape:
        raise PromptError(f"token_types: expected {list(ids.shape)} like token_ids, got {list(run.token_types.shape)}")
    if num_images != num_rows:
        raise PromptError(f"image_rows: {num_images} image tokens but {num_rows} embedding rows")
