"""New weights of a running engine: from a checkpoint, or from a trainer that sends them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pegboard.engine.actions import InitWeightTransfer, UpdateWeights
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.steps import Steps
from pegboard.errors import EngineDeadError, ModelError, RequestError
from pegboard.interfaces.executor import Executor

if TYPE_CHECKING:
    from pegboard.interfaces.weight_loader import Checkpoint


class WeightUpdates:
    """Old cached blocks do not match new weights, in connectors either. describe: returns the
    checkpoint at a path, or raises ModelError."""

    def __init__(
        self,
        executor: Executor,
        live: LiveRequests,
        steps: Steps,
        describe: Callable[[str], "Checkpoint"],
    ) -> None:
        self._executor = executor
        self._live = live
        self._steps = steps
        self._describe = describe
        self._received = ""  # a name of the weights that a trainer has sent; "" = a checkpoint's

    def connect(self, action: InitWeightTransfer) -> None:
        """Let all ranks connect to the trainer. Raises RequestError."""
        self._steps.finish_all()
        try:
            self._executor.call("transfer_weights", "connect", dict(action.init_info))
        except ModelError as error:
            raise RequestError(str(error), parameter="init_info") from error

    def prepare(self, action: UpdateWeights) -> Callable[[], None]:
        """Check what can be checked, while requests still run. Return what replaces the weights
        when none do. Both raise RequestError if the weights stay, and EngineDeadError if they are
        incomplete."""
        self._steps.finish_all()
        if action.path is not None:
            with_errors = partial(_refusing, "path")
            path = action.path
            checkpoint = with_errors(lambda: self._describe(path))
            return partial(with_errors, lambda: self._read(checkpoint))
        with_errors = partial(_refusing, "update_info")
        info = dict(action.update_info or {})
        with_errors(lambda: self._executor.call("transfer_weights", "check", info))
        return partial(with_errors, lambda: self._receive(info))

    def _read(self, checkpoint: "Checkpoint") -> None:
        """Let all ranks read a checkpoint, or none."""
        try:
            self._executor.call("update_weights", checkpoint)
        except EngineDeadError:
            raise
        except Exception:
            self._executor.call("update_weights", None)
            self._restore()
            raise
        self._received = ""
        self._live.weights_changed(checkpoint.digest or os.urandom(16).hex())

    def _receive(self, info: Mapping[str, Any]) -> None:
        """Let all ranks take what the trainer sends, or none."""
        digest = os.urandom(16).hex()
        try:
            self._executor.call("transfer_weights", "receive", info, digest)
        except EngineDeadError:
            raise
        except Exception as error:
            if not self._restore():
                raise
            raise ModelError(
                f"{error} (the engine has read its last checkpoint again, and uses its weights)"
            ) from error
        self._received = digest
        self._live.weights_changed(digest)

    def _restore(self) -> bool:
        """Let all ranks read the last checkpoint, if one has lost its weights. Return whether one
        has."""
        if all(self._executor.call("transfer_weights", "has", self._received)):
            return False
        self._executor.call("transfer_weights", "restore")
        if self._received:
            self._received = ""
            self._live.weights_changed(os.urandom(16).hex())
        return True


def _refusing(parameter: str, call: Callable[[], Any]) -> Any:
    """Return the result. What is wrong with a model is an error of the request."""
    try:
        return call()
    except ModelError as error:
        raise RequestError(str(error), parameter=parameter) from error
