"""What a key of a configuration file may hold, and how the keys of one object of the file are read and written.

The classes of `model.py` declare the keys: a field is annotated with its `Key`, and a key that is no field is a class
variable. Its name is that of the nested `config.json`; `Key.flat` is the one of the published `inference/config.json`
(architecture.md sections 1.1 to 1.3). They stand in the order of the published file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from leadline.errors import ConfigError


def show(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 120 else text[:117] + "..."


class Rule(NamedTuple):
    """What a key may hold, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


_LARGEST = 2**31 - 1  # for sizes; keeps products of two of them inside int64


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and 0 < value < 1e30


def integer(low: int = 1, high: int = _LARGEST, multiple: int = 1) -> Rule:
    kind = "an integer" if multiple == 1 else f"a multiple of {multiple}"
    return Rule(
        f"{kind} from {low} to {high}", lambda value: _is_int(value) and low <= value <= high and value % multiple == 0
    )


INTEGERS = Rule(
    "a list of integers from 0 up",
    lambda value: isinstance(value, list) and all(_is_int(item) and 0 <= item <= _LARGEST for item in value),
)
WIDTH = integer(32, multiple=32)  # quantised in blocks of 32
TOKEN = integer(0)
POSITIVE = Rule("a finite number above 0", _is_positive)
POSITIVE_OR_NULL = Rule("a finite number above 0", lambda value: value is None or _is_positive(value))
BOOL = Rule("true or false", lambda value: isinstance(value, bool))
STRING = Rule("a string", lambda value: isinstance(value, str))
OBJECT = Rule("an object", lambda value: isinstance(value, Mapping))


@dataclass(frozen=True, slots=True)
class Key:
    flat: str | None  # name in the flat file, if it has the key
    rule: Rule
    published: Any = None  # the value written for a key that is no field, and assumed where the flat file has no key
    is_field: bool = True
    is_optional: bool = False


def fixed(only: Any, flat: str | None = None) -> Key:
    """A key with the one value that this program implements."""
    rule = Rule(repr(only), lambda value: isinstance(value, bool) == isinstance(only, bool) and value == only)
    return Key(flat, rule, only, is_field=False)


Keys = Mapping[str, Key]  # by name in the nested file


def keys_of(section: type) -> Keys:
    """The keys that a class declares itself, in their order."""
    hints = get_type_hints(section, include_extras=True)
    keys = {}
    for name in section.__annotations__:
        constant = getattr(section, name)
        keys[name] = constant if isinstance(constant, Key) else getattr(hints[name], "__metadata__", (None,))[0]
    return {name: key for name, key in keys.items() if key is not None}


def take(keys: Keys, data: Mapping[str, Any], where: str = "", flat: bool = False) -> dict[str, Any]:
    """The fields among `keys` from one object of the file, each checked by its rule."""
    fields = {}
    for field, key in keys.items():
        name = key.flat if flat else field
        value = key.published
        if name is not None and name in data:
            value = data[name]
            if not key.rule.holds(value):
                raise ConfigError(f"{where}{name}: expected {key.rule.words}, got {show(value)}")
        elif name is not None and not key.is_optional:
            raise ConfigError(f"{where}{name}: missing; every published key is required")
        if key.is_field:
            fields[field] = tuple(value) if isinstance(value, list) else value
    return fields


def refuse_unknown(data: Mapping[str, Any], known: Iterable[str | None], where: str = "") -> None:
    for name in sorted(data.keys() - set(known), key=str):
        raise ConfigError(f"{where}{name}: unknown key with value {show(data[name])}; correct or remove it")


def write(keys: Keys, owner: object, flat: bool = False) -> dict[str, Any]:
    """What `take` reads."""
    written = {}
    for field, key in keys.items():
        name = key.flat if flat else field
        value = getattr(owner, field) if key.is_field else key.published
        if name is not None:
            written[name] = list(value) if isinstance(value, tuple | list) else value
    return written
