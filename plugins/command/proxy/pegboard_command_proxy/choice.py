"""How the proxy chooses one of the healthy servers for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from pegboard_command_proxy.prefixes import Prefixes, Prompt
from pegboard_command_proxy.servers import Server

MAX_EXTRA = 8
"""A server with a longer prefix may run this many requests more than the one that runs fewest."""

Choose = Callable[[Sequence[Server], Prompt | None], Server]
"""Chooses one of at least one server. The prompt is None if it is not known or not asked for."""


def policy(name: str, prefixes: Prefixes) -> Choose:
    """Return the policy called `name`: one of `command.POLICIES`."""
    turns = count(1)

    def taken(server: Server) -> Server:
        server.order = next(turns)
        return server

    def round_robin(servers: Sequence[Server], prompt: Prompt | None) -> Server:
        return taken(min(servers, key=lambda server: server.order))

    def least_loaded(servers: Sequence[Server], prompt: Prompt | None) -> Server:
        return taken(min(servers, key=lambda server: (server.running, server.order)))

    def prefix_aware(servers: Sequence[Server], prompt: Prompt | None) -> Server:
        if prompt is None:
            return least_loaded(servers, None)
        fewest = min(server.running for server in servers)
        free = [server for server in servers if server.running <= fewest + MAX_EXTRA]
        lengths = {server: prefixes.length(server.url, prompt) for server in free}
        longest = max(lengths.values())
        return least_loaded([server for server in free if lengths[server] == longest], None)

    return {
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "prefix_aware": prefix_aware,
    }[name]
