"""What requests do when a KV connector has loaded their prefix, or could not."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.config.limits import Limits
from pegboard.data.batch import TransferReport
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.requests import LOAD_FAILED, Request
from pegboard.interfaces.scheduling_policy import RequestStatus


class Transfers:
    """The part of the scheduler's `update` that takes the reports of KV connectors."""

    def __init__(self, limits: Limits, live: LiveRequests) -> None:
        self._limits = limits
        self._live = live

    def take(self, reports: Mapping[str, TransferReport]) -> None:
        """Apply the connectors' reports. A request whose load failed computes the rest itself, or
        ends with an error."""
        live = self._live
        loaded, failed = live.connectors.update(reports)
        for request in loaded:
            request.status = RequestStatus.WAITING
            self._live.kv.commit(request, request.num_computed_tokens)
            self._live.kv.keep_loaded(request, request.num_computed_tokens)
        for key, first_bad_token in failed.items():
            loading = live.get(key)
            if loading is None or loading.status not in (
                RequestStatus.LOADING,
                RequestStatus.RUNNING,
            ):
                continue
            if self._limits.kv_load_failure_policy == "fail":
                live.fail(loading, "error", LOAD_FAILED)
            elif loading.status is RequestStatus.RUNNING:
                # what it computed after the load is invalid and was not committed
                loading.not_loaded()
                live.preempt(loading)
            else:
                live.connectors.ended(loading)
                self._continue_without(loading, first_bad_token)

    def _continue_without(self, request: Request, first_bad_token: int) -> None:
        """Handle a failed load between steps: keep the blocks if possible, and compute from the
        first bad token on."""
        request.status = RequestStatus.WAITING
        can_resume = self._live.kv.can_resume(request, first_bad_token)
        request.not_loaded(first_bad_token if can_resume else 0)
        if not can_resume:
            self._live.drop_blocks(request)
        else:
            request.num_computed_tokens = min(request.num_computed_tokens, first_bad_token)
            self._live.kv.commit(request, request.num_computed_tokens)
