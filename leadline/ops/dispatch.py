"""Which implementation of an operator runs on which device.

An operator's contract file registers its implementations; callers name one, or pass None for the default. A named
implementation never gives way to another: if it cannot run, the reason is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from leadline.errors import OperatorError

DEFAULT = "reference"


@dataclass(frozen=True, slots=True)
class _Implementation:
    fn: Callable[..., Any]
    supports: Callable[[torch.device], str | None]


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One line of `leadline ops`."""

    op: str
    impl: str
    runs: bool
    reason: str  # why not; empty if it runs


_registry: dict[str, dict[str, _Implementation]] = {}
_chosen: dict[tuple[str, str | None, torch.device], Callable[..., Any]] = {}


def anywhere(device: torch.device) -> None:
    """`supports` of implementations that need nothing but torch."""


def register(
    op: str, impl: str, fn: Callable[..., Any], supports: Callable[[torch.device], str | None] = anywhere
) -> None:
    """Add implementation `impl` of operator `op`.

    supports: given a device, None if `fn` runs there, otherwise the reason why not, in words.
    """
    _registry.setdefault(op, {})[impl] = _Implementation(fn, supports)


def choose(op: str, impl: str | None, device: torch.device) -> Callable[..., Any]:
    """The function that computes `op` on `device`; remembered, so that later calls are one dictionary look-up.

    Raises OperatorError if `impl` is unknown or cannot run on the device.
    """
    fn = _chosen.get((op, impl, device))
    return fn if fn is not None else _resolve(op, impl, device)


def table(device: torch.device) -> list[OperatorRow]:
    """All registered implementations and whether they run on `device`, sorted by operator."""
    rows = []
    for op in sorted(_registry):
        for impl, entry in _registry[op].items():
            reason = entry.supports(device)
            rows.append(OperatorRow(op, impl, reason is None, reason or ""))
    return rows


def _resolve(op: str, impl: str | None, device: torch.device) -> Callable[..., Any]:
    name = impl or DEFAULT
    entry = _registry[op].get(name)
    if entry is None:
        raise OperatorError(f"{op}: no implementation named {name!r}; there are {', '.join(_registry[op])}")
    reason = entry.supports(device)
    if reason is not None:
        raise OperatorError(f"{op}: implementation {name!r} cannot run on {device}: {reason}")
    _chosen[op, impl, device] = entry.fn
    return entry.fn
