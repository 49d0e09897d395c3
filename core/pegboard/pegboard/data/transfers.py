"""Merges what the ranks report on KV transfers. Each rank moves its part of the keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.data.batch import TransferReport


class TransferMerger:
    """Merges the reports of all ranks, by KV connector. A save or load has ended when every rank
    has reported it, possibly in different steps. It has failed if it failed on any rank, at the
    smallest token that any rank could not load."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ends: dict[tuple[str, str, bool], list[list[int | None]]] = {}
        self._merged: dict[str, TransferReport] = {}

    def add(self, rank: int, reports: Mapping[str, TransferReport]) -> None:
        """Add the reports of one step of a rank."""
        for name, report in reports.items():
            self._merged.setdefault(name, TransferReport([], [], {}))
            for request_id in report.saved:
                self._end(rank, (name, request_id, False), None)
            loads: dict[str, int | None] = {**dict.fromkeys(report.loaded), **report.failed}
            for request_id, first_bad_token in loads.items():
                self._end(rank, (name, request_id, True), first_bad_token)

    def _end(self, rank: int, key: tuple[str, str, bool], bad_token: int | None) -> None:
        by_rank = self._ends.setdefault(key, [[] for _ in range(self._ranks)])
        by_rank[rank].append(bad_token)
        if not all(by_rank):
            return
        bad_tokens = [token for each in by_rank if (token := each.pop(0)) is not None]
        if not any(by_rank):
            del self._ends[key]
        name, request_id, is_load = key
        merged = self._merged[name]
        if bad_tokens:
            merged.failed[request_id] = min(bad_tokens)
        else:
            (merged.loaded if is_load else merged.saved).append(request_id)

    def take(self) -> dict[str, TransferReport]:
        """Return what has ended on all ranks since the last call, for each connector that has ever
        reported."""
        merged = self._merged
        self._merged = {name: TransferReport([], [], {}) for name in merged}
        return merged
