"""Conversations to prompts, and answers to reasoning, content and tool calls.

Requests of all three protocols (Chat Completions, Messages, Responses) are read by `deepseek-recipe`, the published
converter, renderer and parser. A vocabulary with V4.1's control tokens gets the published format. A vocabulary without
them (a small model) gets a plain one: BOS, then each message as `System: `, `User: ` or `Assistant: ` and its text, two
newlines after system and user text, EOS after an answer, and `Assistant:` at the end. The plain format knows neither
thinking nor tools, and its answers are content as a whole, letter by letter.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import deepseek_recipe as recipe

from leadline.errors import ImageError, PromptError
from leadline.text.tokenizer import Tokenizer

Effort = int | Literal["minimal", "low", "medium", "high", "xhigh", "max"]
ImageSource = str | bytes | Path
Messages = Sequence[Mapping[str, Any]]
DeltaKind = Literal["reasoning", "content", "tool_call"]
Protocol = Literal["chat", "messages", "responses"]

MODEL_NAME = "DeepSeek-V4.1-Flash"  # the name under which deepseek-recipe knows the format
REQUESTS: dict[Protocol, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "messages": recipe.MessagesRequest,
    "responses": recipe.ResponsesRequest,
}
# The released vocabulary spells the image token in another way than deepseek-recipe does by default.
_SPECIAL_TOKENS = recipe.SpecialTokens(image="<｜deepseek_image｜>")
# For the plain format: spellings that no text holds, so that nothing in a text is taken for a control token.
_NAMES = ("image", "thinking_start", "thinking_end", "dsml")
_UNSPELLED = {name: f"\0{secrets.token_hex(8)} {name}\0" for name in _NAMES}
_PLAIN_TOKENS = recipe.SpecialTokens(**_UNSPELLED)
_EFFORT_NUMBERS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
_DEFAULT_EFFORT_LINE = "Reasoning Effort: 75 ("
# How deepseek-recipe says what it means, where it does: ".messages.0.content[1]: ...", "Invalid 'tools[0].name': ...".
_NAMED_PLACE = re.compile(r"(?:Invalid ')?\.?((?:messages|input|tools)\b[\w.\[\]]*)'?: ")
_BAD_SCHEMA = re.compile(r"Invalid schema for function '(.*?)': ")
_SHAPE = "invalid request body: "
_SCHEMA_KEYS = {"chat": "function.parameters", "messages": "input_schema", "responses": "parameters"}
_PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
# Control tokens that the answer parser reads, and those that mark places in an image and belong to the answer.
_MARKS = ("ref", "box", "point", "polygon")
_VISIBLE = ("</think>", "｜DSML｜", *(f"<｜{slash}{mark}｜>" for mark in _MARKS for slash in ("", "/")))


class ChatDelta(NamedTuple):
    """A piece of an answer. The text of a tool call is one whole call as JSON: id, type, function {name, arguments}."""

    kind: DeltaKind
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    token_ids: the prompt; each image is one `image_token_id`. images: their sources in the order of these tokens, and
    image_fields: where each stood in the request. text: the same prompt spelled out. thinking: the answer begins inside
    the reasoning. request: what deepseek-recipe made of the conversation.
    """

    token_ids: list[int]
    images: list[ImageSource]
    image_fields: list[str]
    text: str
    thinking: bool
    request: recipe.ConversationRequest
    is_plain: bool = False

    def parser(self) -> ChatParser:
        """A new parser for one answer to this prompt."""
        return ChatParser(self)

    def processor(self, generator: Any) -> recipe.StreamProcessor:
        """A stream processor that reads one answer to this prompt for a chunk generator of deepseek-recipe."""
        options = self.request.parsing_options
        if self.is_plain:  # a continuation of content keeps every character
            stage = recipe.ThinkingInitialStage.ContentContinuation
            options = recipe.ParsingOptions(
                parse_tool_calls=False, thinking_initial_stage=stage, special_tokens=_PLAIN_TOKENS
            )
        return recipe.StreamProcessor(generator, options)


def options_for(tokenizer: Tokenizer) -> recipe.ConversionOptions:
    """How deepseek-recipe has to read requests for this vocabulary."""
    tokens = _SPECIAL_TOKENS if tokenizer.has_control_tokens else _PLAIN_TOKENS
    return recipe.ConversionOptions().with_special_tokens(tokens)


def render_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
    effort: Effort | None = None,
) -> ChatPrompt:
    """Render a conversation up to the point where the assistant speaks.

    Args:
        messages: as in Chat Completions: role (system, user, assistant, tool, latest_reminder) and content, a text or a
            list of parts {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": <data URL>}} or
            {"type": "image", "image": <path, bytes or data URL>}; tool_calls and reasoning_content (or reasoning) on
            assistant messages. Images are not read here.
        tools: function tools as in Chat Completions.
        thinking, effort: as in `render_request`.
    Edge cases: control tokens spelled in a message stay plain text. Reasoning of past turns is dropped unless tools are
        given; missing reasoning counts as empty. The role developer is refused, as in the published renderer.
    Raises:
        PromptError: no messages, or as `render_request`.
        ImageError: an image for a model that reads none, or an image_url that is not a data URL.
    Source: architecture.md 8.2 and 8.3.
    """
    if not messages:
        raise PromptError("messages: expected at least one, got none")
    images: list[ImageSource] = []
    body: dict[str, Any] = {"messages": [_take_images(message, images) for message in messages]}
    if tools:
        body["tools"] = list(tools)
    prompt = render_request(tokenizer, "chat", body, thinking=thinking, effort=effort)
    numbers = [int(base64.b64decode(str(url).rpartition(",")[2])) for url in prompt.images]
    return replace(prompt, images=[images[number] for number in numbers])


def render_request(
    tokenizer: Tokenizer,
    protocol: Protocol,
    body: Mapping[str, Any],
    *,
    thinking: bool | None = None,
    effort: Effort | None = None,
    most_tokens: int | None = None,
) -> ChatPrompt:
    """Render the conversation of a request of one of the protocols.

    Args:
        body: the fields of the request that make the prompt: messages or input, system or instructions, tools,
            tool_choice, response format. Model and thinking are set here.
        thinking: None means on where the vocabulary knows it.
        effort: 1 to 100, or a level: minimal and low are 50; medium, high, xhigh and None 75; max 100.
        most_tokens: a conversation that surely has more is refused before it is read whole (`check_length`).
    Returns: the prompt; `images` holds URLs, as they came.
    Raises:
        PromptError: a message or tool that the format cannot express, effort without thinking, thinking or tools with a
            vocabulary that lacks the control tokens; a conversation beyond `most_tokens`.
        ImageError: an image for a model that reads none.
    """
    is_plain = not tokenizer.has_control_tokens
    if is_plain and (thinking or effort is not None or body.get("tools")):
        field = "thinking" if thinking else "effort" if effort is not None else "tools"
        raise PromptError(f"{field}: expected none: this model's vocabulary lacks V4.1's control tokens; leave it out")
    thinking = not is_plain if thinking is None else thinking
    number = effort_number(effort, thinking)
    mode = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    if protocol == "responses":
        mode = {"reasoning": {"effort": "high" if thinking else "none"}}
    request = _convert(tokenizer, protocol, {**body, **mode})
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(_PLAIN_TOKENS if is_plain else _SPECIAL_TOKENS)
    rendered = encoding.render_conversation(request.conversation)
    sources = rendered.image_sources
    fields = _image_fields(body, sources)
    if sources and not tokenizer.has_vision:
        raise ImageError(f"{fields[0]}: expected text, got {len(sources)} image(s); this model does not read images")
    if most_tokens is not None:
        messages = request.conversation.messages
        written = "".join(message.content for message in messages) if is_plain else rendered.prompt
        tokenizer.check_length("input" if protocol == "responses" else "messages", written, most_tokens)
    pieces = _plain_pieces(tokenizer, request.conversation) if is_plain else _pieces(rendered, number)
    ids: list[int] = []
    for text, is_control in pieces:
        ids += [_control_id(tokenizer, text)] if is_control else tokenizer.encode(text, control_tokens=False)
    images: list[ImageSource] = [source.data_url or source.url or "" for source in sources]
    stage = request.parsing_options.thinking_initial_stage
    is_thinking = stage is not None and stage.starts_in_reasoning()
    return ChatPrompt(ids, images, fields, "".join(text for text, _ in pieces), is_thinking, request, is_plain)


def hidden_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Control tokens that must not show up in the text of an answer: all but those that the parser reads and the marks
    of places in an image. For `Detokenizer`."""
    return tokenizer.control_token_ids - {tokenizer.id_of(token) for token in _VISIBLE}


class ChatParser:
    """Splits the text of one answer into reasoning, content and tool calls while it arrives.

    Reasoning ends at `</think>`; without it all of the text is reasoning. With tools, the marker `<｜DSML｜` ends
    reasoning and content alike and begins a tool block, in V4.1's spelling or in V4's. Text inside and after a block
    that belongs to no call is dropped; a call that was cut off is given out with its arguments so far. Without tools a
    block is ordinary text. Newlines around `</think>` and at the start are dropped. The joined deltas do not depend on
    how the text is split, except for the made-up call ids.
    Made by `ChatPrompt.parser`. Source: architecture.md 8.4.
    """

    def __init__(self, prompt: ChatPrompt) -> None:
        self._call: dict[str, Any] | None = None
        generator = recipe.ChatCompletionRequest.chunk_generator(prompt.request, "answer", MODEL_NAME)
        self._processor = prompt.processor(generator)
        self._processor.push(recipe.InferenceChunk.ready())

    def feed(self, text: str) -> list[ChatDelta]:
        """What this piece of text completes; possibly nothing."""
        return self._read(self._processor.push(recipe.InferenceChunk.text(text))) if text else []

    def finish(self) -> list[ChatDelta]:
        """What is left at the end of the answer. Call it once, last."""
        end = recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)
        return [*self._read([*self._processor.push(end), *self._processor.finish()]), *self._close_call()]

    def _read(self, chunks: Iterable[Any]) -> list[ChatDelta]:
        deltas: list[ChatDelta] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                delta = choice["delta"]
                if text := delta.get("reasoning_content"):
                    deltas.append(ChatDelta("reasoning", text))
                if text := delta.get("content"):
                    deltas.append(ChatDelta("content", text))
                for part in delta.get("tool_calls") or ():
                    if "id" in part:  # the first part of a call carries its id and name
                        deltas += self._close_call()
                        self._call = {key: part[key] for key in ("id", "type", "function")}
                    elif self._call is not None:
                        self._call["function"]["arguments"] += part["function"]["arguments"]
        return deltas

    def _close_call(self) -> list[ChatDelta]:
        call, self._call = self._call, None
        return [] if call is None else [ChatDelta("tool_call", json.dumps(call, ensure_ascii=False))]


def _take_images(message: Mapping[str, Any], images: list[ImageSource]) -> dict[str, Any]:
    """The message with each image replaced by a data URL that holds its number in `images`."""
    if not isinstance(message, Mapping):
        raise PromptError(f"messages: expected objects with role and content, got {type(message).__name__}")
    out = dict(message)
    if "reasoning" in out:
        reasoning = out.pop("reasoning")
        out.setdefault("reasoning_content", reasoning)
    if isinstance(out.get("content"), list | tuple):
        out["content"] = [_take_image(part, images) for part in out["content"]]
    return out


def _take_image(part: Any, images: list[ImageSource]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        source = part.get("image")
    elif kind == "image_url":
        link = part.get("image_url")
        source = link.get("url") if isinstance(link, Mapping) else link
        if not isinstance(source, str) or source[:5].lower() != "data:":
            raise ImageError(f"image_url: expected a data URL, got {str(source)[:80]!r}; nothing is downloaded")
    elif kind == "file":  # deepseek-recipe would take images in it
        raise PromptError("messages: expected parts of type text, image_url or image, got one of type file")
    else:
        return part
    if not isinstance(source, str | bytes | Path):
        raise ImageError(f"image: expected a path, bytes or a data URL, got {type(source).__name__}")
    images.append(source)
    number = base64.b64encode(str(len(images) - 1).encode()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}


def effort_number(effort: Effort | None, thinking: bool) -> int:
    """An effort as the number that the format writes. Raises PromptError for one that it does not know."""
    if effort is None:
        return _EFFORT_NUMBERS["high"]
    if not thinking:
        raise PromptError(f"effort: expected none without thinking, got {effort!r}; leave it out")
    number = _EFFORT_NUMBERS.get(effort) if isinstance(effort, str) else effort
    if type(number) is not int or not 1 <= number <= 100:
        raise PromptError(f"effort: expected 1 to 100 or one of {', '.join(_EFFORT_NUMBERS)}, got {effort!r}")
    return number


def _convert(tokenizer: Tokenizer, protocol: Protocol, body: dict[str, Any]) -> recipe.ConversationRequest:
    field = "input" if protocol == "responses" else "messages"

    def convert(body: Mapping[str, Any]) -> recipe.ConversationRequest | str:
        """What deepseek-recipe makes of a body, or why it makes nothing."""
        try:
            text = json.dumps({**body, "model": MODEL_NAME}, ensure_ascii=False)
            request: recipe.ConversationRequest = REQUESTS[protocol](text).convert(options_for(tokenizer))
            return request
        except recipe.ConversionError as error:
            with suppress(ValueError, TypeError, KeyError):
                return str(json.loads(error.body)["error"]["message"])
            return str(error.body)
        except UnicodeEncodeError:
            return "expected Unicode text, got a lone surrogate"
        except (ValueError, TypeError) as error:
            return str(error)

    made = convert(body)
    if not isinstance(made, str):
        return made

    def narrowed(place: str, value: Any, put: Callable[[Any], Mapping[str, Any]]) -> str:
        """The innermost entry of lists in `value` that the complaint is about. put: the body with another value."""
        if isinstance(value, list) and value:  # whatever follows the entry
            number = bisect_left(range(len(value)), True, key=lambda last: convert(put(value[: last + 1])) == made)
            return narrowed(f"{place}[{number}]", value[number], lambda entry: put([*value[:number], entry]))
        for key in ("content", "output", "tools", "tool_calls") if isinstance(value, Mapping) else ():
            if isinstance(value.get(key), list) and convert(put({**value, key: []})) != made:
                return narrowed(f"{place}.{key}", value[key], lambda some: put({**value, key: some}))  # noqa: B023
        return place

    if (named := _NAMED_PLACE.match(made)) is not None:
        place = _place(named[1])
        top = field if place.startswith(field) and place.endswith("]") and protocol != "messages" else None
    else:  # the field without which there is no such complaint
        suspects = [name for name in ("tool_choice", *body) if name in body and name != field]
        place = next((name for name in suspects if convert({**body, name: None}) != made), field)
        top = place if place == "tools" or made.startswith(_SHAPE) else None
    if (schema := _BAD_SCHEMA.match(made)) is not None:
        place = schema_fields(protocol, body.get("tools") or ()).get(schema[1], place)
    elif top is not None:
        place = narrowed(top, body[top], lambda value: {**body, top: value})
    raise PromptError(f"{place}: {made[named.end() if named else 0 :].removeprefix(_SHAPE)}")


def schema_fields(
    protocol: Protocol, tools: Iterable[Mapping[str, Any]], place: str = "tools", prefix: str = ""
) -> dict[str, str]:
    """The field of each tool's schema, by the tool's name in the prompt: with its namespace in front."""
    fields: dict[str, str] = {}
    for number, tool in enumerate(tools):
        name, here = prefix + (tool["function"] if protocol == "chat" else tool)["name"], f"{place}[{number}]"
        if protocol == "responses" and tool.get("type") == "namespace":
            fields |= schema_fields(protocol, tool["tools"], f"{here}.tools", f"{name}::")
        else:
            fields[name] = f"{here}.{_SCHEMA_KEYS[protocol]}"
    return fields


def _place(path: str) -> str:
    """deepseek-recipe's path of a field in one spelling: `messages[0].content[1]`."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def _image_fields(body: Mapping[str, Any], sources: Iterable[recipe.ImageSource]) -> list[str]:
    """Where each image stands. deepseek-recipe names what holds them, and keeps their order in there."""

    def parts(place: str) -> Iterator[str]:
        value: Any = body
        for key in re.findall(r"\w+", place):
            value = value[int(key) if isinstance(value, list) else key]
        for key in ("content", "output"):
            for number, part in enumerate(value[key] if isinstance(value.get(key), list) else ()):
                if isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image"):
                    yield f"{place}.{key}[{number}]"

    places = [_place(source.path.removeprefix(".")).removesuffix(".tool_result") for source in sources]
    found = {place: parts(place) for place in places}
    return [next(found[place], place) for place in places]


def _pieces(rendered: recipe.RenderedPrompt, effort: int) -> list[tuple[str, bool]]:
    """The prompt as texts and control tokens in turn; the second value tells which."""
    pieces: list[tuple[str, bool]] = []
    done = 0
    for start, end in rendered.special_ranges:
        if start > done:
            pieces.append((rendered.prompt[done:start], False))
        pieces.append((rendered.prompt[start:end], True))
        done = end
    if done < len(rendered.prompt):
        pieces.append((rendered.prompt[done:], False))
    # deepseek-recipe takes levels only; the number itself is one place in the text after BOS and the system token.
    if len(pieces) > 2 and pieces[2][0].startswith(_DEFAULT_EFFORT_LINE):
        rest = pieces[2][0].removeprefix(_DEFAULT_EFFORT_LINE)
        pieces[2] = (f"Reasoning Effort: {effort} ({rest}", False)
    return pieces


def _control_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.id_of(token)
    if token_id is None:
        raise PromptError(f"chat: expected the control token {token} in the vocabulary, this tokenizer.json lacks it")
    return token_id


def _plain_pieces(tokenizer: Tokenizer, conversation: recipe.Conversation) -> list[tuple[str, bool]]:
    def control(token_id: int) -> tuple[str, bool]:
        return tokenizer.token_of(token_id), True

    pieces = [control(tokenizer.bos_token_id)]
    for message in conversation.messages:
        name = _PLAIN_ROLES.get(message.role)
        if name is None or message.tool_calls or message.prefix:
            raise PromptError(
                f"messages: expected {', '.join(_PLAIN_ROLES)} and no tool calls or prefix, got {message.role!r}: "
                "this model's vocabulary lacks V4.1's control tokens"
            )
        pieces.append((f"{name}: ", False))
        for number, part in enumerate(message.content.split(_UNSPELLED["image"])):
            pieces += [control(tokenizer.image_token_id)] if number else []
            pieces.append((part, False))
        pieces.append(control(tokenizer.eos_token_id) if message.role == "assistant" else ("\n\n", False))
    return [*pieces, ("Assistant:", False)]
