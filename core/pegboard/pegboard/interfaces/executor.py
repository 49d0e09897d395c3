"""Kind `executor`: runs one batch on every rank. Implementations: in-process, multi-process, Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from pegboard.data.batch import Batch, StepOutput, TokenMasks
    from pegboard.interfaces.attention import KVCacheSpec


START_CALLS = frozenset({"allocate", "warm_up"})
"""Worker methods that `Executor.call` may name before the first step."""

SERVING_CALLS = frozenset({"memory", "profile"})
"""Worker methods that it may name between steps as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(Spec):
    """supports: `world_size` (a set or AtMost)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorNeed(Need):
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    """make_worker(rank) builds core's worker for a rank in the calling process. worker_plan: picklable; in a child process
    `worker_plan.make_worker(rank)` builds the same worker."""

    world_size: int
    make_worker: Callable[[int], "WorkerLike"]
    worker_plan: Any


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A rank after loading: KV specs by layer index, the bytes it can give to the KV cache, and those its weights take."""

    rank: int
    kv_specs: dict[int, "KVCacheSpec"]
    kv_memory_bytes: int
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A rank is gone: why, and its traceback when there is one."""

    rank: int
    reason: str


class WorkerLike(Protocol):
    """Core's worker as an executor sees it."""

    def load(self) -> WorkerReady: ...

    def run(self, batch: "Batch", masks: "Callable[[], TokenMasks] | None") -> "Callable[[], StepOutput]":
        """Compute a step, or start it on a device that computes by itself. The callable waits for the result; the next step
        may be run before it is called."""

    def call(self, method: str, *args: object) -> object:
        """A method named in START_CALLS or SERVING_CALLS. ConfigError for any other."""

    def stop(self) -> None: ...


class StepFuture(Protocol):
    """The result of a submitted step."""

    def result(self) -> "StepOutput":
        """Wait for the step. Raises what the step raised."""


class Executor(Protocol):
    """Owned by the engine; called from its thread only."""

    def start(self) -> list[WorkerReady]:
        """Bring all ranks up and load the model. Cold, once. Raises ModelError, ConfigError or PluginError."""

    def submit(self, batch: "Batch") -> StepFuture:
        """Start a step, in order; several may be in flight. Hot. An executor in the engine's process may compute here, or in
        `StepFuture.result` when the batch needs masks."""

    def provide_masks(self, step: int, masks: "TokenMasks") -> None:
        """Grammar masks of a submitted step whose batch has `needs_masks`; its sampler waits for them."""

    def call(self, method: str, *args: object) -> list[object]:
        """Control plane between steps: run a worker method on all ranks; results in rank order."""

    def watch(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """`on_death` is called at most once, from any thread, when a rank dies outside a step."""

    def stop(self) -> None:
        """Idempotent; leaves no process and no socket."""
