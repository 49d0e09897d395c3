"""From the bytes of a request to a checked model, and what is wrong with it in one sentence."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from pegboard.errors import RequestError

M = TypeVar("M", bound=BaseModel)

MAX_SHOWN = 60


def parse_body(body: bytes, model: type[M]) -> M:
    """A checked `model`. Raises RequestError naming the field as `messages.0.content`."""
    try:
        data = msgspec.json.decode(body) if body else None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"the request body must be a JSON object, got {shown(data)}")
    try:
        return model.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{path}: this field is not supported", parameter=path) from error
        raise RequestError(f"{path}: {first['msg']}, got {shown(first['input'])}", parameter=path) from error


def shown(value: Any) -> str:
    """A value, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def wrong(path: str, expected: str, got: Any) -> RequestError:
    return RequestError(f"{path}: expected {expected}, got {shown(got)}", parameter=path)
