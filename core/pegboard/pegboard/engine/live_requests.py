"""All live requests, and their way from waiting over running to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pegboard.config.limits import Limits
from pegboard.data.request import RequestDelta
from pegboard.engine.gates import Gate
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import KVConnectors
from pegboard.engine.requests import Request
from pegboard.engine.rows import Rows
from pegboard.engine.waiting import WaitingQueue
from pegboard.interfaces.scheduling_policy import RequestStatus, SchedulingPolicy

TOTALS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "num_preemptions_total",
)
"""Metrics that are counted here. Queries and hits of prefixes are numbers of tokens."""


class LiveRequests:
    """gates: what requests may wait for. running: the running requests in admission order. totals:
    metric → counter since the start."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: SchedulingPolicy,
        connectors: KVConnectors,
        gates: Sequence[Gate],
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.connectors = connectors
        self.clock = clock
        self.waiting = WaitingQueue(policy)
        self.rows = Rows(limits.max_num_seqs)
        self.running: list[Request] = []
        self.totals = dict.fromkeys(TOTALS, 0)
        self._gates = gates
        self._by_key: dict[str, Request] = {}
        self._completions: dict[str, list[Request]] = {}
        self._deltas: list[RequestDelta] = []
        self._ended: list[Request] = []

    # --- queries ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        """Oldest first."""
        return iter(list(self._by_key.values()))

    def get(self, key: str) -> Request | None:
        return self._by_key.get(key)

    def named(self, name: str) -> list[Request]:
        """Return the completions of a request, or the one completion with this key."""
        one = self._by_key.get(name)
        return list(self._completions.get(name) or ([] if one is None else [one]))

    @property
    def is_transferring(self) -> bool:
        """Whether KV transfers are open. Only a step returns the reports that end them."""
        return self.connectors.has_open

    @property
    def has_news(self) -> bool:
        """Whether `take_deltas` would return something."""
        return bool(self._deltas)

    def is_alone(self) -> bool:
        """Whether no request runs, loads or drains, so that no blocks will be freed."""
        return not (self.running or self.rows.is_draining or self.is_transferring)

    # --- the way of a request ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a new completion to the waiting ones."""
        self._by_key[request.key] = request
        self._completions.setdefault(request.request_id, []).append(request)
        if request.parent is not None:
            request.parent.num_waiting_children += 1
        self.waiting.arrive(request)

    def run(self, request: Request) -> None:
        """Give an admitted request its row. The caller has reserved its blocks, and removes it from
        `waiting` after it has finished iterating."""
        request.leave_parent()
        request.status = RequestStatus.RUNNING
        request.first_scheduled_s = request.first_scheduled_s or self.clock()
        self.rows.take(request)
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """Take the row and the blocks from a running request. It waits again and recomputes its
        tokens later."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.totals["num_preemptions_total"] += 1
        request.draft_token_ids = []
        request.num_drafts = 0
        self.connectors.released(request, "preempted")
        self._leave_running(request)

    def finish(
        self, request: Request, delta: RequestDelta, reason: str, *, is_aborted: bool = False
    ) -> None:
        """End a live request in any status. `delta` is its last one."""
        was_running = request.status is RequestStatus.RUNNING
        was_draining = self.rows.drains(request)
        del self._by_key[request.key]
        siblings = self._completions[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self._completions[request.request_id]
        if not was_draining:
            delta.kv_transfer_params = self.connectors.released(
                request, "aborted" if is_aborted else "finished"
            )
        request.status = RequestStatus.FINISHED
        for gate in self._gates:
            gate.ended(request)
        if was_running:
            self._leave_running(request)
        elif not was_draining:
            self.waiting.remove(request)
            self.kv.release(request)
        request.finish_reason = delta.finish_reason = reason
        delta.stop_reason = request.stop_reason
        self._deltas.append(delta)
        self._ended.append(request)

    def fail(
        self, request: Request, reason: str, error: str | None = None, parameter: str | None = None
    ) -> None:
        """End a request in any status without a result. error: the reason for the client.
        parameter: the field that is wrong."""
        self.finish(request, request.failed(error, parameter), reason, is_aborted=True)

    def vacate(self, request: Request) -> None:
        """Release everything that the request holds. No step in flight may use its row any more. A
        preempted request waits again."""
        self.kv.release(request)
        self.rows.vacate(request)
        for gate in self._gates:
            gate.leave(request)
        if request.status is RequestStatus.PREEMPTED:
            request.num_computed_tokens = 0
            self.waiting.add(request)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        if request.num_in_flight_steps:
            self.rows.drain(request)
        else:
            self.vacate(request)

    # --- blocks of waiting requests ---------------------------------------------------------------

    def reclaim(self, need: Request | None = None) -> bool:
        """Free the blocks that a connector has loaded for another waiting request, as the last
        resort before `need` itself must wait. Return False if no request has such blocks."""
        for other in reversed(self._by_key.values()):
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

    def weights_changed(self, name: str) -> None:
        """Nothing that was computed before matches any more. name: of the new weights."""
        self.kv.hasher.restart(f"{self.kv.plan.identity}:{name}")
        for gate in self._gates:
            gate.weights_changed()
        for request in self:
            request.block_hashes.clear()

    # --- results ----------------------------------------------------------------------------------

    def emit(self, delta: RequestDelta) -> None:
        """Return this with the next `take_deltas`."""
        self._deltas.append(delta)

    def count(self, name: str, n: int) -> None:
        """Add to one of the totals."""
        self.totals[name] += n

    def take_deltas(self) -> list[RequestDelta]:
        """Return the deltas since the last call."""
        deltas = self._deltas
        self._deltas = []
        return deltas

    def take_ended(self) -> list[Request]:
        """Return the requests that have finished since the last call."""
        ended = self._ended
        self._ended = []
        return ended
