"""OpenAI's error body, with vLLM's words for the type of an error."""

from __future__ import annotations

from typing import Any

from pegboard.errors import RequestError

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "Method Not Allowed",
    413: "Content Too Large",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    503: "Service Unavailable",
}
BAD_REQUEST = "Bad Request"
_TYPES_OF_HTTP = {400: BAD_REQUEST, 404: "Not Found"}


class InvalidBody(RequestError):
    """The request body does not fit its schema; vLLM's type for that is "Bad Request"."""


def error_body(status: int, message: str, parameter: str | None, kind: str | None = None) -> dict[str, Any]:
    """The body of an error, also used for errors inside a stream. `code` is the HTTP status. kind: the type, if not the one
    that follows from the status. A missing or wrong key has vLLM's body, one word."""
    if status == 401:
        return {"error": "Unauthorized"}
    default = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    if parameter is None:  # what is wrong is no field, but the path or the media type
        default = _TYPES_OF_HTTP.get(status, default)
    return {"error": {"message": message, "type": kind or default, "param": parameter, "code": status}}
