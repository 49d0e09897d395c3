"""Shared code of JSON APIs in OpenAI's style: error bodies with vLLM's names for the error type,
endpoints, the choice of the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from pegboard.errors import MalformedRequest, UnknownModel
from pegboard.interfaces.api import EngineClient
from pegboard_server.logs import ERROR

if TYPE_CHECKING:
    from pegboard.data.request import LoRARequest

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

MAX_NAME = 200
"""The most characters of an unknown model name that the error message repeats."""


MAX_NAMES = 20
"""The most served models that the error message lists. There can be many adapters."""

MAX_MESSAGE = 2000
MAX_PARAMETER = 200
"""The most characters of an error's message and of its parameter. A client may send names and
values of any length."""


def shortened(message: str, parameter: str | None) -> tuple[str, str | None]:
    """Returns the message and the parameter of an error, cut to lengths that clients and logs can
    take."""
    message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
    return message, parameter and parameter[:MAX_PARAMETER]


def error_body(
    status: int, message: str, parameter: str | None, kind: str | None = None
) -> dict[str, Any]:
    """The body of an error, also used for errors inside a stream. `code` is the HTTP status. kind
    is the error type; by default it follows from the status. A missing or wrong key gets the same
    one-word body as in vLLM."""
    if status == 401:
        return {"error": "Unauthorized"}
    default = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    message, parameter = shortened(message, parameter)
    if parameter is None:  # the path or the media type is wrong, not a field
        default = _TYPES_OF_HTTP.get(status, default)
    return {
        "error": {"message": message, "type": kind or default, "param": parameter, "code": status}
    }


def error_event(status: int, message: str, parameter: str | None) -> bytes:
    """The error body as a server-sent event without a name."""
    return b"data: " + msgspec.json.encode(error_body(status, message, parameter)) + b"\n\n"


def endpoint(
    answer: Callable[[Request], Awaitable[Response]], body_model: type[BaseModel] | None = None
) -> Any:
    """Turn `answer` into a route's endpoint: a body that does not fit gets vLLM's error type.
    body_model describes the body in /openapi.json."""

    async def call(http: Request) -> Response:
        try:
            return await answer(http)
        except MalformedRequest as error:
            http.scope.setdefault("state", {})[ERROR] = error
            return json_response(
                error_body(error.status, str(error), error.parameter, BAD_REQUEST), error.status
            )

    call.__doc__ = answer.__doc__
    call.body_model = body_model  # type: ignore[attr-defined]
    return call


PIECE = 64
"""The number of elements of a long list that are encoded at once."""


def in_pieces(body: Any) -> bytes:
    """Encode as JSON, for a thread: the encoder keeps Python's lock for a whole call, so long lists
    are encoded in pieces."""
    return msgspec.json.encode(_with_raw_lists(body))


def _with_raw_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return (
            {key: _with_raw_lists(inner) for key, inner in value.items()}
            if _has_containers(value.values())
            else value
        )
    if not isinstance(value, list):
        return value
    if len(value) <= PIECE:
        return [_with_raw_lists(inner) for inner in value] if _has_containers(value) else value
    pieces = (
        msgspec.json.encode(value[start : start + PIECE])[1:-1]
        for start in range(0, len(value), PIECE)
    )
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def _has_containers(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Mapping | list) for value in values)


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def served_model(client: EngineClient, name: str | None) -> "tuple[str, LoRARequest | None]":
    """Returns the name of the model that a request asks for, and its LoRA adapter if the name is
    one's. A request that names no model gets the first one. Raises UnknownModel, and what
    `EngineClient.adapter` raises."""
    models = client.models()
    if name is None or any(model.name == name and model.parent is None for model in models):
        return name or models[0].name, None
    adapter = await client.adapter(name)
    if adapter is None:
        served = ", ".join([model.name for model in models][:MAX_NAMES])
        more = "" if len(models) <= MAX_NAMES else ", …"
        raise UnknownModel(
            f"The model `{name[:MAX_NAME]}` does not exist. This server has: {served}{more}",
            parameter="model",
        )
    return name, adapter
