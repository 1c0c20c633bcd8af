"""Where the three chat protocols and deepseek-recipe differ from what this server does. The only such place.

deepseek-recipe stands for the hosted service: it sets sampling values itself, takes one answer and effort levels only,
wants the word json beside json_object, and treats a required tool differently from protocol to protocol. So it only
gets the fields that make the prompt, and of the tool choice no more than whether there are tools; all else is read
here. `docs/openai_compatibility.md` lists what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.config.sampling import SamplingParams
from leadline.errors import RequestError
from leadline.server.bodies import SamplingBody
from leadline.text.chat import ChatPrompt, Effort, Protocol, schema_fields
from leadline.text.grammar import ANY_OBJECT, Grammar
from leadline.text.tokenizer import Tokenizer
from leadline.text.tool_grammar import Tool

_PROMPT_FIELDS: dict[Protocol, tuple[str, ...]] = {
    "chat": ("messages", "tools", "tool_choice", "response_format"),
    "messages": ("messages", "system", "tools", "tool_choice"),
    "responses": ("input", "instructions", "tools", "tool_choice", "text"),
}
_EFFORT_FIELDS = {"chat": "reasoning_effort", "messages": "output_config.effort", "responses": "reasoning.effort"}
_FORMAT_FIELDS = {"chat": "response_format", "messages": "output_config.format", "responses": "text.format"}
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos",
                    "include_stop_str_in_output")  # fmt: skip
_EFFORT_WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# What may stand in a list of a request, by the list. deepseek-recipe leaves out much of the rest without a word, or
# puts a remark in its place. None: an entry without a type.
_TYPES: dict[Protocol, dict[str, tuple[str | None, ...]]] = {
    "chat": {"messages.content": ("text", "image_url"), "messages.tool_calls": ("function",), "tools": ("function",)},
    "messages": {
        "messages.content": ("text", "image", "thinking", "tool_use", "tool_result"),
        "messages.content.content": ("text", "image", "tool_reference"),
        "system": ("text",),
        "tools": (None, "custom"),
    },
    "responses": {
        "input": (None, "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
                  "custom_tool_call_output", "tool_search_call", "tool_search_output"),
        "input.content": ("input_text", "output_text", "input_image", "reasoning_text"),
        "input.output": ("input_text", "input_image"),
        "tools": ("function", "custom", "namespace"),
        "tools.tools": ("function",),
    },
}  # fmt: skip
_ECHO_FIELDS = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "tools", "tool_choice", "text",
                "metadata", "parallel_tool_calls")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """mode: none, auto or required. names: the only tools that a required call may name, None for all. many: an answer
    may hold several calls."""

    mode: str
    names: list[str] | None = None
    many: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """A chat request in the words of this server.

    body: what deepseek-recipe renders. choice: about the tools in it. schema: JSON Schema of the answer, None for any
    object, if is_json. echo: the settings that a Responses object repeats.
    """

    protocol: Protocol
    body: dict[str, Any]
    thinking: bool | None
    effort: Effort | None
    choice: ToolChoice
    is_json: bool
    schema: dict[str, Any] | None
    echo: dict[str, Any]

    @property
    def field(self) -> str:
        """The name of the conversation's field."""
        return _PROMPT_FIELDS[self.protocol][0]

    @property
    def format_field(self) -> str:
        """The name of the field that says what the answer must look like."""
        return _FORMAT_FIELDS[self.protocol]


def read_wish(protocol: Protocol, raw: Mapping[str, Any]) -> Wish:
    """Read a body that has passed its schema. Raises: RequestError for what cannot be done."""
    raw = {key: value for key, value in raw.items() if value is not None}
    body = {key: raw[key] for key in _PROMPT_FIELDS[protocol] if key in raw}
    for key, value in body.items():
        _check_types(_TYPES[protocol], key, key, value)
    thinking, effort = _thinking(protocol, raw)
    is_json, schema = _answer_format(protocol, raw)
    choice = _tool_choice(raw)
    if not body.get("tools"):
        if choice.mode == "required":
            raise RequestError("tool_choice: a tool is required, but the request has no tools")
        body.pop("tools", None)
        choice = ToolChoice("none")
    if not body.get("tools") or choice.mode != "none":
        body.pop("tool_choice", None)
    if choice.mode == "required" and effort is None:
        thinking = bool(thinking)  # off where nothing is said about it: a call is wanted at once
    if is_json and schema is None:  # nothing is rendered for a free JSON object
        body.pop("response_format", None), body.pop("text", None)
    if protocol == "chat":
        body["messages"] = [_chat_message(message) for message in body["messages"]]
    elif protocol == "messages" and "tools" in body:  # deepseek-recipe takes any type for a tool of the server
        body["tools"] = [{key: value for key, value in tool.items() if key != "type"} for tool in body["tools"]]
    echo = {key: raw[key] for key in _ECHO_FIELDS if key in raw}
    if isinstance(raw.get("tool_choice"), Mapping) and raw["tool_choice"]["type"] == "allowed_tools":
        echo["tool_choice"] = "required"  # deepseek-recipe cannot repeat it
    return Wish(protocol, body, thinking, effort, choice, is_json, schema, echo)


def call_grammar(tokenizer: Tokenizer, wish: Wish, prompt: ChatPrompt) -> Grammar | None:
    """What answers to the rendered prompt have to follow where calls are required or stand beside JSON; else None.

    Raises: RequestError naming the schema of a tool, tools, or tool_choice.
    """
    is_required = wish.choice.mode == "required"
    if not is_required and (wish.choice.mode == "none" or not wish.is_json):
        return None
    tools = {tool.name: Tool(tool.name, tool.parameters) for tool in prompt.request.conversation.tools}
    names = list(tools) if wish.choice.names is None else wish.choice.names
    if unknown := [name for name in names if name not in tools]:
        raise RequestError(f"tool_choice: expected one of tools ({', '.join(tools)[:200]}), got {unknown[0]!r}")
    document = None if is_required else ANY_OBJECT if wish.schema is None else wish.schema
    try:
        return Grammar.tool_calls(tokenizer, [tools[name] for name in names], many=wish.choice.many, document=document)
    except RequestError as error:
        name, _, reason = str(error).removeprefix("tools: ").partition(": ")
        place = schema_fields(wish.protocol, wish.body["tools"]).get(name)
        raise (error if place is None else RequestError(f"{place}: {reason}")) from None


def sampling_params(
    body: SamplingBody, *, max_tokens: int | None, stop: str | list[str] | None, n: int = 1, logprobs: int | None = None
) -> SamplingParams:
    """The request's own sampling values, as they are. Raises: SamplingError naming the field."""
    values = {"n": n, "stop": stop, "logprobs": logprobs} | {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    return SamplingParams(max_tokens=max_tokens, **{key: value for key, value in values.items() if value is not None})


def json_schema_of(
    response_format: Mapping[str, Any] | None, field: str = "response_format.json_schema"
) -> tuple[bool, dict[str, Any] | None]:
    """Whether the answer has to be JSON, and its schema, from a response_format of Chat Completions.

    field: what holds the schema, for errors. Raises: RequestError for json_schema without a schema.
    """
    shape = response_format or {}
    if shape.get("type") != "json_schema":
        return shape.get("type") == "json_object", None
    if (schema := (shape.get("json_schema") or {}).get("schema")) is None:
        raise RequestError(f"{field}.schema: expected a JSON Schema, got none")
    return True, schema


def _thinking(protocol: Protocol, raw: Mapping[str, Any]) -> tuple[bool | None, Effort | None]:
    """None for thinking means the default. The effort none switches it off."""
    field = _EFFORT_FIELDS[protocol]
    parent, _, name = field.rpartition(".")
    effort = ((raw.get(parent) or {}) if parent else raw).get(name)
    if effort is not None and effort not in _EFFORT_WORDS and (type(effort) is not int or not 1 <= effort <= 100):
        raise RequestError(f"{field}: expected {', '.join(_EFFORT_WORDS)} or a number 1 to 100, got {effort!r:.80}")
    kind = (raw.get("thinking") or {}).get("type")
    thinking = None if kind is None else kind != "disabled"
    switches = raw.get("chat_template_kwargs") or {}
    for name in ("thinking", "enable_thinking"):
        if switches.get(name) is not None:
            thinking = switches[name]
    if effort == "none":
        if thinking:
            raise RequestError(f"{field}: none and thinking exclude each other")
        return False, None
    if thinking is False and effort is not None:
        raise RequestError(f"{field}: expected none without thinking, got {effort!r}; leave it out")
    return thinking, effort


def _answer_format(protocol: Protocol, raw: Mapping[str, Any]) -> tuple[bool, dict[str, Any] | None]:
    if protocol == "chat":
        return json_schema_of(raw.get("response_format"))
    if protocol == "messages":
        found = (raw.get("output_config") or {}).get("format") or {}
        return bool(found), found.get("schema")
    found = (raw.get("text") or {}).get("format") or {}
    return json_schema_of({"type": found.get("type"), "json_schema": found}, "text.format")


def _check_types(known: Mapping[str, tuple[str | None, ...]], name: str, place: str, value: Any) -> None:
    """Refuse what would be left out of the prompt without a word.

    name: of the list `value`, as in `_TYPES`. place: the same with the numbers of the entries, for the error.
    """
    for number, entry in enumerate(value if isinstance(value, list) else ()):
        if isinstance(entry, Mapping):
            kind = entry.get("type")
            if kind not in known.get(name, (kind,)):
                expected = ", ".join(str(word) for word in known[name] if word is not None)
                raise RequestError(f"{place}[{number}].type: expected one of {expected}, got {kind!r:.80}")
            for key in ("content", "output", "tools", "tool_calls"):
                if key in entry:
                    _check_types(known, f"{name}.{key}", f"{place}[{number}].{key}", entry[key])


def _tool_choice(raw: Mapping[str, Any]) -> ToolChoice:
    choice = raw.get("tool_choice", "auto")
    fields = choice if isinstance(choice, Mapping) else {"type": choice}
    kind = fields.get("type")
    many = raw.get("parallel_tool_calls") is not False and fields.get("disable_parallel_tool_use") is not True
    if kind == "allowed_tools":
        inner = fields.get("allowed_tools", fields)
        if inner.get("mode") != "required":
            raise RequestError("tool_choice: expected mode required with allowed_tools; for auto, leave the others out")
        return ToolChoice("required", [_tool_name(tool) for tool in inner.get("tools") or [{}]], many)
    if kind in ("function", "tool", "custom"):
        return ToolChoice("required", [_tool_name(fields)], many=False)
    return ToolChoice("required" if kind == "any" else str(kind), None, many)


def _tool_name(fields: Mapping[str, Any]) -> str:
    for inner in (fields.get("function"), fields.get("custom"), fields):
        if isinstance(inner, Mapping) and isinstance(name := inner.get("name"), str):
            space = fields.get("namespace")
            return name if space is None else f"{space}::{name}"
    raise RequestError("tool_choice: expected the name of a tool")


def _chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """developer speaks as system does; reasoning is another name of reasoning_content."""
    out = dict(message)
    if out.get("role") == "developer":
        out["role"] = "system"
    reasoning = out.pop("reasoning", None)
    if reasoning is not None and out.get("reasoning_content") is None:
        out["reasoning_content"] = reasoning
    return out
