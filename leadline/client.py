"""What clients of an OpenAI-compatible server share: addresses, errors in words, server-sent events.

Only standard paths and fields, so the same commands drive other servers as well.
"""

from __future__ import annotations

import json
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


def headers(api_key: str) -> dict[str, str]:
    """The headers of every request; no key, no header.

    Raises: ServerError for a key that no header can carry.
    """
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise ServerError("api key: expected printable ASCII characters, got others")
    return {"Authorization": f"Bearer {api_key}"}


def unreachable(url: str, error: httpx.HTTPError) -> ServerError:
    """The error for a request that got no answer, or only a part of one."""
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerError(f"server {url}: not reachable ({reason}); is it running there?")
    if isinstance(error, httpx.TimeoutException):
        return ServerError(f"server {url}: no answer in time ({reason})")
    return ServerError(f"server {url}: the connection broke off ({reason})")


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


def models(response: httpx.Response, url: str) -> list[str]:
    """The model names in the answer to `/v1/models`, at least one.

    Raises: ServerError if the answer is something else, such as a page of another server.
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
    return names


def event(line: str) -> dict[str, Any] | None:
    """The object of a `data:` line of an event stream; None for all other lines and for the end mark.

    Raises: ServerError for data that is no JSON object, and for an error that the server reports inside its stream.
    """
    name, _, data = line.partition(":")
    if name != "data" or data.strip() == "[DONE]":
        return None
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"stream: expected a JSON object in each event, got {data.strip()[:_MAX_MESSAGE]!r}")
    if found.get("error"):
        raise ServerError(f"the server ended the answer: {_words(data.encode())}")
    return found


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
