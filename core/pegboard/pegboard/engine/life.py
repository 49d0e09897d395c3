"""Whether the engine lives, and which plugin is to blame if it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pegboard.errors import EngineDeadError, PegboardError, blamed, culprit
from pegboard.interfaces.executor import Executor, WorkerDeath


class Life:
    """modules: module → id of the plugin that it belongs to. executor: it reports workers that have
    died. end: why the engine is dead; None = it lives."""

    def __init__(self, modules: Mapping[str, str], executor: Executor) -> None:
        self.modules = modules
        self._executor = executor
        self.end: str | None = None
        executor.watch(self._on_death)

    def check(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        if self.end is not None:
            raise EngineDeadError(f"the engine is dead: {self.end}")

    def stop(self, reason: str) -> None:
        """The engine is dead from now on. The first reason counts."""
        self.end = self.end or reason

    def _on_death(self, death: WorkerDeath) -> None:
        kind = type(self._executor)
        plugin = culprit(self.modules, [kind.__module__]) or kind.__name__
        self.end = f"{plugin} reports that worker {death.rank} died: {death.reason}"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the engine's state in the block. After an error in it the state is unknown, so the
        engine is dead."""
        self.check()
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again
            failure = self._blamed(error)
            self.stop(f"{type(failure).__name__}: {failure}")
            raise failure from failure.__cause__

    def _blamed(self, error: BaseException) -> BaseException:
        """Return a PluginFailure if the error came from the code of a plugin or from what a plugin
        returned, and EngineDeadError if it came from anywhere else. Pegboard's own errors are
        returned as they are."""
        failure: PegboardError | None = blamed(error, lambda: self.modules)
        if failure is not None:
            return failure
        if isinstance(error, PegboardError) or not isinstance(error, Exception):
            return error
        failure = EngineDeadError(f"a step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
