"""Who is in the engine and what they hold: rows, blocks, adapter slots, encoded media. Requests change status here.

A request leaves its row in two moves. First it stops being scheduled (finished, aborted or preempted). Then, once no step in
flight holds its row, it is *vacated*: row, blocks, adapter and media are given back, and a preempted request waits again. In
between it is *draining*, and results that still come for it are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pegboard.config.limits import Limits
from pegboard.data.request import Request, RequestDelta, RequestStatus
from pegboard.engine.blamed import BlamedPolicy
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.kv.cache import KVCache
from pegboard.engine.kv.connectors import Transfers
from pegboard.engine.lora_slots import LoRASlots


class Roster:
    """All live requests. running: in admission order. by_row: who owns each row, draining ones included. loading: requests whose
    blocks a connector fills between steps. removed_rows: vacated since the last batch. deltas: waiting to be handed out. ended:
    finished since they were last measured."""

    def __init__(
        self,
        limits: Limits,
        kv: KVCache,
        policy: BlamedPolicy,
        transfers: Transfers,
        loras: LoRASlots,
        encoder_cache: EncoderCache,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.kv = kv
        self.policy = policy
        self.transfers = transfers
        self.loras = loras
        self.encoder_cache = encoder_cache
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
        self.num_waiting = 0
        self.num_preemptions = 0

    # --- coming -------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new completion waits."""
        self.requests[request.key] = request
        self.completions.setdefault(request.request_id, []).append(request)
        if request.parent is not None:
            request.waits_for.add("parent")
            request.parent.num_waiting_children += 1
        self._enqueue(request)

    def seat(self, request: Request) -> None:
        """Give an admitted request its row. The caller has its blocks and its adapter, and calls `leave_queue` once it no longer
        iterates over the waiting requests."""
        self.leave_parent(request)
        request.row = self.free_rows.pop()
        request.status = RequestStatus.RUNNING
        request.first_scheduled_s = request.first_scheduled_s or self.clock()
        self.by_row[request.row] = request
        self.running.append(request)

    def leave_queue(self, request: Request) -> None:
        """It waits no more."""
        self.policy.remove(request)
        self.num_waiting -= 1

    def leave_parent(self, request: Request) -> None:
        """The completion no longer counts on its parent's prompt blocks."""
        if "parent" in request.waits_for and request.parent is not None:
            request.parent.num_waiting_children -= 1
            request.waits_for.discard("parent")

    # --- going --------------------------------------------------------------------------------------------------------------

    def preempt(self, request: Request) -> None:
        """Take the row and the blocks back; it recomputes later."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.draft_token_ids = []
        self.transfers.announce(request, "preempted")
        self._leave_running(request)

    def finish(self, request: Request, reason: str, *, why: Literal["finished", "aborted"] = "finished") -> dict[str, Any] | None:
        """End a live request in any status. Returns the connectors' parameters for the client."""
        was_running, was_draining = request.status is RequestStatus.RUNNING, request in self.draining
        request.finish_reason = reason
        self.ended.append(request)
        self._forget(request)
        if was_draining:
            request.status = RequestStatus.FINISHED
            return None
        parameters = self.transfers.announce(request, why)
        request.status = RequestStatus.FINISHED
        if was_running:
            self._leave_running(request)
        else:
            self.loading.pop(request.key, None)
            self.leave_queue(request)
            self.leave_parent(request)
            self.kv.release(request)
        return parameters

    def settle(self, request: Request) -> None:
        """The last step in flight that held a draining request is over."""
        self.draining.discard(request)
        self._vacate(request)

    def reclaim(self, need: Request) -> bool:
        """Take the blocks of one other waiting request, which a connector has loaded: the last resort before `need`, which could
        run, gives way itself. False when nobody has any."""
        for other in reversed(self.requests.values()):
            if other is not need and other.status is RequestStatus.WAITING and self.kv.holds(other):
                self.drop_blocks(other)
                return True
        return False

    def drop_blocks(self, request: Request) -> None:
        """A waiting request gives back what a connector loaded for it, and starts over by computing."""
        self.transfers.announce(request, "preempted")
        self.kv.release(request)
        request.num_computed_tokens = 0
        request.uses_connectors = False

    def _forget(self, request: Request) -> None:
        del self.requests[request.key]
        siblings = self.completions[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self.completions[request.request_id]

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        if request.num_in_flight_steps:
            self.draining.add(request)
        else:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Give everything back; a preempted request waits again."""
        assert request.row is not None
        self.kv.release(request)
        self.by_row[request.row] = None
        self.free_rows.append(request.row)
        self.removed_rows.append(request.row)
        request.row = None
        if request.lora is not None:
            self.loras.release(request.lora)
        for item in request.media:
            self.encoder_cache.release(item, request.key)
        if request.status is RequestStatus.PREEMPTED:
            request.num_computed_tokens = request.num_in_flight_tokens = request.num_loading_tokens = 0
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self.policy.add(request)
        self.num_waiting += 1
