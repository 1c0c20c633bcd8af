"""Logits to tokens, for one sequence at a time.

V vocabulary. A sequence's random numbers are a hash of (seed, sample, purpose, position), so a token depends on nothing
but its own logits and the seed: not on neighbours, batch, earlier draws or the device.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from leadline.config.sampling import SamplingParams
from leadline.errors import NumericsError


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
        self._banned_before = banned_before

    def uniform(self, draw: Draw, position: int) -> float:
        """The random number in [0, 1) of this sequence for `draw` at `position`, a multiple of 2^-52."""
        digest = hashlib.blake2b(struct.pack("<BQ", draw, position), digest_size=8, key=self._key).digest()
        return (int.from_bytes(digest, "little") >> 12) / 2.0**52

    def is_plain(self, position: int) -> bool:
        """Whether the token for `position` is just the most likely one of all."""
        return self.is_greedy and (position >= self._banned_before or not len(self._banned))

    def token(self, logits_V: Tensor, position: int, mask_V: Tensor | None = None) -> int:
        """The token for `position` from the logits of the position before. Raises as `check_finite`."""
        if self.is_greedy:
            return self.greedy(logits_V, position, mask_V)
        return pick(self.probs(logits_V, position, mask_V), self.uniform(Draw.TOKEN, position))

    def greedy(self, logits_V: Tensor, position: int, mask_V: Tensor | None = None) -> int:
        """The most likely allowed token, the lowest id among equals. mask_V: as for `probs`."""
        check_finite(logits_V, position)
        return int(self._allowed(logits_V, position, mask_V).argmax())

    def probs(self, logits_V: Tensor, position: int, mask_V: Tensor | None = None) -> Tensor:
        """The distribution that is sampled for `position`: float64 [V], sums to 1, 0 for what the filters drop.

        logits_V: [V] f32 (or any float). mask_V: [V] bool, the ids that a grammar allows; None = all. Equal
        probabilities at a filter's border: the lowest ids stay. Independent of
        other sequences. `temperature` must not be 0. Raises as `check_finite`.
        """
        check_finite(logits_V, position)
        p = self.params
        scaled_V = self._allowed(logits_V, position, mask_V).double()
        scaled_V = (scaled_V - scaled_V.max()) / p.temperature  # shifted first: no overflow at a tiny temperature
        probs_V = scaled_V.softmax(dim=-1)
        if p.min_p > 0:
            probs_V = probs_V.masked_fill(probs_V < p.min_p * probs_V.max(), 0.0)
        if p.top_k > 0 or p.top_p < 1:
            sorted_V, order_V = probs_V.sort(descending=True, stable=True)
            if p.top_k > 0:
                sorted_V[p.top_k :] = 0.0
            if p.top_p < 1:
                mass_V = sorted_V.cumsum(dim=-1)
                # A token stays while the mass of those before it falls short of top_p: the first one always does.
                sorted_V[1:].masked_fill_(mass_V[:-1] >= p.top_p * mass_V[-1], 0.0)
            probs_V = torch.zeros_like(probs_V).scatter_(0, order_V, sorted_V)
        return probs_V / probs_V.sum()

    def _allowed(self, logits_V: Tensor, position: int, mask_V: Tensor | None) -> Tensor:
        if mask_V is not None:
            logits_V = logits_V.masked_fill(~mask_V.to(logits_V.device), -math.inf)
        if position >= self._banned_before or not len(self._banned):
            return logits_V
        return logits_V.index_fill(0, self._banned.to(logits_V.device), -math.inf)


def pick(probs_V: Tensor, uniform: float) -> int:
    """The first id at which the running sum of `probs_V` (float64 [V], any positive sum) exceeds `uniform` of the sum.

    An id of probability 0 is never picked.
    """
    mass_V = probs_V.cumsum(dim=-1)
    return int(torch.searchsorted(mass_V, mass_V[-1:] * uniform, right=True))


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
