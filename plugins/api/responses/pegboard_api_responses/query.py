"""The query string of GET /v1/responses/{id}: checked, and nothing in it is ignored."""

from __future__ import annotations

from starlette.requests import Request

from pegboard.errors import RequestError

STREAM, AFTER, OBFUSCATION = "stream", "starting_after", "include_obfuscation"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_query(http: Request) -> tuple[bool, int]:
    """Whether to stream, and behind which number of an event (-1 = from the first one). Raises RequestError."""
    given = dict(http.query_params.multi_items())
    unknown = next((name for name in given if name not in (STREAM, AFTER, OBFUSCATION)), None)
    if unknown is not None:
        raise RequestError(f"unknown query parameter {unknown[:60]!r}; expected {STREAM} or {AFTER}", parameter=unknown[:60])
    if _flag(given, OBFUSCATION):
        raise RequestError(f"{OBFUSCATION} is not supported: deltas are never padded", parameter=OBFUSCATION)
    is_stream, after = _flag(given, STREAM), given.get(AFTER)
    if after is None:
        return is_stream, -1
    if not is_stream:
        raise RequestError(f"{AFTER} needs {STREAM}=true", parameter=AFTER)
    if not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise RequestError(f"{AFTER}: expected the number of an event, got {after[:60]!r}", parameter=AFTER)
    return is_stream, int(after)


def _flag(given: dict[str, str], name: str) -> bool:
    value = given.get(name, "false")
    if value not in _FLAGS:
        raise RequestError(f"{name}: expected {' or '.join(_FLAGS)}, got {value[:60]!r}", parameter=name)
    return _FLAGS[value]
