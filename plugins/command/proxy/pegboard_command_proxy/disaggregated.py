"""Separate prefill and decode: one server computes the prompt, another one continues it with the KV
blocks of the first. Both have a KV connector that moves the blocks.

The bodies are those of vLLM: the prefill server gets `kv_transfer_params` with `do_remote_decode`
and makes one token, and what it answers under that name goes to the decode server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from pegboard.log import get_logger
from pegboard_command_proxy.forward import Answer, Call, Forwarder, Unreachable

log = get_logger(__name__)

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
LONGER = (
    "best_of",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stream_options",
    "top_logprobs",
    "use_beam_search",
)
"""Fields of the body that the prefill server does not get: they ask for more than one token, or do
not fit one."""


class Disaggregated:
    """Sends prompts to `prefill` first, and then to `decode`."""

    def __init__(self, prefill: Forwarder, decode: Forwarder) -> None:
        self._prefill = prefill
        self._decode = decode
        self._is_warned = False

    async def send(self, call: Call, body: Mapping[str, Any]) -> Answer:
        """Return the answer of a decode server, or an error that the prefill server finds in the
        request. If no prefill server can compute the prompt, the decode server does. Raises
        Unreachable."""
        short = {name: value for name, value in body.items() if name not in LONGER}
        short |= {"max_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
        if "/chat/" in call.path and "max_completion_tokens" in body:
            short["max_completion_tokens"] = 1
            del short["max_tokens"]
        try:
            computed = await self._prefill.send(replace(call, body=msgspec.json.encode(short)))
        except Unreachable as error:
            self._warn(str(error))
            return await self._decode.send(call)
        if 400 <= computed.status < 500:
            return computed
        parameters = transfer_parameters(computed)
        if parameters is None:
            self._warn(f"status {computed.status}, no kv_transfer_params")
            return await self._decode.send(call)
        whole = {**body, "kv_transfer_params": parameters}
        return await self._decode.send(replace(call, body=msgspec.json.encode(whole)))

    def _warn(self, reason: str) -> None:
        (log.debug if self._is_warned else log.warning)(
            "no server computes prompts (%s); the decode servers compute them", reason
        )
        self._is_warned = True


def transfer_parameters(answer: Answer) -> dict[str, Any] | None:
    """Return `kv_transfer_params` of the answer's body, or None."""
    try:
        body = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None
    parameters = body.get("kv_transfer_params") if isinstance(body, dict) else None
    return parameters if answer.status == 200 and isinstance(parameters, dict) else None
