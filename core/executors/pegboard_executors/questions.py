"""What several ranks answer, and when the answers suffice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pegboard.data.batch import StepOutput
from pegboard.errors import EngineDeadError, PegboardError

CAUSE_S = 1.0
"""Seconds in which the cause of an error that may be a consequence arrives: a rank whose neighbour
has failed or died may notice that first."""


class Question:
    """A message that ranks answer. needs: how many of them answer it if all goes well. is_hasty: an
    error that cannot have come from another rank's failure is raised before the others have
    answered."""

    def __init__(self, needs: int, ranks: int, *, is_hasty: bool) -> None:
        self.needs = needs
        self.ranks = ranks
        self.is_hasty = is_hasty
        self.answers: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.limit: float | None = None

    def take(self, rank: int, is_error: bool, value: Any) -> None:
        """Note the answer or the error of a rank."""
        if not is_error:
            self.answers[rank] = value
            return
        self.errors[rank] = value
        if self.is_hasty and self.limit is None:
            self.limit = time.monotonic() + CAUSE_S

    @property
    def cause(self) -> BaseException | None:
        """The first error that cannot have come from another rank's failure."""
        causes = (error for error in self.errors.values() if not is_consequence(error))
        return next(causes, None)

    def is_settled(self) -> bool:
        """Whether nothing more needs to arrive."""
        if not self.errors:
            return len(self.answers) >= self.needs
        if len(self.answers) + len(self.errors) == self.ranks:
            return True
        is_late = self.limit is not None and time.monotonic() >= self.limit
        return is_late or (self.is_hasty and self.cause is not None)

    def patience_s(self) -> float | None:
        """Return how many seconds to wait for the next answer; None = without a limit."""
        return None if self.limit is None else max(0.0, self.limit - time.monotonic()) + 0.001

    def result(self) -> dict[int, Any]:
        """Return the answers by rank. Raises the error of a rank."""
        if self.errors:
            raise self.cause or next(iter(self.errors.values()))
        return self.answers


def is_consequence(error: BaseException) -> bool:
    """Whether the error may only say that another rank did not come to a collective: that is an
    EngineDeadError, or an error of a library."""
    return not isinstance(error, PegboardError) or isinstance(error, EngineDeadError)


class Step:
    """A submitted step. wait: waits for its result, once."""

    def __init__(self, wait: Callable[[], StepOutput]) -> None:
        self._wait = wait
        self._output: StepOutput | None = None
        self._error: BaseException | None = None

    def result(self) -> StepOutput:
        if self._output is None and self._error is None:
            try:
                self._output = self._wait()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output
