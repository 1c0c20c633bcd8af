"""Comparing samples with an exact distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence


def chi_square_p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Chance of a fit at least this bad if `counts` really come from `probs` (Pearson's test).

    Classes expected fewer than 5 times are merged; a count where `probs` is 0 gives 0. By the Wilson-Hilferty
    approximation, good to about 1e-3, so thresholds should be far from the chance itself.
    """
    total = sum(counts)
    if any(count and not prob for count, prob in zip(counts, probs, strict=True)):
        return 0.0
    classes: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for count, prob in zip(counts, probs, strict=True):
        if prob * total >= 5:
            classes.append((count, prob * total))
        else:
            rest[0] += count
            rest[1] += prob * total
    if rest[1] >= 1:
        classes.append((rest[0], rest[1]))
    freedom = len(classes) - 1
    if freedom < 1:
        return 1.0
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in classes)
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2
