"""The scheduler side of KV connectors."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from pegboard.data.batch import Batch, TransferReport
from pegboard.engine.gates import Gate
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.requests import Request
from pegboard.errors import expect
from pegboard.interfaces.kv_connector import BlockView, KVConnectorScheduler, Match, Release
from pegboard.interfaces.scheduling_policy import RequestStatus

NAP_S = 0.002
"""How long a step sleeps, in seconds, while every request waits for a KV connector that wants to be
asked again."""


class External(NamedTuple):
    """An external prefix: the match, and the connector that loads it, if there is one."""

    match: Match = Match(0)
    winner: str | None = None


class KVConnectors(Gate):
    """The scheduler side of the chain of KV connectors, by name in chain order. Most engines have
    none.

    It knows which connector loads an external prefix, which transfers are open, and which blocks
    they hold. Connectors are asked in order, and the first match wins. The others are told to load
    nothing. Every step returns reports. The blocks of a released request that a connector still
    reads stay pinned under (connector, request key) until a report of the connector names the
    request."""

    def __init__(self, connectors: Mapping[str, KVConnectorScheduler], kv: KVCache) -> None:
        self._connectors = connectors
        self._kv = kv
        self._pins: dict[tuple[str, str], list[list[int]]] = {}
        self._loading: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._connectors)

    @property
    def has_open(self) -> bool:
        """Whether a transfer is open. Only a step returns the reports that end it."""
        return bool(self._pins or self._loading)

    def ready(self, request: Request) -> bool:
        return request.status is not RequestStatus.LOADING

    def ended(self, request: Request) -> None:
        self._loading.pop(request.key, None)

    def rest(self) -> None:
        time.sleep(NAP_S)

    @property
    def loading(self) -> Collection[str]:
        """The keys of the requests whose blocks a connector loads between steps."""
        return self._loading.keys()

    def load(self, request: Request, external: External) -> None:
        """Let a connector load the request's blocks between steps. It waits without a row."""
        request.status = RequestStatus.LOADING
        self._loading[request.key] = request
        self.allocated(request, external)

    def find(self, request: Request, num_local_tokens: int) -> External | None:
        """Ask the chain for a prefix that is longer than the local one. The match never includes
        the last token, which is computed here. Return None if a connector wants to be asked
        again."""
        room = request.num_tokens - 1 - num_local_tokens
        if not self or not request.uses_connectors or room <= 0:
            return External()
        self._kv.hasher.extend(request)
        for name, connector in self._connectors.items():
            match = expect(
                connector.match(request, num_local_tokens), Match | None, connector, "match"
            )
            if match is None:
                return None
            if match.num_tokens > 0:
                return External(Match(min(match.num_tokens, room), match.load), name)
        return External()

    def allocated(self, request: Request, external: External) -> None:
        """Tell the connectors that the request's blocks are reserved, and how many tokens they
        load: the winner its match, the others none."""
        for name, connector in self._connectors.items():
            connector.allocated(
                request,
                self._view(request),
                external.match.num_tokens if name == external.winner else 0,
            )

    def plan(self, batch: Batch) -> dict[str, bytes]:
        """Return every connector's plan for this step."""
        return {
            name: expect(connector.plan(batch), bytes, connector, "plan")
            for name, connector in self._connectors.items()
        }

    def released(
        self, request: Request, why: Literal["finished", "aborted", "preempted"]
    ) -> dict[str, Any] | None:
        """Tell the connectors that the request is about to free its blocks, and pin the blocks that
        they still read. Return the KV transfer parameters for the client."""
        if not self or not self._kv.holds(request):
            return None
        parameters: dict[str, Any] = {}
        view = self._view(request)
        for name, connector in self._connectors.items():
            answer = expect(connector.released(request, view, why), Release, connector, "released")
            if answer.later:
                held = [
                    block_id for table in self._kv.tables(request) for block_id in reversed(table)
                ]
                self._kv.pool.touch(held)
                self._pins.setdefault((name, request.key), []).append(held)
            parameters.update(answer.parameters or {})
        return parameters or None

    def update(self, reports: Mapping[str, TransferReport]) -> tuple[list[Request], dict[str, int]]:
        """Pass a step's reports to the connectors, and unpin the blocks of transfers that have
        ended. Return the requests that wait again because their load between steps is done, and
        key → first token that was not loaded for those whose load failed."""
        loaded = []
        failed = {}
        for name, report in reports.items():
            self._connectors[name].update([report])
            for key in (*report.saved, *report.loaded, *report.failed):
                self._unpin(name, key)
            loaded += [self._loading.pop(key, None) for key in report.loaded]
            failed.update(report.failed)
        return [request for request in loaded if request is not None], failed

    def reset(self) -> None:
        """Tell the connectors that the prefix cache was reset."""
        for connector in self._connectors.values():
            connector.reset()

    def _view(self, request: Request) -> BlockView:
        return BlockView(tuple(tuple(table) for table in self._kv.tables(request)))

    def _unpin(self, name: str, key: str) -> None:
        """Unpin the blocks of the oldest open transfer of this connector and request, if there is
        one."""
        pinned = self._pins.get((name, key))
        if pinned:
            self._kv.pool.free(pinned.pop(0))
            if not pinned:
                del self._pins[name, key]
