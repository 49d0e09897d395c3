"""How the proxy chooses one of the healthy servers for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from pegboard_command_proxy.prefixes import Prefixes, Prompt
from pegboard_command_proxy.servers import Server

MAX_EXTRA = 8
"""A server with a longer prefix may run this many requests more than the one that runs fewest. The
same holds for the engines of a server."""


class Choice(NamedTuple):
    """rank: number of the engine of this server that is to compute the request; None = the server
    decides."""

    server: Server
    rank: int | None = None


Choose = Callable[[Sequence[Server], Prompt | None], Choice]
"""Chooses one of at least one server. The prompt is None if it is not known or not asked for."""


def policy(name: str, prefixes: Prefixes) -> Choose:
    """Return the policy called `name`: one of `command.POLICIES`."""
    turns = count(1)

    def taken(server: Server) -> Choice:
        server.order = next(turns)
        return Choice(server)

    def round_robin(servers: Sequence[Server], prompt: Prompt | None) -> Choice:
        return taken(min(servers, key=lambda server: server.order))

    def least_loaded(servers: Sequence[Server], prompt: Prompt | None) -> Choice:
        return taken(min(servers, key=lambda server: (server.running, server.order)))

    def prefix_aware(servers: Sequence[Server], prompt: Prompt | None) -> Choice:
        if prompt is None:
            return least_loaded(servers, None)
        fewest = min(server.running for server in servers)
        free = [server for server in servers if server.running <= fewest + MAX_EXTRA]
        holders = {server: prefixes.holder(server.url, prompt) for server in free}
        longest = max(holder.length for holder in holders.values())
        best = [server for server in free if holders[server].length == longest]
        server, _ = least_loaded(best, None)
        rank = holders[server].rank
        work = server.running_of
        if rank is None or work[rank] > MAX_EXTRA + min(
            work[other] for other in prefixes.ranks(server.url)
        ):
            return Choice(server)
        return Choice(server, rank)

    return {
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "prefix_aware": prefix_aware,
    }[name]
