"""All live requests, waiting and running, and what they hold: rows, blocks, KV transfers and
adapter slots.

A request leaves its row in two steps. First it is no longer scheduled, because it has finished, was
aborted or was preempted. Later, when no step in flight uses its row, it is *vacated*: its row,
blocks and adapter are released, and a preempted request waits again. In between it is *draining*,
and results that arrive for it are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from pegboard.config.limits import Limits
from pegboard.data.batch import Batch, TransferReport
from pegboard.data.request import RequestDelta
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.loras import LoRASlots
from pegboard.engine.requests import Request
from pegboard.errors import expect
from pegboard.interfaces.kv_connector import BlockView, KVConnectorScheduler, Match, Release
from pegboard.interfaces.scheduling_policy import RequestStatus, SchedulingPolicy

TOTALS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
)
"""Metrics that are counted here. Queries and hits are numbers of tokens."""


class Queues:
    """policy: holds the waiting requests. held: requests that have arrived since `close`. running:
    the running requests in admission order. loading: requests whose blocks a connector loads
    between steps. by_row: the request that owns each row, including draining ones. removed_rows:
    rows vacated since the last batch. deltas: deltas that `Engine.step` has not returned yet.
    ended: requests that have finished since the last measurement. totals: metric → counter since
    the start."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: SchedulingPolicy,
        connectors: KVConnectors,
        clock: Callable[[], float],
        call_adapters: Callable[..., list[object]],
    ) -> None:
        self.clock = clock
        self.kv = kv
        self.policy = policy
        self.connectors = connectors
        self.loras = LoRASlots(limits, call_adapters)
        self.requests: dict[str, Request] = {}
        self.completions: dict[str, list[Request]] = {}
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.draining: set[Request] = set()
        self.by_row: list[Request | None] = [None] * limits.max_num_seqs
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.removed_rows: list[int] = []
        self.deltas: list[RequestDelta] = []
        self.ended: list[Request] = []
        self.held: list[Request] = []
        self._is_open = True
        self.num_waiting = 0
        self.totals = dict.fromkeys(TOTALS, 0)

    def add(self, request: Request) -> None:
        """Add a new completion to the waiting ones."""
        self.requests[request.key] = request
        self.completions.setdefault(request.request_id, []).append(request)
        if request.parent is not None:
            request.parent.num_waiting_children += 1
        if self._is_open:
            self._wait(request)
        else:
            self.held.append(request)
            self.num_waiting += 1

    def close(self) -> None:
        """Hold the requests that arrive from now on, so that no policy sees them."""
        self._is_open = False

    def open(self) -> None:
        """Let the requests wait that were held, and those that arrive."""
        self._is_open = True
        for request in self.held:
            self.policy.add(request)
        self.held = []

    def run(self, request: Request) -> None:
        """Give an admitted request its row. The caller has reserved its blocks and its adapter. It
        calls `stop_waiting` after it has finished iterating over the waiting requests."""
        self._leave_parent(request)
        request.row = self.free_rows.pop()
        request.status = RequestStatus.RUNNING
        request.first_scheduled_s = request.first_scheduled_s or self.clock()
        self.by_row[request.row] = request
        self.running.append(request)

    def stop_waiting(self, request: Request) -> None:
        """Remove a request that waits or is held."""
        (self.held if request in self.held else self.policy).remove(request)
        self.num_waiting -= 1

    def preempt(self, request: Request) -> None:
        """Take the row and the blocks from a running request. It waits again and recomputes its
        tokens later."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.totals["num_preemptions_total"] += 1
        request.draft_token_ids = []
        self.connectors.released(request, "preempted")
        self._leave_running(request)

    def finish(
        self, request: Request, delta: RequestDelta, reason: str, *, is_aborted: bool = False
    ) -> None:
        """End a live request in any status. `delta` is its last one."""
        was_running = request.status is RequestStatus.RUNNING
        was_draining = request in self.draining
        del self.requests[request.key]
        siblings = self.completions[request.request_id]
        siblings.remove(request)
        if request.lora is not None:
            self.loras.ended(request)
        if not siblings:
            del self.completions[request.request_id]
        if not was_draining:
            delta.kv_transfer_params = self.connectors.released(
                request, "aborted" if is_aborted else "finished"
            )
        request.status = RequestStatus.FINISHED
        if was_running:
            self._leave_running(request)
        elif not was_draining:
            self.loading.pop(request.key, None)
            self.stop_waiting(request)
            self._leave_parent(request)
            self.kv.release(request)
        request.finish_reason = delta.finish_reason = reason
        delta.stop_reason = request.stop_reason
        self.deltas.append(delta)
        self.ended.append(request)

    def fail(
        self, request: Request, reason: str, error: str | None = None, parameter: str | None = None
    ) -> None:
        """End a request in any status without a result. error: the reason for the client.
        parameter: the field that is wrong."""
        delta = RequestDelta(
            request_id=request.request_id,
            index=request.index,
            error=error,
            error_parameter=parameter,
        )
        self.finish(request, delta, reason, is_aborted=True)

    def vacate(self, request: Request) -> None:
        """Release everything that the request holds. No step in flight may use its row any more. A
        preempted request waits again."""
        assert request.row is not None
        self.draining.discard(request)
        self.kv.release(request)
        self.by_row[request.row] = None
        self.free_rows.append(request.row)
        self.removed_rows.append(request.row)
        request.row = None
        if request.adapter is not None:
            self.loras.release(request)
        if request.status is RequestStatus.PREEMPTED:
            request.num_computed_tokens = 0
            self._wait(request)

    def reclaim(self, need: Request | None = None) -> bool:
        """Free the blocks that a connector has loaded for another waiting request, as the last
        resort before `need` itself must wait. Return False if no request has such blocks."""
        for other in reversed(self.requests.values()):
            if other is not need and other.status is RequestStatus.WAITING and self.kv.holds(other):
                self.drop_blocks(other)
                return True
        return False

    def drop_blocks(self, request: Request) -> None:
        """Free the blocks that a connector loaded for a waiting request, which will compute its
        tokens instead."""
        request.not_loaded()
        self.connectors.released(request, "preempted")
        self.kv.release(request)
        request.num_computed_tokens = 0

    def take_deltas(self) -> list[RequestDelta]:
        """Return the deltas since the last call."""
        deltas = self.deltas
        self.deltas = []
        return deltas

    def take_ended(self) -> list[Request]:
        """Return the requests that have finished since the last call."""
        ended = self.ended
        self.ended = []
        return ended

    def weights_changed(self, name: str) -> None:
        """Nothing that was computed before matches any more. name: of the new weights."""
        self.kv.hasher.restart(f"{self.kv.plan.identity}:{name}")
        for request in self.requests.values():
            request.block_hashes.clear()

    @property
    def is_transferring(self) -> bool:
        """Whether KV transfers are open. Only a step returns the reports that end them."""
        return bool(self.loading or self.connectors.has_open)

    def _wait(self, request: Request) -> None:
        self.policy.add(request)
        self.num_waiting += 1

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        if request.num_in_flight_steps:
            self.draining.add(request)
        else:
            self.vacate(request)

    def _leave_parent(self, request: Request) -> None:
        """Record that the completion no longer waits for its parent's prompt blocks."""
        if request.parent is not None:
            request.parent.num_waiting_children -= 1
            request.parent = None


class External(NamedTuple):
    """An external prefix: the match, and the connector that loads it, if there is one."""

    match: Match = Match(0)
    winner: str | None = None


class KVConnectors:
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

    def __bool__(self) -> bool:
        return bool(self._connectors)

    @property
    def has_open(self) -> bool:
        """Whether blocks of ended requests wait for a report. Only a step returns reports."""
        return bool(self._pins)

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

    def update(self, reports: Mapping[str, TransferReport]) -> tuple[list[str], dict[str, int]]:
        """Pass a step's reports to the connectors, and unpin the blocks of transfers that have
        ended. Return the keys of the requests whose load is done, and key → first token that was
        not loaded for those whose load failed."""
        loaded = []
        failed = {}
        for name, report in reports.items():
            self._connectors[name].update([report])
            for key in (*report.saved, *report.loaded, *report.failed):
                self._unpin(name, key)
            loaded += report.loaded
            failed.update(report.failed)
        return loaded, failed

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
