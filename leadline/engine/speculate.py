"""Lossless speculation: a drafter proposes tokens, one step of the model judges them all.

For every proposed token, drawn from q, the model's own distribution p is known after the step. The token is accepted
with probability min(1, p/q); at the first rejection the token is drawn from the positive part of p - q instead; if all
are accepted, one more token comes from p. What comes out is distributed exactly as without drafts. p and q both come
after temperature and filters. Greedy requests are the same rule with all mass on one token: a draft is kept while it
equals the model's choice.

Source: architecture.md 4.14; Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leadline.config.checks import check_integer, check_number
from leadline.engine.model_api import Model
from leadline.engine.sampler import Draw, Sampler, Want, check_finite, draw
from leadline.errors import NumericsError, RequestError
from leadline.text.grammar import Matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How to draft. `max_drafts`: most tokens verified a step, None for the model's block. `min_confidence`: cut before
    the first draft whose estimated chance of acceptance is lower; 0 verifies all. adaptive: of what is left verify only
    as many as raise tokens per second (`DraftBudget`); a sampled request with a seed verifies all, so that its answer
    depends on nothing else."""

    max_drafts: int | None = None
    min_confidence: float = 0.0
    adaptive: bool = False

    def limit(self, block_size: int) -> int:
        """Drafts per step with a model that proposes `block_size` at a time. Raises RequestError for a bad value."""
        drafts = block_size if self.max_drafts is None else self.max_drafts
        check_integer("max_drafts", drafts, 1, block_size)
        check_number("min_confidence", self.min_confidence, 0, 1)
        if type(self.adaptive) is not bool:
            raise RequestError(f"adaptive: expected true or false, got {self.adaptive!r}")
        return drafts


@dataclass(slots=True)
class Proposal:
    """Drafts for one sequence. `weights`: what each draft was drawn from, [V] (`sampler.weights`), empty for a greedy
    request. `chances`: of each draft the estimated chance of acceptance, given that those before it are accepted."""

    token_ids: list[int]
    weights: list[Tensor]
    chances: list[float] = field(default_factory=list)

    def keep(self, count: int) -> None:
        """Drop all drafts but the first `count`."""
        del self.token_ids[count:], self.weights[count:], self.chances[count:]


class StepRows:
    """Rows of logits, looked at in one pass.

    logits_NV: float [N, V]. best: the most likely id of each row, the lowest among equals.
    """

    def __init__(self, logits_NV: Tensor) -> None:
        self.logits_NV = logits_NV
        low_N, high_N = logits_NV.aminmax(dim=-1)
        self._finite: list[bool] = (low_N - high_N).isfinite().tolist()
        self.best: list[int] = logits_NV.argmax(dim=-1).tolist()

    def check(self, row: int, position: int) -> None:
        """Raises as `check_finite`."""
        if not self._finite[row]:
            check_finite(self.logits_NV[row], position)


def propose(
    model: Model,
    cache: Any,
    sequences: Sequence[Any],
    samplers: Sequence[Sampler],
    anchors: Sequence[int],
    limits: Sequence[int],
    min_confidence: float = 0.0,
) -> list[Proposal | NumericsError]:
    """Drafts for sequences whose next token (the anchor, at position `sequence.length`) is sampled but not processed.

    limits: most drafts wanted of each sequence, at most the model's block; 0 is allowed.
    Returns: per sequence its proposal, or the error that its broken logits raise.
    """
    proposals = [Proposal([], []) for _ in sequences]
    errors: dict[int, NumericsError] = {}
    lengths = [sequence.length for sequence in sequences]

    def choose(i: int, logits_BV: Tensor) -> Tensor:
        chosen = [0] * len(sequences)  # where nothing is wanted any more the drafter still needs some id
        rows = StepRows(logits_BV)
        wants: list[Want] = []
        for b, sampler in enumerate(samplers):
            if i >= limits[b] or b in errors:
                continue
            position = lengths[b] + 1 + i
            try:
                rows.check(b, position)
            except NumericsError as error:
                errors[b] = error
                continue
            if sampler.is_plain(position):
                chosen[b] = rows.best[b]
            else:
                wants.append(Want(b, sampler, position))
            proposals[b].token_ids.append(chosen[b])
        for want, (token_id, weights_V) in zip(wants, draw(logits_BV, wants, Draw.DRAFT), strict=True):
            chosen[want.row] = proposals[want.row].token_ids[-1] = token_id
            if not want.sampler.is_greedy:
                proposals[want.row].weights.append(weights_V)
        return torch.tensor(chosen, dtype=torch.int64, device=logits_BV.device)

    anchor_ids_B = torch.tensor(anchors, dtype=torch.int64)
    output = model.draft(cache, list(sequences), anchor_ids_B, choose)
    for proposal, chances in zip(proposals, output.confidence.sigmoid().tolist(), strict=True):
        proposal.chances = chances[: len(proposal.token_ids)]
        # Confidence i is known before draft i is drawn, so that the cut cannot favour some tokens.
        proposal.keep(next((i for i, c in enumerate(proposal.chances) if c < min_confidence), len(chances)))
    return [errors.get(b, proposal) for b, proposal in enumerate(proposals)]


Acceptance = Generator[Want, int, list[int]]  # asks for a token and gets it, until it knows all of its sequence


def accept(
    sampler: Sampler, rows: StepRows, first: int, proposal: Proposal, position: int, matcher: Matcher | None = None
) -> Acceptance:
    """The tokens from `position` on: the accepted drafts and one token of the model's own. For `accept_all`.

    rows: those from `first` on are the model's logits for `position`, `position + 1`, ... given anchor and drafts, one
    more than there are drafts. matcher: advanced by the tokens; its mask cuts the model's distribution.
    Returns: 1 to drafts + 1 ids. With no drafts this is ordinary sampling.
    Raises: NumericsError if logits that matter are not finite; rows after a rejection do not matter.
    """
    tokens: list[int] = []
    for i in range(len(proposal.token_ids) + 1):
        row, at = first + i, position + i
        draft = proposal.token_ids[i] if i < len(proposal.token_ids) else None
        mask_V = None if matcher is None else matcher.mask()
        rows.check(row, at)
        if mask_V is None and sampler.is_plain(at):
            token = rows.best[row]
        else:
            weights_V = proposal.weights[i] if i < len(proposal.weights) else None
            token = yield Want(row, sampler, at, mask_V, draft, weights_V)
        tokens.append(token)
        if matcher is not None:
            matcher.advance(token)
        if token != draft:
            break
    return tokens


def accept_all(rows: StepRows, acceptances: Sequence[Acceptance]) -> list[list[int] | Exception]:
    """What each of them returns or raises. Their tokens are drawn together, one of each at a time."""
    results: list[list[int] | Exception] = [[] for _ in acceptances]
    answers: dict[int, Any] = dict.fromkeys(range(len(acceptances)))
    while answers:
        wants: dict[int, Want] = {}
        for i, answer in answers.items():
            try:
                wants[i] = acceptances[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
            except Exception as error:
                results[i] = error
        drawn = (token for token, _ in draw(rows.logits_NV, list(wants.values())))
        answers = dict(zip(wants, drawn, strict=True))
    return results


class DraftBudget:
    """How many drafts of a batch are worth verifying: as many as still raise tokens per second.

    A step of B tokens takes about base + slope * B seconds, estimated from the steps so far. A draft adds its chance of
    being accepted to the tokens of a step, and `slope` to its time. Drafts are taken by falling chance until one lowers
    the rate; there it stops, so that the choice never depends on tokens drawn later (architecture.md 4.14).
    """

    _FORGET = 0.95  # weight of the past, per step: estimates follow a growing context

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, x, y, x*x, x*y over the steps, x tokens and y seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        new = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._sums = [self._FORGET * old + value for old, value in zip(self._sums, new, strict=True)]

    def lengths(self, chances: Sequence[Sequence[float]], num_tokens: int) -> list[int]:
        """Per sequence how many of its drafts to verify.

        chances: as `Proposal.chances`. num_tokens: tokens of the step without drafts.
        """
        kept = [len(line) for line in chances]
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        if spread <= 1e-6 * count * xx:  # all steps alike so far: nothing to judge by
            return kept
        slope = max(0.0, (count * xy - x * y) / spread)
        seconds = max(1e-9, (y - slope * x) / count) + slope * num_tokens
        expected = float(len(chances))
        reach = [(r, j, math.prod(line[: j + 1])) for r, line in enumerate(chances) for j in range(len(line))]
        reach.sort(key=lambda item: (-item[2], item[1], item[0]))
        kept = [0] * len(chances)
        for r, j, chance in reach:
            if chance * seconds <= expected * slope:
                break
            expected += chance
            seconds += slope
            kept[r] = j + 1
        return kept
