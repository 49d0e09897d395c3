"""The rows of running requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegboard.engine.requests import Request


class Rows:
    """A row is a number below `max_num_seqs`, under which the workers keep a running request.

    A request leaves its row in two steps. First it is no longer scheduled, because it has finished,
    was aborted or was preempted. Later, when no step in flight uses its row, the row is *vacated*.
    In between the request is *draining*, and results that arrive for it are dropped.
    """

    def __init__(self, num_rows: int) -> None:
        self._owners: list[Request | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._draining: set[Request] = set()
        self._removed: list[int] = []

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def is_draining(self) -> bool:
        """Whether a row will be vacated when steps in flight have ended."""
        return bool(self._draining)

    @property
    def owners(self) -> Sequence[Request | None]:
        """The request that owns each row, draining ones included."""
        return self._owners

    def drains(self, request: Request) -> bool:
        return request in self._draining

    def live(self, rows: Iterable[int]) -> list[Request | None]:
        """Return the owners of rows, or None for those that are draining."""
        owners = map(self._owners.__getitem__, rows)
        return [None if owner in self._draining else owner for owner in owners]

    def take(self, request: Request) -> None:
        """Give the request a free row."""
        request.row = self._free.pop()
        self._owners[request.row] = request

    def drain(self, request: Request) -> None:
        """Keep the row until no step in flight uses it."""
        self._draining.add(request)

    def vacate(self, request: Request) -> None:
        """Free the row. No step in flight may use it any more."""
        assert request.row is not None
        self._draining.discard(request)
        self._owners[request.row] = None
        self._free.append(request.row)
        self._removed.append(request.row)
        request.row = None

    def take_removed(self) -> list[int]:
        """Return the rows that were vacated since the last call."""
        removed = self._removed
        self._removed = []
        return removed
