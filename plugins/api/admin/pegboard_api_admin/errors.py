"""The error body of the operators' routes. It has OpenAI's shape, so that one client can read all
of them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


def error_body(status: int, message: str, parameter: str | None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": HTTPStatus(status).phrase,
            "param": parameter,
            "code": status,
        }
    }
