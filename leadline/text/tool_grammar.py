"""Tool calls that follow their tools' schemas, as rules of a grammar in the model's own markup.

    \\n\\n<｜DSML｜ calls>
    <｜DSML｜ invoke name="f">
    <｜DSML｜ parameter name="k" string="true">text as it is</｜DSML｜ parameter>
    <｜DSML｜ parameter name="n" string="false">[1, 2]</｜DSML｜ parameter>
    </｜DSML｜ invoke>
    </｜DSML｜ calls>

`｜DSML｜` is one token and the only control token among them. A text may hold anything but `</｜DSML｜`, also where
ordinary tokens spell that: readers of answers see the spelling alone. They also take a space for the end of a name, and
put names into JSON unescaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from leadline.errors import RequestError

_MOST_PARTS = 10_000  # schemas to look at for one tool; references can make many of few
_MARK = "</｜DSML｜"
_NO_MARK = r"~/(?s:.*)<\/｜DSML｜(?s:.*)/"
_NOT_STRINGS = ["object", "array", "number", "boolean", "null"]
_BAD_NAME = re.compile(r'["\\\s\x00-\x1f]')
_ASCII = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]", "/": r"\/"}  # what a pattern of JSON Schema means by them


class Tool(NamedTuple):
    """A tool that may be called. parameters: JSON Schema of its arguments; None and {} take any."""

    name: str
    parameters: Mapping[str, Any] | None = None


def call_rules(tools: Sequence[Tool], mark_id: int, many: bool, options: Mapping[str, Any]) -> str:
    """Rules for llguidance's Lark dialect; the rule `calls` is a whole block.

    Args:
        tools: at least one. mark_id: the id of `｜DSML｜`. many: several calls may come, instead of exactly one.
        options: how JSON is written, as the key x-guidance of a schema.

    Parameters come in the order of the schema, required ones always, each at most once. Only those that the schema
    names may come; where it names none and does not forbid others, any may, a name even twice. A string is text as it
    is, within minLength, maxLength, pattern, enum and const; `format` is not followed there, and character U+FF5C is
    left out where a length or pattern counts. Every other value is JSON that follows its part of the schema. `oneOf` is
    read as `anyOf` in a parameter; what relates parameters to one another is not followed.

    Raises: RequestError, naming the tool, if a name or value cannot be written in the markup, or a schema is no schema.
    """
    rules = _Rules(options)
    bodies = [f'{json.dumps(tool.name)} "\\">" {rules.body(tool)}' for tool in tools]
    # A line feed and the `<` behind it are one terminal everywhere: a terminal goes on as long as any can, so that a
    # line feed alone would never end before the `<` of a closing tag.
    call = rules.add(f'"\\n<" mark " invoke name=\\"" ({" | ".join(bodies)}) "\\n</" mark " invoke>"')
    block = f'calls: "\\n\\n<" mark " calls>" {call}{"+" if many else ""} "\\n</" mark " calls>"'
    return "\n".join([block, f"mark: <[{mark_id}]>", *rules.lines])


class _Rules:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.lines: list[str] = []
        self._options = options
        self._tool = Tool("")
        self._parts_left = 0

    def add(self, content: str, prefix: str = "r") -> str:
        """A new rule, or terminal with the prefix T; gives its name."""
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {content}")
        return name

    def body(self, tool: Tool) -> str:
        """The parameters of a call, each with a line feed in front; without any there is an empty line."""
        self._tool, self._parts_left = tool, _MOST_PARTS
        schema = self._resolved(tool.parameters or {})
        named, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", "properties" not in schema)
        if not isinstance(named, Mapping) or not isinstance(required, list):
            raise self._refused("expected properties as an object and required as a list")
        if not all(isinstance(name, str) for name in required):
            raise self._refused("expected names in required")
        rest = others if isinstance(others, Mapping) else {}
        named = {**named, **{name: rest for name in required if name not in named}}
        if not named and others is not False:
            name = self.add("/[A-Za-z0-9_.-]{1,64}/", "T")
            return f'({self._parameter(name, rest)}+ | "\\n")'
        # From the last one on: what may follow when everything before has been decided, and the same if nothing came.
        following, alone = '""', '"\\n"'
        for name, value in reversed(named.items()):
            parameter = self._parameter(self._name(name), value)
            if name in required:
                following = alone = self.add(f"{parameter} {following}")
            else:
                alone = self.add(f"{parameter} {following} | {alone}")
                following = self.add(f"{parameter}? {following}")
        return alone

    def _parameter(self, name: str, schema: Any) -> str:
        values = " | ".join(self._values(schema))
        return self.add(f'"\\n<" mark " parameter name=\\"" {name} "\\" string=\\"" ({values}) mark " parameter>"')

    def _values(self, schema: Any) -> list[str]:
        """What may stand behind `string="`, up to and with the `<` and `/` of the closing tag."""
        schema = self._resolved({} if schema is True else schema)
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and branches and (key != "allOf" or len(branches) == 1):
                rest = {name: value for name, value in schema.items() if name != key}
                parts = [{**rest, **self._resolved(branch)} for branch in branches]
                return [value for part in parts for value in self._values(part)]
        if "allOf" in schema:
            return [self._json(schema)]
        kinds = schema.get("type", ["string", *_NOT_STRINGS])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = [choice for choice in choices if isinstance(choice, str)] if "string" in kinds else []
            found = [f'"true\\">" {self._value(text)}' for text in texts]
        else:
            found = [f'"true\\">" {self._text(schema)}'] if "string" in kinds else []
        kinds = [kind for kind in kinds if kind != "string"]
        if kinds and (not isinstance(choices, list) or any(not isinstance(choice, str) for choice in choices)):
            found.append(self._json({**schema, "type": kinds}))
        return found or [self._json(schema)]  # nothing is possible: the library says so

    def _json(self, schema: Mapping[str, Any]) -> str:
        root = self._tool.parameters or {}
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        text = json.dumps({**schema, **shared, "x-guidance": self._options}, allow_nan=False)
        if found := re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)[^"]*"', text):
            raise self._refused(f"expected references below #/$defs/ inside a parameter, got {found[0][:80]}")
        return f'"false\\">" {self.add(f"%json {text}")} "</"'

    def _text(self, schema: Mapping[str, Any]) -> str:
        # Control tokens end a terminal, and only behind `</` one may follow, so the text needs no other border. Lengths
        # beside the long complement are more than the library works out; a class of characters costs it nothing.
        low, high, pattern = schema.get("minLength", 0), schema.get("maxLength", ""), schema.get("pattern")
        terms = [r"/(?s:.*)<\//", _NO_MARK]
        if low or high != "" or pattern is not None:
            terms = [rf"/[^｜]{{{low},{high}}}<\//"]
        if pattern is not None:
            terms.append(f"/{_whole(str(pattern))}<\\//")
        return self.add(" & ".join(terms), "T")

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """The schema with the reference at its top followed."""
        self._parts_left -= 1
        if self._parts_left < 0:
            raise self._refused(f"expected at most {_MOST_PARTS} schemas inside one another")
        if not isinstance(schema, Mapping):
            raise self._refused(f"expected a JSON Schema as an object, got {json.dumps(schema)[:80]}")
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        target: Any = self._tool.parameters
        for part in reference.removeprefix("#").split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not reference.startswith("#") or target is None:
            raise self._refused(f"expected a $ref into the tool's own schema, got {reference[:80]!r}")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**self._resolved(target), **rest}

    def _name(self, name: str) -> str:
        if _MARK in name or _BAD_NAME.search(name) or not name:
            raise self._refused(f"a call cannot carry a parameter of the name {name[:80]!r}")
        return json.dumps(name, ensure_ascii=False)

    def _value(self, text: str) -> str:
        if _MARK in text:
            raise self._refused(f"a call cannot carry the text {text[:80]!r}")
        return json.dumps(text + "</", ensure_ascii=False)

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"tools: {self._tool.name}: {reason}")


def _whole(pattern: str) -> str:
    """A pattern that may match anywhere, as one that matches the whole text."""
    start, end = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[int(start) : len(pattern) - int(end)]
    inner = re.sub(r"\\.|/", lambda found: _ASCII.get(found[0], found[0]), inner, flags=re.DOTALL)
    return f"{'' if start else '(?s:.*)'}({inner}){'' if end else '(?s:.*)'}"
