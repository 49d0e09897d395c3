"""Kind `platform`: a device family. Chosen by probe; an explicit choice wins; a broken platform is never a silent CPU run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(Spec):
    """Entry-point name: the device family ("cpu", "cuda")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformNeed(Need):
    pass


@dataclass(frozen=True, slots=True)
class PlatformSetup:
    """num_threads: compute threads wanted by the user; None = the platform decides."""

    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """name: torch device string of this rank, "cpu" or "cuda:0". num_threads: compute threads of this process."""

    name: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class MemoryNumbers:
    """Bytes on the device: free now, total, used by this process, and the most it used since the last reset."""

    free_bytes: int
    total_bytes: int
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a platform may look at to give defaults."""

    checkpoint_dtype: str | None
    architecture: str
    num_layers: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """Size class of a step for recording: tokens and rows after padding, and the traits a recording is bound to."""

    num_tokens: int
    num_rows: int
    traits: frozenset[str] = frozenset()


class GraphRunner(Protocol):
    """Records the forward once and replays it (W; provisional). A platform without replay returns an empty ladder."""

    def ladder(self, max_tokens: int, max_rows: int) -> list[StepShape]:
        """Shapes to capture at start-up; [] = run eagerly."""

    def capture(self, shape: StepShape, run: "Callable[[], Tensor]") -> str | None:
        """Record `run` over persistent buffers; the reason when it cannot be recorded."""

    def find(self, shape: StepShape) -> StepShape | None:
        """Smallest captured shape that covers `shape` with the same traits; None = run eagerly."""

    def replay(self, shape: StepShape) -> "Tensor":
        """Hidden states [padded tokens, hidden]."""

    def reset(self) -> None:
        """Addresses changed: forget all recordings."""


class Platform(Protocol):
    """One device family in one process. Built by the worker's process; `start` is called once before anything else."""

    def start(self, local_rank: int) -> Device:
        """Bind device, cores and the one thread pool. Cold. A second engine in the process must agree, else ConfigError."""

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """Current numbers; cold. `reset_peak` starts a new peak measurement after reading."""

    def pool(self, tag: str) -> Any:
        """Context manager whose allocations belong to `tag` ("weights", "kv", "work") and can be released and restored at
        the same addresses (sleep). A platform without this returns a null context."""

    def graph_runner(self) -> GraphRunner:
        """The recorder of this rank; called once after weights are bound."""

    def defaults(self, facts: ModelFacts) -> Mapping[str, object]:
        """Settings this platform prefers for the model, by `EngineConfig` field name (dtype, block_size, …); a user's value
        wins, and each default used is recorded with the platform's name."""

    def profile(self, path: Path | None) -> None:
        """Start the device profiler writing below `path`, or stop it (None)."""
