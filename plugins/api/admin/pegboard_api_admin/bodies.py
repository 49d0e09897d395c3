"""JSON bodies of the operators' routes: how they are read, and what /openapi.json says about
them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pegboard.errors import MalformedRequest


def described(answer: Any, body_model: type[BaseModel]) -> Any:
    """Return the endpoint with what /openapi.json says about it."""

    async def call(http: Request) -> Response:
        response: Response = await answer(http)
        return response

    call.__doc__ = answer.__doc__
    call.body_model = body_model  # type: ignore[attr-defined]
    return call


def read_body(body: bytes, model: type[Any]) -> Any:
    """Return the body as an object of the pydantic model. Raises MalformedRequest, which names the
    first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))[:60] or None
        raise MalformedRequest(f"{field or 'body'}: {first['msg']}", parameter=field) from error
