"""What a user gives, refused by its name: numbers, and JSON files."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import Any, NoReturn

from leadline.errors import LeadlineError, RequestError


def check_integer(
    name: str, value: object, least: int, most: int | None = None, error: type[LeadlineError] = RequestError
) -> None:
    """Raises `error` unless `value` is an int (no bool) from `least` to `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name}: expected an integer {span}, got {value!r}")


def check_number(
    name: str,
    value: object,
    least: float = 0.0,
    most: float = math.inf,
    *,
    excluded: float | None = None,
    error: type[LeadlineError] = RequestError,
) -> None:
    """Raises `error` unless `value` is a finite int or float from `least` to `most`, other than `excluded`."""
    is_number = isinstance(value, int | float) and type(value) is not bool and abs(value) <= sys.float_info.max
    if not is_number or not least <= value <= most or value == excluded:  # type: ignore[operator]
        low = f"above {least:g}" if least == excluded else f"of at least {least:g}"
        raise error(
            f"{name}: expected a finite number {low}{f' and at most {most:g}' * (most < math.inf)}, got {value!r}"
        )


def parse_json(data: bytes) -> Any:
    """JSON to the letter: UTF-8, no name twice in one object, finite numbers. Raises: ValueError, RecursionError."""
    return json.loads(data.decode(), object_pairs_hook=_object_without_repeats, parse_constant=_refuse_constant)


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{repeated} given twice in one object; keep one")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}; numbers must be finite")
