"""Finds the server that has a stored response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from pegboard.errors import PegboardError
from pegboard_command_proxy.forward import Call, Forwarder
from pegboard_command_proxy.servers import Server

RESPONSES = "/v1/responses"
ID = re.compile(r"[\w-]{1,200}", re.ASCII)
"""Another text is not looked for: no server makes such ids."""


def stored_id(path: str, body: Mapping[str, Any] | None) -> str | None:
    """Return the id of the stored response that a request reads, changes or continues; None if
    there is none. body: that of a new response."""
    response_id: object = None
    if path == RESPONSES:
        response_id = (body or {}).get("previous_response_id")
    elif path.startswith(f"{RESPONSES}/"):
        response_id = path.split("/")[3]
    return response_id if isinstance(response_id, str) and ID.fullmatch(response_id) else None


async def holder(
    forwarder: Forwarder, response_id: str, headers: Mapping[str, str]
) -> Server | None:
    """Ask all healthy servers at once which of them has the response. headers: the client's. None:
    nobody says so. A single server is not asked."""
    healthy = [server for server in forwarder.servers if server.is_healthy]
    if len(healthy) < 2:
        return None

    async def has_it(server: Server) -> bool:
        try:
            answer = await forwarder.send(
                Call("GET", f"{RESPONSES}/{response_id}", headers, server=server)
            )
        except PegboardError:
            return False
        if answer.stream is not None:
            await answer.stream.aclose()
        return answer.status == 200

    answers = await asyncio.gather(*map(has_it, healthy))
    return next((s for s, has in zip(healthy, answers, strict=True) if has), None)
