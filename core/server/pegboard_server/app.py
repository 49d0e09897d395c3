"""Builds one Starlette application from all enabled APIs, which bring their own routes, and the
middleware around them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import get_route_path  # type: ignore[attr-defined]
from starlette.types import ASGIApp, Receive, Scope, Send

from pegboard.errors import ConfigError, PluginError, PluginNotFound, blame
from pegboard.interfaces.api import Api, ApiSetup, ApiSpec, EngineClient
from pegboard.interfaces.builtin_tool import BuiltinTool
from pegboard.interfaces.metrics import Sample
from pegboard.log import get_logger
from pegboard.plugins.defaults import default_enabled
from pegboard.plugins.names import to_install
from pegboard_server.adapters import AdapterClient, serve_adapters
from pegboard_server.gateway import Gateway, MountedApi, Traffic, error_response, owner_of
from pegboard_server.http_metrics import MeasuredApp
from pegboard_server.logs import logged
from pegboard_server.settings import ServerConfig

if TYPE_CHECKING:
    from pegboard.front.async_llm import AsyncLLM
    from pegboard.plugins.registry import Registry
    from pegboard_server.turns import Turns

log = get_logger(__name__)

Tools = Mapping[str, Sequence[BuiltinTool]]
"""Maps a type of built-in tool to the plugins that serve it, in the order in which they are
asked."""


async def open_app(
    client: "AsyncLLM",
    traffic: Traffic | None = None,
    publish: Callable[[Sample], None] | None = None,
    turns: "Turns | None" = None,
) -> Starlette:
    """Build the application of all APIs enabled for `client`, and start their built-in tools.
    turns: those of several API processes. Raises PluginNotFound when no API is enabled,
    ConfigError, PluginError."""
    settings = client.plan.settings
    adapters = serve_adapters(client, turns) if settings.engine.max_loras else None
    apis = build_apis(adapters or client, await start_tools(client.registry))
    app = build_app(
        apis,
        client,
        settings.section(ServerConfig),
        traffic,
        publish,
        client.registry.modules,
        switches(client.registry),
    )
    app.state.adapters = adapters
    return app


async def load_adapters(app: Starlette) -> None:
    """Load the adapters of the setting `lora_modules`. Call it once the engine is ready. Raises
    ConfigError."""
    if app.state.adapters is not None:
        await app.state.adapters.start()


async def start_tools(registry: "Registry") -> Tools:
    """Build and start the enabled plugins of kind builtin_tool. Returns them by type of tool.
    Raises ConfigError, PluginError."""
    tools: dict[str, list[BuiltinTool]] = {}
    for entry in registry.enabled("builtin_tool"):
        tool: BuiltinTool = registry.build(entry, None)
        with blame(entry.id):
            await tool.start()
        log.debug("builtin_tool → %s (%s %s)", entry.name, entry.distribution, entry.version)
        types = registry.spec(entry).supports.get("type")
        assert isinstance(types, set | frozenset | tuple | list), (
            f"{entry.id}: supports must name the types of tools it serves"
        )
        for name in types:
            tools.setdefault(str(name), []).append(tool)
    return tools


def build_apis(client: "AsyncLLM | AdapterClient", tools: Tools) -> list[tuple[str, Any, Any]]:
    """Returns (name, api, spec) of every enabled api. The default ones come first, in their own
    order, because the error body of the first api answers for paths that no api has. tools holds
    the plugins that serve built-in tools. Raises PluginNotFound when no api is enabled."""
    registry = client.registry
    first = default_enabled("api")
    entries = sorted(
        registry.enabled("api"),
        key=lambda entry: first.index(entry.name) if entry.name in first else len(first),
    )
    if not entries:
        raise PluginNotFound(f"nothing to serve: {to_install('api')}")
    config = client.plan.settings.section(ServerConfig)
    settings = msgspec.structs.asdict(config) | {
        "enable_prompt_embeds": client.plan.settings.engine.enable_prompt_embeds
    }
    setup = ApiSetup(
        logged(cast(EngineClient, client), config), settings, client.sinks, tools, registry.modules
    )
    log.debug(
        "api → %s",
        ", ".join(f"{entry.name} ({entry.distribution} {entry.version})" for entry in entries),
    )
    return [(entry.name, registry.build(entry, setup), registry.spec(entry)) for entry in entries]


def build_app(
    apis: Sequence[tuple[str, Api, ApiSpec]],
    client: EngineClient,
    config: ServerConfig,
    traffic: Traffic | None = None,
    publish: Callable[[Sample], None] | None = None,
    modules: Callable[[], Mapping[str, str]] = dict,
    off: Mapping[str, str] | None = None,
) -> Starlette:
    """Build one application of all `apis` (name, implementation, spec). The first matching route
    wins. Paths that belong to no api get the error body of the first api. traffic is also given to
    `run_server`, which drains it before it stops. publish receives a sample of `HTTP_METRICS` for
    each request. modules: module → plugin, to name the plugin that failed. off: path → the flags
    that turn it on, for paths that no api may have here."""
    mounted = [MountedApi(name, api, spec, tuple(api.routes())) for name, api, spec in apis]
    traffic = traffic or Traffic(config.max_running_requests)
    gateway = Middleware(
        Gateway, mounted=mounted, client=client, config=config, traffic=traffic, modules=modules
    )
    routes = [route for entry in mounted for route in entry.routes]
    middleware = [*_outer_middleware(config), gateway]
    if publish is not None:
        unmeasured = frozenset(path for entry in mounted for path in entry.spec.unmeasured_paths)
        middleware.insert(
            0, Middleware(MeasuredApp, routes=routes, unmeasured=unmeasured, publish=publish)
        )
    if config.root_path:
        middleware.insert(0, Middleware(RootPath, root_path=config.root_path))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _refuse(mounted, off or {})},
    )


class RootPath:
    """Tells the routes and the description of the API the path prefix that clients use. A proxy may
    remove the prefix or not: paths with and without it are served."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._root_path = f"/{root_path.strip('/')}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        await self.app(scope, receive, send)


def switches(registry: "Registry") -> dict[str, str]:
    """Returns the paths of installed apis that are off by default, with the flags that turn them
    on. Broken plugins are left out."""
    names: dict[str, str] = {}
    for entry in registry.entries("api"):
        with contextlib.suppress(PluginError):
            names |= cast(ApiSpec, registry.spec(entry)).switches
    return names


def _refuse(mounted: Sequence[MountedApi], off: Mapping[str, str]) -> Any:
    """Returns the handler of the errors that Starlette raises itself: unknown path, method not
    allowed."""

    async def refuse(request: Request, error: HTTPException) -> Response:
        path = get_route_path(request.scope)
        headers = dict(error.headers or {})
        message = str(error.detail)
        if error.status_code == 404:
            message = f"Not Found: there is no route {request.method} {path}"
            if path in off:
                message = f"Not Found: {path} is off; the server's flag {off[path]} turns it on"
        elif error.status_code == 405:
            message = (
                f"Method Not Allowed: {request.method} {path}; allowed: "
                f"{headers.get('Allow', 'see the documentation')}"
            )
        return error_response(
            owner_of(mounted, request.scope), error.status_code, message, None, headers
        )

    return refuse


def _outer_middleware(config: ServerConfig) -> list[Middleware]:
    """The middleware around the gateway, outermost first. It is outside the gateway, so that
    refusals also carry CORS headers and a browser's preflight needs no key. Raises ConfigError for
    a name that is not middleware."""
    layers = [_named(name) for name in config.middleware]
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
            )
        )
    return layers


def _named(name: str) -> Middleware:
    """The middleware called `name`: a class (called with the application), or an async function of
    (request, call_next)."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        target: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware {name!r} cannot be imported: {error}; expected package.module.Name"
        ) from error
    if inspect.isclass(target):
        # whether it is one shows when it is called
        return Middleware(target)  # type: ignore[arg-type]
    if inspect.iscoroutinefunction(target):
        return Middleware(BaseHTTPMiddleware, dispatch=target)
    raise ConfigError(
        f"middleware {name!r} is a {type(target).__name__}; expected a class or an async "
        "function(request, call_next)"
    )
