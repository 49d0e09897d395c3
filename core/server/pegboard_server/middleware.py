"""ASGI middleware around the gateway: what the operator names, and CORS."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware

from pegboard.config.schema import ServerConfig
from pegboard.errors import ConfigError


def outer_middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first. Outside the gateway, so that refusals carry CORS headers too and a browser's preflight needs no key.
    Raises ConfigError for a name that is no middleware."""
    found = [_named(name) for name in config.middleware]
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
            )
        )
    return found


def _named(name: str) -> Middleware:
    """A class (called with the application), or an async function of (request, call_next)."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"middleware {name!r} cannot be imported: {error}; expected package.module.Name") from error
    if inspect.isclass(found):
        return Middleware(found)  # type: ignore[arg-type]  # whether it is one shows when it is called
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(
        f"middleware {name!r} is a {type(found).__name__}; expected a class or an async function(request, call_next)"
    )
