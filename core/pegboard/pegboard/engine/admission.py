"""Admits waiting requests: asks the gates, fits their first tokens into the step, and gives them
rows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pegboard.config.limits import Limits
from pegboard.engine.batch_builder import Entry, StepSchedule
from pegboard.engine.forks import Forks
from pegboard.engine.gates import Gate
from pegboard.engine.kv.connectors import External
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.requests import Request
from pegboard.engine.starts import Start, Starts
from pegboard.errors import EngineDeadError, PegboardError


class Verdict(Enum):
    """What happened to a waiting request. SKIPPED: it still waits, and the next one is tried.
    BLOCKED: it still waits, and no request after it may be admitted."""

    ADMITTED = "admitted"
    SKIPPED = "skipped"
    BLOCKED = "blocked"


class Admission:
    """The second half of scheduling. It keeps no state between steps."""

    def __init__(
        self, limits: Limits, live: LiveRequests, gates: Sequence[Gate], forks: Forks
    ) -> None:
        self._can_chunk = limits.enable_chunked_prefill
        self._live = live
        self._gates = gates
        self._forks = forks
        self._starts = Starts(live)

    def admit(self, schedule: StepSchedule) -> None:
        """Admit requests in the policy's order until rows, tokens or blocks run out. A request that
        a gate refuses fails."""
        live = self._live
        admitted: list[Request] = []
        # not the error: it would make a cycle with this frame
        failed: list[tuple[Request, str, str | None]] = []
        for request in live.waiting:
            if not schedule.has_room or not live.rows.has_free:
                break
            try:
                is_ready = all(gate.ready(request) for gate in self._gates)
            except EngineDeadError:
                raise
            except PegboardError as error:
                failed.append((request, str(error), getattr(error, "parameter", None)))
                is_ready = False
            verdict = self._start(request, schedule) if is_ready else Verdict.SKIPPED
            if verdict is not Verdict.ADMITTED:
                for gate in self._gates:
                    gate.leave(request)
            if verdict is Verdict.ADMITTED:
                admitted.append(request)
            elif verdict is Verdict.BLOCKED:
                break
        for request in admitted:
            live.waiting.remove(request)
        for request, reason, parameter in failed:
            live.fail(request, "error", reason, parameter)

    def _start(self, request: Request, schedule: StepSchedule) -> Verdict:
        if self._forks.fork(request):
            self._live.connectors.allocated(request, External())
            self._run(request, 1, True, schedule)
            return Verdict.ADMITTED
        start = self._starts.find(request)
        if start is None:
            return Verdict.SKIPPED
        if start.external.match.load == "between_steps":
            return (
                Verdict.SKIPPED if self._starts.begin_loading(request, start) else Verdict.BLOCKED
            )
        before = request.num_computed_tokens
        request.num_computed_tokens += start.num_cached
        verdict = self._schedule(request, start, schedule)
        if verdict is not Verdict.ADMITTED:
            request.num_computed_tokens = before
        return verdict

    def _schedule(self, request: Request, start: Start, schedule: StepSchedule) -> Verdict:
        computed = request.num_computed_tokens
        num_missing = request.num_tokens - computed
        if not self._can_chunk and num_missing > schedule.tokens_left < schedule.budget.max_tokens:
            return Verdict.BLOCKED  # it waits for a step that can compute the whole prompt
        num_tokens = schedule.chunk(request, num_missing)
        samples = num_tokens == num_missing
        if num_tokens == 0 and request.whole:
            return Verdict.BLOCKED  # it waits for a step that can compute the whole item
        if num_tokens == 0 or (not samples and not schedule.allows_partial(request)):
            return Verdict.SKIPPED
        if not self._starts.reserve(request, computed + num_tokens, start, computed):
            return Verdict.BLOCKED
        if not start.is_loaded:
            self._live.connectors.allocated(request, start.external)
            request.num_loading_tokens = start.external.match.num_tokens
            request.num_in_flight_tokens += request.num_loading_tokens
        self._run(request, num_tokens, samples, schedule)
        return Verdict.ADMITTED

    def _run(
        self, request: Request, num_tokens: int, samples: bool, schedule: StepSchedule
    ) -> None:
        self._live.run(request)
        schedule.put(
            request, Entry(num_tokens, 0, samples, self._live.kv.tables(request), is_new=True)
        )
