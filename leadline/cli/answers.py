"""Where the answers of `leadline chat` come from: a model in this process, or a server.

Both have one method, `answer(messages, progress)`: the answer piece by piece; closing the iterator cancels it. Messages
are those of `text.chat.render_chat`, with images as {"type": "image", "image": <path>}. It raises LeadlineError if the
request is refused or the answer breaks off.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from leadline import client
from leadline.config.sampling import SamplingParams
from leadline.errors import ImageError, LeadlineError
from leadline.text.chat import render_chat

if TYPE_CHECKING:
    from leadline.llm import LLM

Progress = Callable[[int, int], None]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """What one step added. num_tokens: newly made; a server tells it with the last piece only.

    finish_reason and error come with the last piece.
    """

    content: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: LeadlineError | None = None


class ModelAnswers:
    """Answers of a loaded model. `options`: thinking and effort, as in `LLM.chat`.

    Raises: PromptError for options that the model does not know.
    """

    def __init__(self, llm: LLM, params: SamplingParams, **options: Any) -> None:
        render_chat(llm.tokenizer, [{"role": "user", "content": ""}], **options)
        self._llm = llm
        self._params = params
        self._options = options

    def answer(self, messages: list[Message], progress: Progress) -> Generator[AnswerPiece, None, None]:
        with closing(self._llm.stream_chat(messages, self._params, progress=progress, **self._options)) as pieces:
            for piece in pieces:
                yield AnswerPiece(
                    content="".join(part.text for part in piece.parts if part.kind != "reasoning"),
                    reasoning="".join(part.text for part in piece.parts if part.kind == "reasoning"),
                    num_tokens=len(piece.delta.token_ids),
                    finish_reason=piece.delta.finish_reason,
                    error=piece.delta.error,
                )


class ServerAnswers:
    """Answers of a server over `/v1/chat/completions`. An iterator that is closed drops the connection, and with it the
    server's work.

    model: its name there; empty for the first that the server lists. params: values that equal their defaults are left
        out, so that the server's own apply and fields that only some servers know are sent when asked for.
    Raises: ServerError if the server is not reachable or speaks another protocol.
    """

    def __init__(
        self,
        url: str,
        params: SamplingParams,
        *,
        api_key: str = "",
        model: str = "",
        thinking: bool | None = None,
        effort: int | str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(**client.connection(url, api_key), transport=transport)
        self._url = client.base_url(url)
        with client.failures_in_words(self._url):
            listed = self._http.get("/v1/models", timeout=client.CONNECT_SECONDS)
        self.model = client.model_name(listed, self._url, model)
        self._body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        self._body |= _sampling_fields(params)
        if thinking is not None:
            self._body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if effort is not None:
            self._body["reasoning_effort"] = effort

    def answer(self, messages: list[Message], progress: Progress) -> Generator[AnswerPiece, None, None]:
        body = self._body | {"messages": [_with_image_urls(message) for message in messages]}
        path, stream = "/v1/chat/completions", client.EventStream()
        with client.failures_in_words(self._url), self._http.stream("POST", path, json=body) as response:
            if not response.is_success:
                raise client.refused(self._url, path, response.status_code, response.read())
            for line in response.iter_lines():
                for choice in stream.choices(line):
                    delta = choice.get("delta") or {}
                    yield AnswerPiece(
                        content=delta.get("content") or "",
                        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
                    )
        stream.check_end(self._url)
        yield AnswerPiece(num_tokens=stream.usage.get("completion_tokens", 0), finish_reason=stream.finish_reason)


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The request fields for what differs from the defaults; `max_tokens` always, as servers differ in theirs."""
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens")
    defaults = SamplingParams(max_tokens=None)
    return {name: value for name in names if (value := getattr(params, name)) != getattr(defaults, name)}


def _with_image_urls(message: Message) -> Message:
    """The message with image files as data URLs, which is how the protocol carries them."""
    if isinstance(message["content"], str):
        return message
    return message | {"content": [_image_url(part) if part["type"] == "image" else part for part in message["content"]]}


def _image_url(part: Message) -> Message:
    path = Path(part["image"])
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ImageError(f"image {path}: no longer readable: {error.strerror}") from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
