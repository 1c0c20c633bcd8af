"""Lossless speculation: a drafter proposes tokens, one step of the model judges them all.

For every proposed token, drawn from q, the model's own distribution p is known after the step. The token is accepted
with probability min(1, p/q); at the first rejection the token is drawn from the positive part of p - q instead; if all
are accepted, one more token comes from p. What comes out is distributed exactly as without drafts. p and q both come
after temperature and filters. Greedy requests are the same rule with all mass on one token: a draft is kept while it
equals the model's choice.

Source: architecture.md 4.14; Leviathan et al., arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.engine.model_api import Model
from leadline.engine.sampler import Draw, Sampler, pick
from leadline.errors import NumericsError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How to draft. `max_drafts`: most tokens verified a step, None for the model's block. `min_confidence`: cut before
    the first draft whose estimated chance of acceptance is lower; 0 verifies all."""

    max_drafts: int | None = None
    min_confidence: float = 0.0

    def limit(self, block_size: int) -> int:
        """Drafts per step with a model that proposes `block_size` at a time. Raises RequestError for illegal values."""
        drafts = block_size if self.max_drafts is None else self.max_drafts
        if not 1 <= drafts <= block_size:
            raise RequestError(f"max_drafts: expected 1 to {block_size} (the model's block), got {self.max_drafts}")
        if not 0 <= self.min_confidence <= 1:
            raise RequestError(f"min_confidence: expected a number from 0 to 1, got {self.min_confidence}")
        return drafts


@dataclass(slots=True)
class Proposal:
    """Drafts for one sequence. `probs`: the distribution [V] of each draft, empty for a greedy request."""

    token_ids: list[int]
    probs: list[Tensor]


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

    def choose(i: int, logits_BV: Tensor) -> Tensor:
        chosen = []
        for b, (sampler, proposal) in enumerate(zip(samplers, proposals, strict=True)):
            token_id = 0  # where nothing is wanted any more the drafter still needs some id
            if i < limits[b] and b not in errors:
                position = sequences[b].length + 1 + i
                try:
                    if sampler.is_greedy:
                        token_id = sampler.greedy(logits_BV[b], position)
                    else:
                        proposal.probs.append(sampler.probs(logits_BV[b], position))
                        token_id = pick(proposal.probs[-1], sampler.uniform(Draw.DRAFT, position))
                    proposal.token_ids.append(token_id)
                except NumericsError as error:
                    errors[b] = error
            chosen.append(token_id)
        return torch.tensor(chosen, dtype=torch.int64, device=logits_BV.device)

    anchor_ids_B = torch.tensor(anchors, dtype=torch.int64)
    output = model.draft(cache, list(sequences), anchor_ids_B, choose)
    if min_confidence > 0:
        for proposal, chances in zip(proposals, output.confidence.sigmoid().tolist(), strict=True):
            # Confidence i is known before draft i is drawn, so that the cut cannot favour some tokens.
            keep = next((i for i, chance in enumerate(chances) if chance < min_confidence), len(chances))
            del proposal.token_ids[keep:], proposal.probs[keep:]
    return [errors.get(b, proposal) for b, proposal in enumerate(proposals)]


def accept(sampler: Sampler, logits_LV: Tensor, proposal: Proposal, position: int) -> list[int]:
    """The tokens from `position` on: the accepted drafts and one token of the model's own.

    logits_LV: [drafts + 1, V] f32, the model's logits for `position`, `position + 1`, ... given anchor and drafts.
    Returns: 1 to drafts + 1 ids. With no drafts this is ordinary sampling.
    Raises: NumericsError if logits that matter are not finite; rows after a rejection do not matter.
    """
    tokens: list[int] = []
    for i, draft in enumerate(proposal.token_ids):
        if sampler.is_greedy:
            token = sampler.greedy(logits_LV[i], position + i)
        else:
            p_V, q_V = sampler.probs(logits_LV[i], position + i), proposal.probs[i].to(logits_LV.device)
            if sampler.uniform(Draw.ACCEPT, position + i) * float(q_V[draft]) < float(p_V[draft]):
                token = draft
            else:
                excess_V = (p_V - q_V).clamp_(min=0.0)
                # p and q that differ by rounding alone may leave nothing; then they are the same distribution.
                token = pick(excess_V, sampler.uniform(Draw.TOKEN, position + i)) if bool(excess_V.any()) else draft
        tokens.append(token)
        if token != draft:
            return tokens
    last = len(proposal.token_ids)
    return [*tokens, sampler.token(logits_LV[last], position + last)]
