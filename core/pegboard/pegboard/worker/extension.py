"""Workers with the methods of `worker_extension_cls`."""

from __future__ import annotations

from pegboard.errors import ConfigError
from pegboard.interfaces.executor import Place
from pegboard.plugins.importing import import_object
from pegboard.plugins.registry import Registry
from pegboard.worker.worker import Worker, WorkerPlan


def make_worker(registry: Registry, plan: WorkerPlan, place: Place) -> Worker:
    """Return the worker of a rank, with the methods of the class that `worker_extension_cls` names.
    Raises ConfigError."""
    path = plan.config.worker_extension_cls
    return (_extended(path) if path else Worker)(registry, plan, place)


def _extended(path: str) -> type[Worker]:
    module, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and colon and name):
        raise ConfigError(
            f"worker_extension_cls {path!r} names no class; expected module:Class or module.Class"
        )
    try:
        extension = import_object(f"{module}:{name}")
    except Exception as error:  # the import runs the user's code, which may raise anything
        raise ConfigError(
            f"worker_extension_cls {path!r} does not import: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(extension, type):
        raise ConfigError(
            f"worker_extension_cls {path!r} is of type {type(extension).__name__}, expected a class"
        )
    names = [name for name in dir(extension) if not name.startswith("__")]
    if taken := [name for name in names if hasattr(Worker, name)]:
        raise ConfigError(
            f"worker_extension_cls {path!r} has {', '.join(taken)}, which the worker has too; "
            "choose other names"
        )
    public = frozenset(name for name in names if not name.startswith("_"))
    return type("ExtendedWorker", (Worker, extension), {"extension_methods": public})
