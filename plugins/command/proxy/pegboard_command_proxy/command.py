"""`pegboard proxy`: one address for several servers of one model.

With --server, each request goes to one of equal servers. With --prefill and --decode, prompts are
computed by the first ones and continued by the second ones.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pegboard import env
from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard.log import set_up_logging

if TYPE_CHECKING:
    from pegboard_command_proxy.events import EventSource
    from pegboard_command_proxy.servers import Server

POLICIES = ("round_robin", "least_loaded", "prefix_aware")
"""In turn; the server with the fewest running requests; the server that has the longest prefix of
the prompt in its KV cache, as its KV events say."""


def make_parser(setup: CommandSetup) -> FlagParser:
    """The parser with all flags of the command."""
    parser = setup.parser(
        prog="pegboard proxy",
        description=(
            "One address for several servers of one model. Give --server URL for each of them, or "
            "--prefill and --decode for servers with a KV connector that share prompts."
        ),
    )
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "URL"}
    parser.add_argument("--server", **several, help="a server")
    parser.add_argument("--prefill", **several, help="a server that computes prompts")
    parser.add_argument("--decode", **several, help="a server that continues them")
    parser.add_argument("--host", default="127.0.0.1", help="address (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port (default %(default)s)")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        help=(
            "how a server is chosen (default: prefix_aware with --kv-events, otherwise "
            "least_loaded)"
        ),
    )
    parser.add_argument(
        "--kv-events",
        action="append",
        default=[],
        metavar="URL=ENDPOINT[,REPLAY]",
        help="where an engine of the server URL publishes its KV events; once for each engine",
    )
    parser.add_argument(
        "--attempts", type=int, default=3, help="servers tried for a request (default %(default)s)"
    )
    parser.add_argument(
        "--health-interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between two health checks (default %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type="number",
        default=8 * 1024 * 1024,
        help="largest request body (default %(default)s)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running requests have when the proxy stops (default %(default)s)",
    )
    parser.add_argument(
        "--show-servers",
        action="store_true",
        help="answer GET /servers with the servers' addresses and their work",
    )
    parser.add_argument("--disable-access-log", action="store_true", help="do not log each request")
    return parser


class Proxy:
    """The command `proxy`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = make_parser(setup)

    def run(self, words: Sequence[str]) -> int:
        """Forward requests until told to stop."""
        arguments = self._parser.parse(words)
        servers = read_servers(arguments)
        sources = read_sources(arguments.kv_events, [server.url for server in servers])
        if arguments.policy == "prefix_aware" and not sources:
            raise UsageError("--policy prefix_aware needs --kv-events for its servers")
        set_up_logging(env.log_level())
        from pegboard_command_proxy.serve import serve

        return asyncio.run(serve(arguments, servers, sources))


def read_servers(arguments: Namespace) -> list["Server"]:
    """Return the servers of the flags. Raises UsageError."""
    from pegboard_command_proxy.servers import Server

    groups = {role: getattr(arguments, role) for role in ("server", "prefill", "decode")}
    if bool(groups["prefill"]) != bool(groups["decode"]):
        raise UsageError("--prefill and --decode are given together, at least once each")
    if bool(groups["server"]) == bool(groups["decode"]):
        raise UsageError(
            "give either --server URL, once for each server, or --prefill URL and --decode URL"
        )
    if arguments.attempts < 1:
        raise UsageError(f"--attempts must be at least 1, got {arguments.attempts}")
    if not arguments.health_interval > 0:
        raise UsageError(f"--health-interval must be more than 0, got {arguments.health_interval}")
    servers = [
        Server(_checked(url, f"--{role}"), role) for role, urls in groups.items() for url in urls
    ]
    for server in servers:
        if [other.url for other in servers].count(server.url) > 1:
            raise UsageError(f"{server.url} is given twice")
    return servers


def _checked(url: str, flag: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise UsageError(f"{flag} {url!r}: expected something like http://localhost:8001")
    return url.rstrip("/").removesuffix("/v1")


def read_sources(texts: Sequence[str], urls: Sequence[str]) -> list["EventSource"]:
    """Return the sources of --kv-events. urls: those of the servers. Raises UsageError."""
    from pegboard_command_proxy.events import EventSource

    sources: list[EventSource] = []
    for text in texts:
        url, equals, addresses = text.partition("=")
        endpoint, _, replay = addresses.partition(",")
        if not equals or "://" not in endpoint:
            raise UsageError(
                f"--kv-events {text!r}: expected something like "
                "http://localhost:8001=tcp://localhost:5557"
            )
        address = _checked(url, "--kv-events")
        if address not in urls:
            raise UsageError(f"--kv-events {text!r}: no server has the address {address}")
        source = EventSource(address, endpoint, replay or None)
        if source.engine in [other.engine for other in sources]:
            raise UsageError(f"--kv-events {text!r}: {endpoint} is given twice for this server")
        try:
            source.check()
        except ValueError as error:
            raise UsageError(f"--kv-events {text!r}: {error}") from error
        sources.append(source)
    return sources
