"""Conversations to prompts, and answers to reasoning, content and tool calls.

A vocabulary with V4.1's control tokens is served by `deepseek-recipe`, the published renderer and parser. A vocabulary
without them (a small model) gets a plain format: BOS, then each message as `System: `, `User: ` or `Assistant: ` and
its text, two newlines after system and user text, EOS after an answer, and `Assistant:` at the end. The plain format
knows neither thinking nor tools, and its answers are content as a whole.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import deepseek_recipe as recipe

from leadline.errors import ImageError, PromptError
from leadline.text.tokenizer import Tokenizer

Effort = int | Literal["minimal", "low", "medium", "high", "xhigh", "max"]
ImageSource = str | bytes | Path
Messages = Sequence[Mapping[str, Any]]
DeltaKind = Literal["reasoning", "content", "tool_call"]

_MODEL = "DeepSeek-V4.1-Flash"  # the name under which deepseek-recipe knows the format
# The released vocabulary spells the image token in another way than deepseek-recipe does by default.
_SPECIAL_TOKENS = recipe.SpecialTokens(image="<｜deepseek_image｜>")
_OPTIONS = recipe.ConversionOptions().with_special_tokens(_SPECIAL_TOKENS)
_EFFORT_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
_DEFAULT_EFFORT_LINE = "Reasoning Effort: 75 ("
_PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
# Control tokens that the answer parser reads, and those that mark places in an image and belong to the answer.
_VISIBLE = (
    *("</think>", "｜DSML｜"),
    *(
        "<｜ref｜>",
        "<｜/ref｜>",
        "<｜box｜>",
        "<｜/box｜>",
        "<｜point｜>",
        "<｜/point｜>",
        "<｜polygon｜>",
        "<｜/polygon｜>",
    ),
)


class ChatDelta(NamedTuple):
    """A piece of an answer. The text of a tool call is one whole call as JSON: id, type, function {name, arguments}."""

    kind: DeltaKind
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    token_ids: the prompt; each image is one `image_token_id`. images: their sources in the order of these tokens. text:
    the same prompt spelled out. thinking: the answer begins inside the reasoning.
    """

    token_ids: list[int]
    images: list[ImageSource]
    text: str
    thinking: bool
    _request: recipe.ConversationRequest | None

    def parser(self) -> ChatParser:
        """A new parser for one answer to this prompt."""
        return ChatParser(self._request)


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
        thinking: None means on where the vocabulary knows it.
        effort: 1 to 100, or a level: minimal and low are 50; medium, high, xhigh and None 75; max 100.
    Edge cases: control tokens spelled in a message stay plain text. Reasoning of past turns is dropped unless tools are
        given; missing reasoning counts as empty. The role developer is refused, as in the published renderer.
    Raises:
        PromptError: no messages, a message or tool that the format cannot express, effort without thinking, thinking or
            tools with a vocabulary that lacks the control tokens.
        ImageError: an image for a model that reads none, or an image_url that is not a data URL.
    Source: architecture.md 8.2 and 8.3.
    """
    if not messages:
        raise PromptError("messages: expected at least one, got none")
    images: list[ImageSource] = []
    plain_messages = [_take_images(message, images) for message in messages]
    if images and not tokenizer.has_vision:
        raise ImageError(f"messages: expected text only, got {len(images)} image(s); this model does not read images")
    if not tokenizer.has_control_tokens:
        if thinking or effort is not None or tools:
            raise PromptError(
                "chat: expected neither thinking, effort nor tools, as this vocabulary lacks V4.1's control tokens"
            )
        return _render_plain(tokenizer, plain_messages, images)
    thinking = True if thinking is None else thinking
    request = _convert(plain_messages, tools, thinking, effort)
    rendered = (
        recipe.DeepseekV41Encoding().with_special_tokens(_SPECIAL_TOKENS).render_conversation(request.conversation)
    )
    pieces = _pieces(rendered)
    if isinstance(effort, int):
        pieces[2] = (_set_effort(pieces[2][0], effort), False)
    ids: list[int] = []
    for text, is_control in pieces:
        ids += [_control_id(tokenizer, text)] if is_control else tokenizer.encode(text, control_tokens=False)
    order = [_image_number(source.data_url) for source in rendered.image_sources]
    starts_in_reasoning = request.parsing_options.thinking_initial_stage
    return ChatPrompt(
        ids,
        [images[number] for number in order],
        "".join(text for text, _ in pieces),
        starts_in_reasoning is not None and starts_in_reasoning.starts_in_reasoning(),
        request,
    )


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

    def __init__(self, request: recipe.ConversationRequest | None) -> None:
        self._processor: recipe.StreamProcessor | None = None
        self._call: dict[str, Any] | None = None
        if request is not None:
            generator = recipe.ChatCompletionRequest.chunk_generator(request, "answer", _MODEL)
            self._processor = recipe.StreamProcessor(generator, request.parsing_options)
            self._processor.push(recipe.InferenceChunk.ready())

    def feed(self, text: str) -> list[ChatDelta]:
        """What this piece of text completes; possibly nothing."""
        if self._processor is None:
            return [ChatDelta("content", text)] if text else []
        return self._read(self._processor.push(recipe.InferenceChunk.text(text))) if text else []

    def finish(self) -> list[ChatDelta]:
        """What is left at the end of the answer. Call it once, last."""
        if self._processor is None:
            return []
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
        if not isinstance(source, str) or not source.startswith("data:"):
            raise ImageError(f"image_url: expected a data URL, got {str(source)[:80]!r}; nothing is downloaded")
    else:
        return part
    if not isinstance(source, str | bytes | Path):
        raise ImageError(f"image: expected a path, bytes or a data URL, got {type(source).__name__}")
    images.append(source)
    number = base64.b64encode(str(len(images) - 1).encode()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}


def _image_number(url: str | None) -> int:
    assert url is not None
    return int(base64.b64decode(url.rpartition(",")[2]))


def _convert(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, thinking: bool, effort: Effort | None
) -> recipe.ConversationRequest:
    body: dict[str, Any] = {"model": _MODEL, "messages": messages}
    body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if tools:
        body["tools"] = list(tools)
    if effort is not None:
        is_number = isinstance(effort, int) and not isinstance(effort, bool)
        if not thinking:
            raise PromptError(f"effort: expected none without thinking, got {effort!r}; leave it out")
        if effort not in (range(1, 101) if is_number else _EFFORT_LEVELS):
            raise PromptError(f"effort: expected 1 to 100 or one of {', '.join(_EFFORT_LEVELS)}, got {effort!r}")
        if not is_number:
            body["reasoning_effort"] = effort
    try:
        return recipe.ChatCompletionRequest(json.dumps(body, ensure_ascii=False)).convert(_OPTIONS)
    except recipe.ConversionError as error:
        raise PromptError(f"messages: {_reason(error)}") from None
    except UnicodeEncodeError:
        raise PromptError("messages: expected Unicode text, got a lone surrogate") from None
    except (ValueError, TypeError) as error:
        raise PromptError(f"messages: {error}") from None


def _reason(error: recipe.ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return error.body


def _pieces(rendered: recipe.RenderedPrompt) -> list[tuple[str, bool]]:
    """The prompt as texts and control tokens in turn; the second value tells which."""
    pieces: list[tuple[str, bool]] = []
    done = 0
    for start, end in rendered.special_ranges:
        if start > done:
            pieces.append((rendered.prompt[done:start], False))
        pieces.append((rendered.prompt[start:end], True))
        done = end
    return [*pieces, (rendered.prompt[done:], False)] if done < len(rendered.prompt) else pieces


def _set_effort(text: str, effort: int) -> str:
    """deepseek-recipe takes levels only; the number itself is one place in the text after BOS and the system token."""
    assert text.startswith(_DEFAULT_EFFORT_LINE)
    return f"Reasoning Effort: {effort} (" + text.removeprefix(_DEFAULT_EFFORT_LINE)


def _control_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.id_of(token)
    if token_id is None:
        raise PromptError(f"chat: expected the control token {token} in the vocabulary, this tokenizer.json lacks it")
    return token_id


def _render_plain(tokenizer: Tokenizer, messages: list[dict[str, Any]], images: list[ImageSource]) -> ChatPrompt:
    ids, texts = [tokenizer.bos_token_id], [tokenizer.token_of(tokenizer.bos_token_id)]

    def add_text(text: str) -> None:
        texts.append(text)
        ids.extend(tokenizer.encode(text, control_tokens=False))

    def add_token(token_id: int) -> None:
        texts.append(tokenizer.token_of(token_id))
        ids.append(token_id)

    for message in messages:
        role = message.get("role")
        name = _PLAIN_ROLES.get(role) if isinstance(role, str) else None
        if name is None or message.get("tool_calls"):
            raise PromptError(
                f"messages: expected roles {', '.join(_PLAIN_ROLES)} without tool calls, got {role!r}; this vocabulary "
                "lacks V4.1's control tokens"
            )
        add_text(f"{name}: ")
        for number, part in enumerate(_plain_parts(message.get("content"))):
            if number:
                add_text("\n\n")
            if part is None:
                add_token(tokenizer.image_token_id)
            else:
                add_text(part)
        if role == "assistant":
            add_token(tokenizer.eos_token_id)
        else:
            add_text("\n\n")
    add_text("Assistant:")
    return ChatPrompt(ids, images, "".join(texts), False, None)


def _plain_parts(content: Any) -> list[str | None]:
    """Texts of a message's parts, None for an image."""
    if isinstance(content, str):
        return [content]
    parts: list[str | None] = []
    for part in content if isinstance(content, list) else [None]:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            parts.append(None)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            raise PromptError(f"messages: expected content as a text or a list of text and image parts, got {part!r}")
    return parts
