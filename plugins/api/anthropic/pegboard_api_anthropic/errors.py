"""Anthropic's error body."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, parameter: str | None = None) -> dict[str, Any]:
    """The body of an error, also that of the event `error` in a stream. The parameter is named in the message."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if parameter is not None and parameter not in message:
        message = f"{parameter}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
