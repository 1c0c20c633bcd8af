"""What a comparison found, part by part, and what would have been allowed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One statistic and the most it may be. NaN fails."""

    what: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The comparison of one part: largest and root mean square error over its positions, and what was required."""

    name: str
    worst: float
    rms: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def check(what: str, value: Tensor, limit: float) -> Check:
    """The check of a statistic that is a tensor of one element."""
    return Check(what=what, value=float(value), limit=limit)


def part(name: str, error: Tensor, *checks: Check) -> Part:
    """A part from its errors by position, of any shape but not empty."""
    error = error.float()
    return Part(name=name, worst=float(error.max()), rms=float(error.square().mean().sqrt()), checks=checks)


def exact(name: str, found: Tensor, expected: Tensor) -> Part:
    """A part that allows no difference."""
    error = (found.double() - expected.double()).abs()
    return part(name, error, check("worst", error.max(), 0.0))
