"""Twenty tools whose arguments have the common shapes of JSON schemas. All are bounded, because a
small model must come to an end."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def _object(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def _list(items: dict[str, Any], low: int = 1, high: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


POINT = _object({"x": COUNT, "y": COUNT})

PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": _object({"city": TEXT}),
    "add": _object({"a": COUNT, "b": COUNT}),
    "set_lamp": _object(
        {"room": {"enum": ["kitchen", "hall", "attic"]}, "is_on": {"type": "boolean"}}
    ),
    "set_volume": _object({"level": {"type": "integer", "enum": [0, 25, 50, 100]}}),
    "search": _object({"query": TEXT, "limit": COUNT}, "limit"),
    "send_mail": _object({"to": _list(TEXT), "subject": TEXT, "urgent": {"type": "boolean"}}),
    "draw_line": _object({"start": POINT, "end": POINT}),
    "draw_polygon": _object({"points": _list(POINT, 2, 3)}),
    "get_time": _object({}),
    "set_alarm": _object({"at": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}}),
    "move": _object({"direction": {"const": "north"}, "steps": COUNT}),
    "pay": _object(
        {
            "currency": {"enum": ["EUR", "USD"]},
            "cents": COUNT,
            "note": {"type": ["string", "null"], "maxLength": 6},
        }
    ),
    "book": _object({"room": {"anyOf": [COUNT, {"enum": ["suite", "any"]}]}}),
    "plot": _object({"series": _list(_list(COUNT, 1, 2), 1, 2)}),
    "tag": _object({"ünï cödé": {"enum": ["größe", "naïve", "日本"]}}),
    "order": _object(
        {"items": _list({"$ref": "#/$defs/Item"}, 1, 2)},
        **{"$defs": {"Item": _object({"id": COUNT})}},
    ),
    "quote": _object({"mark": {"enum": ['"', "\\", "{", "}]", "a\nb"]}}),
    "filter": _object({"by": {"oneOf": [_object({"name": TEXT}), _object({"age": COUNT})]}}),
    "resize": _object(
        {"scale": {"type": "number", "enum": [0.5, 1.0, 2.5]}, "keep": {"type": "boolean"}}
    ),
    "deep": _object({"a": _object({"b": _object({"c": _list({"type": "boolean"}, 1, 2)})})}),
}


def tool(name: str) -> dict[str, Any]:
    """Returns the tool in the form for chats."""
    return {
        "type": "function",
        "function": {"name": name, "description": f"Calls {name}.", "parameters": PARAMETERS[name]},
    }
