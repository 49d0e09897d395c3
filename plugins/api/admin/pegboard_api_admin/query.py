"""Checks the query strings of the operators' routes. Unknown parameters are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.requests import Request

from pegboard.errors import RequestError

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_query(request: Request, allowed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the given values by parameter name. allowed: the values that each parameter may have.
    Raises RequestError."""
    values = {}
    for name, value in request.query_params.multi_items():
        if name not in allowed:
            known = f"expected {', '.join(allowed)}" if allowed else "this route takes none"
            raise RequestError(
                f"unknown query parameter {name[:60]!r}; {known}", parameter=name[:60]
            )
        if value not in allowed[name]:
            raise RequestError(
                f"{name}: expected {' or '.join(allowed[name])}, got {value[:60]!r}", parameter=name
            )
        values[name] = value
    return values


def read_flags(request: Request, *names: str) -> dict[str, bool]:
    """Returns the given flags by name. Raises RequestError."""
    return {
        name: _FLAGS[value]
        for name, value in read_query(request, dict.fromkeys(names, tuple(_FLAGS))).items()
    }
