"""Replaces the weights of a running engine by those of another checkpoint of the same model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pegboard.engine.pauses import PauseMode, Pauses
from pegboard.engine.queues import Queues
from pegboard.errors import EngineDeadError, ModelError, RequestError

if TYPE_CHECKING:
    from pegboard.interfaces.weight_loader import Checkpoint


def no_checkpoint(path: str) -> "Checkpoint":
    raise ModelError(f"this engine was not built from a checkpoint, so {path} cannot replace it")


class WeightUpdates:
    """describe: returns the checkpoint at a path, or raises ModelError. call: `Executor.call`.
    dying: see `Engine`."""

    def __init__(
        self,
        queues: Queues,
        pauses: Pauses,
        *,
        describe: Callable[[str], "Checkpoint"],
        call: Callable[..., object],
        dying: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._queues = queues
        self._pauses = pauses
        self._describe = describe
        self._call = call
        self._dying = dying
        self._is_pausing = False  # the pause is this update's, and ends with it

    def update(self, path: str, mode: PauseMode = "abort") -> bool:
        """Replace the weights by those at `path`, in place. mode: what becomes of running requests,
        as in `Pauses.pause`; in a pause, its mode counts. Requests that go on compute all their
        tokens again. Cached blocks are not found any more, also not by KV connectors. Return False
        as `Pauses.pause` does: the call must be repeated.

        Raises RequestError if the path is not a checkpoint of this model. The weights are then the
        same as before."""
        if "weights" in self._pauses.asleep:
            raise RequestError('the weights are asleep; call wake_up with the tag "weights" first')
        try:
            # before requests are aborted for nothing
            checkpoint = None if self._is_pausing else self._describe(path)
            if not self._pause(mode):
                return False
            checkpoint = checkpoint or self._describe(path)
            self._call("update_weights", checkpoint)
        except EngineDeadError:
            with self._dying():
                raise
        except BaseException as error:
            self._resume()
            if isinstance(error, ModelError):
                raise RequestError(str(error), parameter="path") from error
            raise
        self._queues.kv.hasher.restart(
            f"{self._queues.kv.plan.identity}:{checkpoint.digest or os.urandom(16).hex()}"
        )
        for request in self._queues.requests.values():
            request.block_hashes.clear()
        self._resume()
        return True

    def _pause(self, mode: PauseMode) -> bool:
        """Stop the engine, unless a pause has begun, and drop the KV of all requests. Return False
        as `Pauses.pause` does."""
        others = None if self._is_pausing else self._pauses.mode
        is_stopped = self._pauses.pause(others or mode, clear_cache=True)
        self._is_pausing = others is None
        return is_stopped

    def _resume(self) -> None:
        if self._is_pausing:
            self._is_pausing = False
            self._pauses.resume()
