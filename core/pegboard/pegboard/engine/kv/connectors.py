"""The chain of KV connectors, scheduler side: who brings an external prefix, which transfers are open, which blocks they pin.

Connectors are asked in order and the first match wins; the others are told that nothing is theirs. Reports come back with
every step. A connector that still reads a released request's blocks has them pinned under (connector, request key) until its
report names the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pegboard.data.batch import Batch, TransferReport
from pegboard.data.request import Request
from pegboard.engine.kv.cache import KVCache
from pegboard.errors import blame
from pegboard.interfaces.kv_connector import KVConnectorScheduler, Match

NO_MATCH = Match(0)


@dataclass(slots=True)
class External:
    """An external prefix: which connector brings it, and what it said. `undecided`: some connector wants to be asked again."""

    match: Match = NO_MATCH
    winner: str | None = None
    undecided: bool = False


@dataclass(slots=True)
class Arrivals:
    """What the reports of a step say about requests: loads that are done, and the first bad token of failed ones."""

    loaded: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)


class Transfers:
    """All connectors of one engine, by name in chain order. Costs nothing per step when there are none."""

    def __init__(self, connectors: Mapping[str, KVConnectorScheduler], kv: KVCache) -> None:
        self._connectors = dict(connectors)
        self._kv = kv

    @property
    def is_on(self) -> bool:
        return bool(self._connectors)

    @property
    def has_open(self) -> bool:
        """Blocks of ended requests wait for a report, which only a step can bring."""
        return self._kv.has_pins

    def find(self, request: Request, num_local_tokens: int) -> External:
        """Ask the chain for a prefix beyond the local one. At most all tokens but one are taken: the last is computed here."""
        room = request.num_tokens - 1 - num_local_tokens
        if not self._connectors or not request.uses_connectors or room <= 0:
            return External()
        self._kv.hash_blocks(request)
        for name, connector in self._connectors.items():
            with blame(name):
                match = connector.match(request, num_local_tokens)
            if match is None:
                return External(undecided=True)
            if match.num_tokens > 0:
                return External(Match(min(match.num_tokens, room), match.load), name)
        return External()

    def allocated(self, request: Request, external: External) -> None:
        """The request's blocks are reserved: the winner may load, the others must not."""
        for name, connector in self._connectors.items():
            num_tokens = external.match.num_tokens if name == external.winner else 0
            with blame(name):
                connector.allocated(request, self._kv.view(request), num_tokens)

    def plan(self, batch: Batch) -> dict[str, bytes]:
        """Every connector's plan for this step."""
        plans = {}
        for name, connector in self._connectors.items():
            with blame(name):
                plans[name] = connector.plan(batch)
        return plans

    def announce(self, request: Request, why: Literal["finished", "aborted", "preempted"]) -> dict[str, Any] | None:
        """The request is about to give its blocks back: tell the connectors, pin what they still read. Returns what they want
        the client to know."""
        if not self._connectors or not self._kv.holds(request):
            return None
        parameters: dict[str, Any] = {}
        view = self._kv.view(request)
        for name, connector in self._connectors.items():
            with blame(name):
                answer = connector.released(request, view, why)
            if answer.later:
                self._kv.pin(request, name)
            parameters.update(answer.parameters or {})
        return parameters or None

    def update(self, reports: Mapping[str, TransferReport]) -> Arrivals:
        """Take a step's reports: tell the connectors, unpin what is over, collect what concerns live requests."""
        arrivals = Arrivals()
        for name, report in reports.items():
            with blame(name):
                self._connectors[name].update([report])
            for key in (*report.saved, *report.loaded, *report.failed):
                self._kv.unpin(name, key)
            arrivals.loaded.extend(report.loaded)
            arrivals.failed.update(report.failed)
        return arrivals

    def reset(self) -> None:
        """The prefix cache was forgotten."""
        for name, connector in self._connectors.items():
            with blame(name):
                connector.reset()
