"""Methods that users call on the workers: `collective_rpc`, and what `worker_extension_cls`
adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pegboard.errors import ConfigError, RequestError, did_you_mean
from pegboard.interfaces.executor import SERVING_CALLS
from pegboard.plugins.importing import import_object
from pegboard.plugins.registry import Registry
from pegboard.worker.worker import Worker, WorkerPlan


class OpenWorker(Worker):
    """A worker whose methods users may call. extension_methods: the names that an extension has
    added."""

    extension_methods: frozenset[str] = frozenset()

    def collective_rpc(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call `method(worker, …)`, or the worker's method of this name. Only SERVING_CALLS and
        methods of the extension can be named. Raises RequestError for others, and what the method
        raises."""
        if not isinstance(method, str):
            return method(self, *args, **kwargs)
        known = SERVING_CALLS | self.extension_methods
        if method not in known:
            advice = did_you_mean(method, known) or f"; they have {', '.join(sorted(known))}"
            message = (
                f"workers have no method {method[:60]!r}{advice}; worker_extension_cls adds methods"
            )
            raise RequestError(message, parameter="method")
        return getattr(self, method)(*args, **kwargs)


def make_worker(registry: Registry, plan: WorkerPlan, rank: int) -> Worker:
    """Return the worker of a rank, with the methods of the class that `worker_extension_cls` names.
    Raises ConfigError."""
    path = plan.config.worker_extension_cls
    return (_extended(path) if path else OpenWorker)(registry, plan, rank)


def _extended(path: str) -> type[Worker]:
    module, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and colon and name):
        raise ConfigError(
            f"worker_extension_cls {path!r} names no class; expected module:Class or module.Class"
        )
    try:
        found = import_object(f"{module}:{name}")
    except Exception as error:  # the import runs the user's code, which may raise anything
        raise ConfigError(
            f"worker_extension_cls {path!r} does not import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"worker_extension_cls {path!r} is of type {type(found).__name__}, expected a class"
        )
    names = [name for name in dir(found) if not name.startswith("__")]
    if taken := [name for name in names if hasattr(OpenWorker, name)]:
        raise ConfigError(
            f"worker_extension_cls {path!r} has {', '.join(taken)}, which the worker has too; "
            "choose other names"
        )
    public = frozenset(name for name in names if not name.startswith("_"))
    return type("ExtendedWorker", (OpenWorker, found), {"extension_methods": public})
