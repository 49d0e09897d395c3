"""`response_format` and vLLM's `structured_outputs`: what the answer must look like, as StructuredOutputsParams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import MalformedRequest, RequestError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_any_whitespace", "disable_additional_properties")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")

_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "format", "structures", "triggers"},
}


def structure(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """What the two fields ask for together; None when the answer is free. Raises RequestError naming the field."""
    form = _of_format(response_format) if response_format is not None else {}
    if structured_outputs is None:
        return StructuredOutputsParams(**form, parameter="response_format") if form else None
    if form:
        raise RequestError(
            "response_format and structured_outputs exclude each other: leave one of them out", parameter="structured_outputs"
        )
    return StructuredOutputsParams(**_of_structured_outputs(structured_outputs))


def _of_format(form: Mapping[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind not in FORMATS:
        expected = ", ".join(map(repr, FORMATS))
        raise MalformedRequest(f"response_format.type: expected one of {expected}, got {kind!r}", parameter="response_format")
    unknown = sorted(set(form) - _KEYS[kind])
    if unknown:
        raise MalformedRequest(f"unknown field 'response_format.{unknown[0]}' for type {kind!r}", parameter="response_format")
    if kind == "json_schema":
        return {"json": _schema(form.get("json_schema"))}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    return {"json_object": True} if kind == "json_object" else {}


def _schema(given: Any) -> dict[str, Any]:
    """The schema in {"name": …, "schema": …, "strict": …}. The answer always follows it, whether strict or not."""
    where = "response_format.json_schema"
    if not isinstance(given, dict):
        raise MalformedRequest(f"{where}: expected an object with name and schema, got {given!r}", parameter="response_format")
    if not isinstance(given.get("name"), str):
        raise MalformedRequest(f"{where}.name is required and must be text", parameter="response_format")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise MalformedRequest(f"{where}.schema: expected a JSON schema (an object), got {schema!r}", parameter="response_format")
    return schema


def _of_structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in given.items() if value is not None}
    known = (*CONSTRAINTS, *FLAGS, "whitespace_pattern")
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise MalformedRequest(
            f"unknown field 'structured_outputs.{unknown}'; it has {', '.join(known)}", parameter="structured_outputs"
        )
    wrong = next((name for name in FLAGS if not isinstance(values.get(name, False), bool)), None)
    if wrong is not None:
        raise MalformedRequest(
            f"structured_outputs.{wrong}: expected true or false, got {values[wrong]!r}", parameter="structured_outputs"
        )
    if not isinstance(values.get("whitespace_pattern", ""), str):
        raise MalformedRequest("structured_outputs.whitespace_pattern: expected a string", parameter="structured_outputs")
    return values
