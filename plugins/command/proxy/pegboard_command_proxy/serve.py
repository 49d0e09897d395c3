"""Runs the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence

import httpx

from pegboard_command_proxy.app import Proxied, build_app
from pegboard_command_proxy.choice import policy
from pegboard_command_proxy.disaggregated import Disaggregated
from pegboard_command_proxy.events import EventSource, follow
from pegboard_command_proxy.forward import Forwarder
from pegboard_command_proxy.prefixes import Prefixes
from pegboard_command_proxy.servers import Server, watch
from pegboard_server.gateway import Traffic
from pegboard_server.server import run_server
from pegboard_server.settings import ServerConfig

CONNECT_S = 10.0
MAX_IDLE = 256
"""Connections to servers that are kept for later requests."""


async def serve(
    arguments: Namespace, servers: Sequence[Server], sources: Sequence[EventSource]
) -> int:
    """Serve, and return the exit status. arguments: the flags of the command. sources: of KV
    events."""
    name = arguments.policy or ("prefix_aware" if sources else "least_loaded")
    prefixes = Prefixes()
    config = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        shutdown_timeout_s=arguments.shutdown_timeout,
        disable_access_log=arguments.disable_access_log,
        max_body_bytes=arguments.max_body_bytes,
    )
    # an answer may take any time; a server that hangs fails its health checks
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
    async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        groups = [
            Forwarder(members, policy(name, prefixes), client, arguments.attempts)
            for role in ("prefill", "decode", "server")
            if (members := [server for server in servers if server.role == role])
        ]
        disaggregated = Disaggregated(*groups) if len(groups) == 2 else None
        proxied = Proxied(
            groups[-1],
            disaggregated,
            finds_prefixes=name == "prefix_aware",
            limit=config.max_body_bytes,
        )
        traffic = Traffic(config.max_running_requests)
        app = build_app(proxied, groups, traffic, shows_servers=arguments.show_servers)
        tasks = [
            asyncio.ensure_future(watch(servers, client, arguments.health_interval)),
            *(asyncio.ensure_future(follow(source, prefixes)) for source in sources),
        ]
        try:
            return await run_server(
                app, config, on_ready=lambda address: _announce(address, servers), traffic=traffic
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _announce(address: str, servers: Sequence[Server]) -> None:
    count = len(servers)
    print(f"Proxy on {address} for {count} server{'s' if count > 1 else ''}", flush=True)
