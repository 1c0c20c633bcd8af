"""Logits to tokens, for all rows of a step that are sampled.

S rows, V vocabulary. A sequence's random numbers are a hash of (seed, sample, purpose, position). A distribution is a
row of whole numbers, whose sums are exact in any order. So a token depends on nothing but its own logits and the seed:
not on neighbours, batch or earlier draws.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from leadline.config.sampling import SamplingParams
from leadline.errors import NumericsError

UNIT = 2**45  # weight of the most likely token: sums over 2^17 tokens fit int64, what is 2^46 times less likely is 0
GREEDY_TEMPERATURE = 1e-300  # leaves the most likely tokens alone
CHUNK = 2**18  # elements that are worked on at a time: larger temporaries leave the processor's cache


class Draw(IntEnum):
    """What a random number is for. At one position each purpose has its own, independent number."""

    TOKEN = 0  # the token itself, when it is not an accepted draft
    DRAFT = 1  # the proposal of the drafter
    ACCEPT = 2  # whether the proposal is accepted


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token of the distribution before temperature and filters. `rank` 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


class Sampler:
    """The sampling rules of one sequence.

    Args:
        sample: index of the sequence within its request; sequences of one request draw different numbers.
        banned: ids that must not be drawn at positions below `banned_before` (EOS and stop ids under `min_tokens`).
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        sample: int = 0,
        banned: Sequence[int] = (),
        banned_before: int = 0,
    ) -> None:
        self.params = params
        self.is_greedy = params.temperature == 0
        self._key = (seed % 2**64).to_bytes(8, "little") + sample.to_bytes(8, "little")
        self._banned = torch.tensor(banned, dtype=torch.int64)
        self._banned_before = banned_before if banned else 0

    def uniform(self, draw: Draw, position: int) -> int:
        """The random number of this sequence for `draw` at `position`, 0 to 2^52 - 1."""
        digest = hashlib.blake2b(struct.pack("<BQ", draw, position), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") >> 12

    def is_plain(self, position: int) -> bool:
        """Whether the token for `position` is just the most likely one of all."""
        return self.is_greedy and position >= self._banned_before

    def forbid(self, logits_V: Tensor, position: int) -> None:
        """Sets the banned ids to minus infinity, in place."""
        if position < self._banned_before:
            logits_V.index_fill_(0, self._banned.to(logits_V.device), -math.inf)


@dataclass(frozen=True, slots=True)
class Want:
    """One row of logits that a token is to be drawn from.

    row: of the logits. mask_V: bool [V], the ids that a grammar allows; None = all. draft, draft_weights_V: a draft to
    judge and the weights that it was drawn from.
    """

    row: int
    sampler: Sampler
    position: int
    mask_V: Tensor | None = None
    draft: int | None = None
    draft_weights_V: Tensor | None = None


def draw(logits_NV: Tensor, wants: Sequence[Want], purpose: Draw = Draw.TOKEN) -> Iterator[tuple[int, Tensor]]:
    """For each want a token and the weights [V] that it was drawn from. logits_NV: as for `weights`.

    A greedy row gives the lowest id among equals. A row with a draft gives this draft, if it is accepted, or a token of
    the rest (see speculate.py).
    """
    size = max(1, CHUNK // logits_NV.shape[1])
    for start in range(0, len(wants), size):
        part = wants[start : start + size]
        weights_SV = weights(logits_NV, part)
        _judge(weights_SV, part)
        uniforms = [0 if want.sampler.is_greedy else want.sampler.uniform(purpose, want.position) for want in part]
        yield from zip(pick(weights_SV, uniforms), weights_SV.unbind(), strict=True)


def weights(logits_NV: Tensor, wants: Sequence[Want]) -> Tensor:
    """The distributions that are sampled: int64 [S, V], probabilities times a number of each row's own.

    logits_NV: f32 (or any float), finite in the rows wanted. Filtered ids and those less likely than 2^-46 of the
    best get 0. Equal weights at a filter's border: the lowest ids stay. At least one id of a row must be allowed.
    """
    rules = [want.sampler.params for want in wants]
    device = logits_NV.device
    logits_SV = logits_NV[torch.tensor([want.row for want in wants], device=device)].double()
    for logits_V, want in zip(logits_SV, wants, strict=True):
        if want.mask_V is not None:
            logits_V.masked_fill_(~want.mask_V.to(device), -math.inf)
        want.sampler.forbid(logits_V, want.position)
    logits_SV -= logits_SV.amax(dim=1, keepdim=True)  # first of all: no overflow at a tiny temperature
    logits_SV /= _column([p.temperature or GREEDY_TEMPERATURE for p in rules], device, torch.float64)
    weights_SV = logits_SV.exp_().mul_(UNIT).round_().long()
    if any(p.min_p > 0 for p in rules):
        weights_SV.masked_fill_(weights_SV < _column([math.ceil(p.min_p * UNIT) for p in rules], device), 0)
    drawn = [(s, p) for s, p in enumerate(rules) if p.temperature > 0]
    if ranks := {s: min(p.top_k, weights_SV.shape[1]) for s, p in drawn if p.top_k > 0}:
        rows = list(ranks)
        weights_SV[rows] = _first(weights_SV[rows], list(ranks.values()), [UNIT * weights_SV.shape[1]] * len(rows))
    if shares := {s: p.top_p for s, p in drawn if p.top_p < 1}:
        rows = list(shares)
        part_SV = weights_SV[rows]
        totals = part_SV.sum(dim=1).tolist()
        limits = [_share(share, total) for share, total in zip(shares.values(), totals, strict=True)]
        # Tokens too light to make up the rest all together are not among the first: most of a row needs no sorting.
        floors = [(total - limit) // part_SV.shape[1] for total, limit in zip(totals, limits, strict=True)]
        counts = (part_SV >= _column(floors, device)).sum(dim=1).tolist()
        weights_SV[rows] = _first(part_SV, counts, limits)
    return weights_SV


def _first(weights_SV: Tensor, counts: Sequence[int], limits: Sequence[int]) -> Tensor:
    """Sets to 0, in place, all but the heaviest ids of each row: at most so many of them, and each only while the mass
    of those before it falls short of the limit."""
    device = weights_SV.device
    best_SC = weights_SV.topk(max(counts), dim=1).values
    before_SC = best_SC.cumsum(dim=1) - best_SC
    place_C = torch.arange(max(counts), device=device)
    kept_S1 = ((before_SC < _column(limits, device)) & (place_C < _column(counts, device))).sum(dim=1, keepdim=True)
    border_S1 = best_SC.gather(1, kept_S1 - 1)
    weights_SV.masked_fill_(weights_SV < border_S1, 0)
    surplus_S = weights_SV.count_nonzero(dim=1) - kept_S1[:, 0]
    for s in (surplus_S > 0).nonzero().flatten().tolist():  # equal weights on both sides of the border
        equal = (weights_SV[s] == border_S1[s]).nonzero().flatten()
        weights_SV[s, equal[len(equal) - int(surplus_S[s]) :]] = 0
    return weights_SV


def _judge(weights_SV: Tensor, wants: Sequence[Want]) -> None:
    """Puts the whole weight of a row with an accepted draft on it, and that of a rejected one on the rest, in place."""
    judged = [s for s, want in enumerate(wants) if want.draft_weights_V is not None]
    if not judged:
        return
    device = weights_SV.device
    p_JV = weights_SV[judged]
    q_JV = torch.stack([w.draft_weights_V.to(device) for w in wants if w.draft_weights_V is not None])
    draft_J1 = _column([wants[s].draft for s in judged], device)
    p_sum_J1, q_sum_J1 = p_JV.sum(dim=1, keepdim=True), q_JV.sum(dim=1, keepdim=True)
    excess_JV = (p_JV.double() / p_sum_J1 - q_JV.double() / q_sum_J1).clamp_(min=0.0)
    most_J1 = excess_JV.amax(dim=1, keepdim=True)
    rest_JV = (excess_JV / most_J1).nan_to_num_(0.0).mul_(UNIT).round_().long()
    figures = (p_JV.gather(1, draft_J1), p_sum_J1, q_JV.gather(1, draft_J1), q_sum_J1, most_J1 > 0)
    accepted = []
    for s, p, p_sum, q, q_sum, has_rest in zip(judged, *(column[:, 0].tolist() for column in figures), strict=True):
        uniform = wants[s].sampler.uniform(Draw.ACCEPT, wants[s].position)
        # p and q that differ by rounding alone may leave nothing; then they are the same distribution.
        accepted.append(uniform * q * p_sum < p * q_sum << 52 or not has_rest)
    accepted_J1 = _column(accepted, device)
    rest_JV.mul_(1 - accepted_J1).scatter_add_(1, draft_J1, accepted_J1)
    weights_SV[judged] = rest_JV


def pick(weights_SV: Tensor, uniforms: Sequence[int]) -> list[int]:
    """Per row the first id at which the running sum exceeds the share `uniform` / 2^52 of the sum.

    An id of weight 0 is never picked. weights_SV: as `weights` gives them.
    """
    mass_SV = weights_SV.cumsum(dim=1)
    bounds = [uniform * mass >> 52 for uniform, mass in zip(uniforms, mass_SV[:, -1].tolist(), strict=True)]
    ids: list[int] = torch.searchsorted(mass_SV, _column(bounds, mass_SV.device), right=True)[:, 0].tolist()
    return ids


def _share(part: float, total: int) -> int:
    """ceil(part * total), exactly."""
    numerator, denominator = part.as_integer_ratio()
    return -(-numerator * total // denominator)


def _column(values: Sequence[float | None], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def check_finite(logits_V: Tensor, position: int) -> None:
    """Raises NumericsError if any logit is NaN or infinite: nothing can be sampled from a broken forward pass."""
    if not bool(logits_V.isfinite().all()):
        broken = int((~logits_V.isfinite()).sum())
        raise NumericsError(
            f"logits for position {position}: expected finite values, got NaN or infinity for {broken} of "
            f"{logits_V.numel()} tokens; check the weights with `leadline verify`"
        )


def logprobs_of(logits_NV: Tensor, token_ids: Sequence[int], top: int) -> list[list[Logprob]]:
    """For each row the entry of its token, then those of the `top` most likely tokens (the token not repeated).

    logits_NV: [N, V] f32, unmodified; log_softmax in fp32, each row on its own. `top` beyond V means V. Among equals
    the lowest id ranks first. Zero rows give an empty list.
    """
    if not token_ids:
        return []
    logprob_NV = logits_NV.float().log_softmax(dim=-1)
    ids_N = torch.tensor(token_ids, dtype=torch.int64, device=logits_NV.device)
    chosen_N1 = logprob_NV.gather(1, ids_N[:, None])
    ahead_NV = (logprob_NV > chosen_N1) | (
        (logprob_NV == chosen_N1) & (torch.arange(logprob_NV.shape[1], device=ids_N.device) < ids_N[:, None])
    )
    rank_N = (ahead_NV.sum(dim=1) + 1).tolist()
    chosen = [
        [Logprob(token_id, value, rank)]
        for token_id, value, rank in zip(token_ids, chosen_N1[:, 0].tolist(), rank_N, strict=True)
    ]
    if top == 0:
        return chosen
    best_NV, best_idx_NV = logprob_NV.sort(dim=1, descending=True, stable=True)
    rows = zip(best_idx_NV[:, :top].tolist(), best_NV[:, :top].tolist(), strict=True)
    for entries, (ids, values) in zip(chosen, rows, strict=True):
        own = entries[0].token_id
        ranked = enumerate(zip(ids, values, strict=True), start=1)
        entries += [Logprob(token_id, value, rank) for rank, (token_id, value) in ranked if token_id != own]
    return chosen
