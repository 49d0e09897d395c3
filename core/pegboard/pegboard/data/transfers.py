"""How the reports of several ranks about transfers of keys and values become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.data.batch import TransferReport


class TransferMerger:
    """Merges the reports of the ranks, each of which moves its part of the keys and values. A
    transfer has ended when all ranks have reported it, which may be in different steps. It has
    failed if it has failed on any rank, from the first token that a rank could not load."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._saved: dict[tuple[str, str], list[int]] = {}
        self._loads: dict[tuple[str, str], list[list[int | None]]] = {}

    def merge(self, reports: Sequence[Mapping[str, TransferReport]]) -> dict[str, TransferReport]:
        """Return what has ended. reports: of each rank, by connector."""
        merged = {name: TransferReport([], [], {}) for name in reports[0]}
        for rank, by_name in enumerate(reports):
            for name, report in by_name.items():
                for key in report.saved:
                    counts = self._saved.setdefault((name, key), [0] * self._ranks)
                    counts[rank] += 1
                    if all(counts):
                        merged[name].saved.append(key)
                        counts[:] = [count - 1 for count in counts]
                    if not any(counts):
                        del self._saved[name, key]
                ended = {**dict.fromkeys(report.loaded), **report.failed}
                for key, first in ended.items():
                    loads = self._loads.setdefault((name, key), [[] for _ in range(self._ranks)])
                    loads[rank].append(first)
                    if all(loads):
                        failed = [first for each in loads if (first := each.pop(0)) is not None]
                        if failed:
                            merged[name].failed[key] = min(failed)
                        else:
                            merged[name].loaded.append(key)
                    if not any(loads):
                        del self._loads[name, key]
        return merged
