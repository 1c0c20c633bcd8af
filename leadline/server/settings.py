"""What an operator decides about a server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All values have a safe default.

    names: model names that requests may use; the first one is what responses report.
    api_key: required as bearer token or x-api-key on all paths but the page, /health, /ready, /metrics and /version.
    max_body_bytes: of one request. A million tokens of text are 3 to 12 MiB of JSON, the latter all in escapes; what is
        left is for images in base64.
    read_seconds: in which a request has to come, from its first byte to its last.
    max_images, max_n: of one request. max_answers: to all prompts of one request, which must be able to wait together.
    image_urls: fetch https images from public addresses. image_seconds: for each of them, all in all.
    request_seconds: after which a request ends with an error; None for never.
    drain_seconds: for running requests when the server is told to stop.
    log_prompts: write prompts into the log.
    """

    names: tuple[str, ...] = ("leadline",)
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 32 << 20
    read_seconds: float = 60.0
    max_images: int = 32
    max_n: int = 16
    max_answers: int = 256
    image_urls: bool = True
    image_seconds: float = 15.0
    request_seconds: float | None = None
    drain_seconds: float = 30.0
    log_prompts: bool = False
