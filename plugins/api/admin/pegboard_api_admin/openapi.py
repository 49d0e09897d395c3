"""The api `openapi`: GET /openapi.json, a description of all routes of this server.

The description is made from the routes themselves. A route's endpoint may have an attribute
`body_model`, the pydantic model of its JSON body. The endpoint's docstring is the summary. An
endpoint without them is described only by its path and method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from pegboard.interfaces.api import ApiSetup
from pegboard_api_admin.errors import error_body

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_REFERENCE = "#/components/schemas/{model}"
_NO_BODY = frozenset({"HEAD", "OPTIONS"})


class OpenApi:
    """Describes the routes of all enabled APIs."""

    def __init__(self, options: None, setup: ApiSetup) -> None:
        self._description: dict[str, Any] | None = None

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/openapi.json", self._describe, methods=["GET"])]

    def error_body(self, status: int, message: str, parameter: str | None) -> Mapping[str, Any]:
        return error_body(status, message, parameter)

    async def _describe(self, request: Request) -> Response:
        """This description."""
        if self._description is None:
            self._description = describe(request.app.routes)
        prefix = request.scope.get("root_path")
        return JSONResponse(
            {**self._description, "servers": [{"url": prefix}]} if prefix else self._description
        )


def describe(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Build an OpenAPI 3.1 document of all routes that are plain paths."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            operations = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
            for method in sorted((route.methods or set()) - _NO_BODY):
                operations[method.lower()] = _operation(route, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pegboard", "version": version("pegboard")},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: Route, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    endpoint = route.endpoint
    name = re.sub(r"\W+", "_", f"{method.lower()}_{route.path}").strip("_")
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {"200": {"description": "The answer"}},
    }
    if endpoint.__doc__:
        operation["summary"] = " ".join(endpoint.__doc__.split())
    parameters = _PARAMETER.findall(route.path)
    if parameters:
        text = {"type": "string"}
        operation["parameters"] = [
            {"name": item, "in": "path", "required": True, "schema": text} for item in parameters
        ]
    model = getattr(endpoint, "body_model", None)
    if model is not None:
        schema = model.model_json_schema(ref_template=_REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        reference = {"$ref": _REFERENCE.format(model=model.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
        error = {
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
        }
        operation["responses"]["4XX"] = {"description": "The request is wrong", **error}
        schemas["Error"] = _ERROR
    return operation


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
