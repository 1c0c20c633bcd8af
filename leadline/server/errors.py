"""Errors as the protocols write them: a status, a message, and the field it is about."""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from leadline.errors import CapacityError, EngineError, LeadlineError, NumericsError, QueueFullError, RequestError

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*)(?: \d+)?: ")
_UNION_MEMBER = re.compile(r"[\[-]|^[A-Z]|^(str|int|float|bool|dict|none)$")
# In the words of JSON: what pydantic says was wrong, and by its names for them, the lists that a union may hold.
_EXPECTED = {
    "string_type": "a text", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
    "none_required": "null", "list_type": "a list", "dict_type": "an object", "model_attributes_type": "an object",
    "list[str]": "a list of texts", "list[constrained-int]": "a list of integers",
    "list[list[constrained-int]]": "a list of lists of integers", "list[dict[str,any]]": "a list of objects",
}  # fmt: skip
_PYDANTIC = re.compile(r"^\w+ should (be|have) | after validation, not \w+$")
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(HTTPException):
    """What a request gets instead of an answer.

    param: the field it is about. kind: OpenAI's error type; code: for programs. retry_after: seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if retry_after is not None:
            headers = {"Retry-After": str(max(1, round(retry_after)))}
        super().__init__(status, message, headers)
        self.param, self.kind, self.code = param, kind, code

    def body(self, path: str) -> dict[str, Any]:
        """The error document, in the form of the protocol that `path` belongs to."""
        if path.startswith("/v1/messages"):
            default = "api_error" if self.status_code >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_TYPES.get(self.status_code, default)
            return {"type": "error", "error": {"type": kind, "message": self.detail, "param": self.param}}
        error = {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status_code, dict(self.headers or {}))


def request_id_of(wanted: str) -> str:
    """The client's own id of a request if it is a proper one, else a new one."""
    return wanted if _REQUEST_ID.fullmatch(wanted) else secrets.token_hex(12)


def too_slow(seconds: float) -> ApiError:
    """What a request gets that does not come whole in time; the connection is closed."""
    message = f"request: expected it whole within {seconds:g} seconds; it is still incomplete"
    return ApiError(408, message, kind="timeout_error", code="read_timeout", headers={"Connection": "close"})


def api_error(error: Exception) -> ApiError:
    """Any exception as an ApiError. One of ours keeps its message, an unexpected one does not show what it says."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return ApiError(error.status_code, str(error.detail), kind=kind, headers=error.headers)  # Allow, of a 405
    message = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after=error.retry_after)
    if isinstance(error, RequestError | CapacityError):
        field = _FIELD.match(message)
        is_too_long = isinstance(error, CapacityError) or ("expected at most" in message and "context" in message)
        code = "context_length_exceeded" if is_too_long else "invalid_value"
        return ApiError(400, message, param=field[1] if field else None, code=code)
    if isinstance(error, NumericsError):
        return ApiError(500, message, kind="numerics_error", code="numerics_error")
    if isinstance(error, EngineError):
        return ApiError(503, message, kind="server_error", code="engine_error", retry_after=1)
    if isinstance(error, LeadlineError):
        return ApiError(500, message, kind="server_error", code="internal_error")
    return ApiError(500, "internal error; the server's log says more", kind="server_error", code="internal_error")


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first problem of a body that does not have the shape of its schema."""
    # Of a union every member reports: those that came furthest into the body are about what was meant.
    paths = [_path(problem["loc"]) for problem in error.errors()]
    furthest = max(paths, key=lambda path: (len(path), [part for part in path if isinstance(part, int)]))
    problems = [problem for problem, path in zip(error.errors(), paths, strict=True) if path == furthest]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in furthest)[1:]
    if not param:
        return ApiError(400, "body: expected a JSON object with content-type application/json", param="body")
    if problems[0]["type"] == "missing":
        return ApiError(400, f"{param}: required, but missing", param=param, code="missing_required_parameter")
    message = f"{param}: expected {_expected(problems)}, got {reprlib.repr(problems[0]['input']):.80}"
    return ApiError(400, message, param=param, code="invalid_value")


def _expected(problems: list[Any]) -> str:
    """What would be right: all that the members of a union take, or the limit of the one that took the type."""
    limits = [problem for problem in problems if problem["type"] not in ("literal_error", *_EXPECTED)]
    words = [
        _EXPECTED.get(problem["loc"][-1]) or _EXPECTED.get(problem["type"]) or _PYDANTIC.sub("", problem["msg"])
        for problem in limits or problems
    ]
    return words[0] if len(words) == 1 else " or ".join(", ".join(words).replace(" or ", ", ").rsplit(", ", 1))


def _path(loc: Any) -> list[Any]:
    """Where in the body; pydantic's own names for the members of a union are left out."""
    return [part for part in loc[1:] if isinstance(part, int) or not _UNION_MEMBER.search(part)]
