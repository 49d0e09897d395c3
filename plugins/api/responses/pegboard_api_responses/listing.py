"""Lists the input items of a response, in pages."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import RequestError

MAX_LIMIT = 100


def input_items(value: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items of a request's `input` as they are listed: with a type and an id, and with
    the content of a message as parts."""
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_listed(item) for item in given]


def _listed(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    listed = {"type": kind, **item, "id": _id(item, kind)}
    content = item.get("content")
    if kind == "message" and isinstance(content, str):
        part: dict[str, Any] = {"type": "input_text", "text": content}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
        listed["content"] = [part]
    if kind == "message":
        listed.setdefault("status", "completed")
    return listed


def _id(item: Mapping[str, Any], kind: str) -> str:
    given = item.get("id")
    return given if given and isinstance(given, str) else f"{kind}_{uuid.uuid4().hex}"


def page(items: Sequence[Mapping[str, Any]], query: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the page of items that the query asks for: `limit` items (20) after the item with the
    id `after`, the newest first unless `order` is "asc". Raises RequestError naming the
    parameter."""
    given = dict(query)
    for name in given:
        if name not in ("limit", "order", "after", "include", "include[]"):
            raise RequestError(
                f"unknown query parameter {name[:60]!r}; expected limit, order or after",
                parameter=name[:60],
            )
    limit = given.get("limit", "20")
    order = given.get("order", "desc")
    after = given.get("after")
    if not (
        limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise RequestError(
            f"limit: expected a number from 1 to {MAX_LIMIT}, got {limit[:60]!r}", parameter="limit"
        )
    if order not in ("asc", "desc"):
        raise RequestError(f"order: expected asc or desc, got {order[:60]!r}", parameter="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise RequestError(
                f"after: this response has no input item {after[:60]!r}", parameter="after"
            )
        start = places[0] + 1
    data = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(ordered),
    }
