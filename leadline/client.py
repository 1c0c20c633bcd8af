"""What clients of an OpenAI-compatible server share: addresses, errors in words, server-sent events.

Only standard paths and fields, so the same commands drive other servers as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from leadline.errors import ServerError

CONNECT_SECONDS = 10.0
_MAX_MESSAGE = 300  # characters of a server's own words that an error repeats


def base_url(url: str) -> str:
    """The address in front of `/v1/...`, without a slash at its end; `/v1` at the end of `url` is dropped.

    Raises: ServerError if `url` is not a http or https address.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half an IPv6 address
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise ServerError(f"url {url!r}: expected an address like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def connection(url: str, api_key: str) -> dict[str, Any]:
    """The keyword arguments of a httpx client for a server. Only connecting has a limit: a long prompt is silent for
    minutes.

    Raises: ServerError for an address that is none, or a key that no header can carry.
    """
    if not api_key.isascii() or not api_key.isprintable():
        raise ServerError("api key: expected printable ASCII characters, got others")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return {"base_url": base_url(url), "headers": headers, "timeout": timeout}


@contextmanager
def failures_in_words(url: str) -> Iterator[None]:
    """Raises a ServerError in place of httpx's errors, for requests that got no answer or only a part of one."""
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise ServerError(f"server {url}: not reachable ({reason}); is it running there?") from None
        if isinstance(error, httpx.TimeoutException):
            raise ServerError(f"server {url}: no answer in time ({reason})") from None
        raise ServerError(f"server {url}: the connection broke off ({reason})") from None


def refused(url: str, path: str, status: int, body: bytes) -> ServerError:
    """The error for an answer with a status other than 2xx: what was asked, the status, the server's own words."""
    hint = {
        401: "; give its key with --api-key",
        403: "; give its key with --api-key",
        404: "; does the address lead to an OpenAI-compatible server, and does it know the model?",
        405: "; does the address lead to an OpenAI-compatible server?",
        429: "; it is busy, try again later",
    }.get(status, "")
    return ServerError(f"server {url}: {path} answered {status}: {_words(body)}{hint}")


def model_name(response: httpx.Response, url: str, wanted: str) -> str:
    """`wanted`, or if it is empty the first model in the answer to `/v1/models`.

    Raises: ServerError if the model is not there, or the answer is something else, such as a page of another server.
    """
    if not response.is_success:
        raise refused(url, "/v1/models", response.status_code, response.content)
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        names = []
    if not names:
        raise ServerError(
            f"server {url}: expected a list of models from /v1/models, got {_words(response.content)!r}; does the "
            "address lead to an OpenAI-compatible server?"
        )
    if wanted and wanted not in names:
        raise ServerError(f"model {wanted!r}: expected one that {url} serves, {', '.join(names)}")
    return wanted or names[0]


class EventStream:
    """Reads an answer line by line. usage: the server's counts, as far as it tells them. finish_reason: as it came."""

    def __init__(self) -> None:
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None

    def choices(self, line: str) -> list[dict[str, Any]]:
        """The choices in a `data:` line; none in all other lines.

        Raises: ServerError for data that is no JSON object, and for an error that the server reports inside its stream.
        """
        name, _, data = line.partition(":")
        if name != "data" or data.strip() == "[DONE]":
            return []
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"stream: expected a JSON object in each event, got {data.strip()[:_MAX_MESSAGE]!r}")
        if found.get("error"):
            raise ServerError(f"the server ended the answer: {_words(data.encode())}")
        self.usage = found.get("usage") or self.usage
        choices: list[dict[str, Any]] = found.get("choices") or []
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        return choices

    def check_end(self, url: str) -> None:
        """Raises ServerError unless the answer is complete."""
        if self.finish_reason is None:
            raise ServerError(f"server {url}: the stream ended before the answer did")


def _words(body: bytes) -> str:
    """The message of an error body in one line: OpenAI's form, FastAPI's, or the start of whatever came."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict):
        error = found.get("error", found)
        message = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
        text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    return " ".join(text.split())[:_MAX_MESSAGE] or "(nothing)"
