"""`pegboard serve [model]`: the HTTP server with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pegboard import env
from pegboard.cli.flags import FlagParser, add_settings, parse_settings
from pegboard.log import get_logger, set_up_logging

if TYPE_CHECKING:
    from pegboard.async_llm import AsyncLLM
    from pegboard.config import Settings

log = get_logger(__name__)


def make_parser() -> FlagParser:
    """All flags of the command."""
    parser = FlagParser(
        prog="pegboard serve",
        usage="pegboard serve [MODEL] [--config FILE] [--SETTING VALUE ...]",
        description="Serve a model over HTTP. Options of plugins: --kind.name.field VALUE (see pegboard help kind.name).",
    )
    parser.add_argument("model", nargs="?", help="model reference: directory, .gguf file, org/name or scheme:name")
    parser.add_argument("--config", metavar="FILE", help="TOML or YAML file of settings")
    for section in ("server", "engine", "plugins"):
        add_settings(parser, section)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop; 1 when the engine died."""
    settings, _ = parse_settings(make_parser(), argv)
    set_up_logging(env.log_level())
    before = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        return _serve(settings)
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM while starting: leave through the `finally` clauses, so that the engine process ends too."""
    sys.exit(128 + signum)


def _serve(settings: "Settings") -> int:
    from pegboard.engine.remote import EngineProcess

    _require_server_packages()
    engine = EngineProcess()  # first of all: it has seconds of imports to do
    try:
        from pegboard.server import bind_socket

        listener = bind_socket(settings.server)  # before the model loads: a taken port shows at once
        client = _client(settings, engine)
        return asyncio.run(_run(client, listener))
    finally:
        engine.stop()


def _require_server_packages() -> None:
    """Core serves with what api plugins depend on, and does not depend on it itself. Raises PluginNotFound."""
    from importlib.util import find_spec

    from pegboard.errors import PluginNotFound
    from pegboard.plugins.names import missing_providers

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        advice = missing_providers("api", ())
        raise PluginNotFound(f"serving needs {' and '.join(missing)}, which plugins of kind 'api' bring along; {advice}")


def _client(settings: "Settings", engine: Any) -> "AsyncLLM":
    from pegboard.async_llm import AsyncLLM
    from pegboard.plan import make_tokenizer, resolve

    plan, registry = resolve(settings)
    engine.start(plan)
    tokenizer = None if settings.engine.skip_tokenizer_init else make_tokenizer(registry, plan)
    return AsyncLLM.from_parts(plan, registry, tokenizer, engine)


async def _run(client: "AsyncLLM", listener: Any) -> int:
    from pegboard.server import build_app, run_server

    settings, names = client.plan.settings, client.plan.model_names
    apis = build_apis(client)
    app = build_app(apis, client, settings.server)
    hooks = _hooks(client)
    async with client:
        if hooks is not None:
            hooks[0].role_started(hooks[1])
        try:
            return await run_server(
                app,
                settings.server,
                listener=listener,
                health=client.health,
                on_ready=lambda address: print(f"Serving {', '.join(names)} on {address}", flush=True),
            )
        finally:
            if hooks is not None:
                hooks[0].role_stopping(hooks[1])


def build_apis(client: "AsyncLLM") -> list[tuple[str, Any, Any]]:
    """(name, api, spec) of every enabled api. Raises PluginNotFound when there is none."""
    import msgspec

    from pegboard.errors import PluginNotFound
    from pegboard.interfaces.api import ApiSetup
    from pegboard.plugins.names import to_install

    registry = client.registry
    entries = registry.enabled("api")
    if not entries:
        raise PluginNotFound(f"nothing to serve: {to_install('api')}")
    setup = ApiSetup(client, msgspec.structs.asdict(client.plan.settings.server))
    log.info("api → %s", ", ".join(f"{entry.name} ({entry.distribution} {entry.version})" for entry in entries))
    return [(entry.name, registry.build(entry, setup), registry.spec(entry)) for entry in entries]


def _hooks(client: "AsyncLLM") -> tuple[Any, Any] | None:
    """The enabled hooks and the role they are told; None when there are none."""
    if not client.registry.enabled_hooks():
        return None
    from pegboard.interfaces.hooks import RoleInfo
    from pegboard.plugins.hooks import Hooks

    return Hooks(client.registry), RoleInfo("api")
