"""Kind `platform`: a device family. Chosen by probe; an explicit choice wins; a broken platform is never a silent CPU run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(Spec):
    """Entry-point name: the device family ("cpu", "cuda")."""


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


Trait = Literal["decode", "forward", "logits"]
"""What a recording computes, from which buffers, all over rows of the same step.

decode      one new token per request, a token wanted of each: ids, positions → hidden states, logits
forward     any step: ids, positions → hidden states
logits      hidden states → logits
"""


class Recording(Protocol):
    """One recorded call. size: the most rows it serves."""

    size: int

    def __call__(self, num_rows: int) -> "tuple[Tensor, ...]":
        """Compute on what the buffers hold now, and give the results' first num_rows rows. They are valid until any recording of
        the same `Replay` is called. Where `Replay.pads`, the buffers' other rows are computed too and hold harmless values."""


class Replay(Protocol):
    """Records what a rank computes once and replays it, without Python layer by layer. Recordings may share memory: one runs at a
    time. pads: a recording always computes all of its rows, so a step is padded up to the next larger size."""

    pads: bool

    def sizes(self, trait: Trait, largest: int) -> Sequence[int]:
        """The numbers of rows to record this trait for, ascending, none over `largest`; () = it runs eagerly."""

    def record(self, run: "Callable[..., tuple[Tensor, ...]]", inputs: "Sequence[Tensor]") -> Recording:
        """Record `run(*inputs)`: tensors whose first dimension are the rows and whose addresses stay. A recorder may run it, or
        call it with stand-ins for the inputs that only know their shapes. Raises CannotRecord that names the operation which
        cannot be recorded; anything else that `run` raises is passed on."""

    def reset(self) -> None:
        """Addresses that recordings point to have changed: all recordings are void, their memory is free."""


class Copies(Protocol):
    """Copies between the host and a device with separate memory, in order with the computation on the device. No call waits."""

    def host(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """Zeroed host memory that the device copies from by itself (pinned)."""

    def upload(self, source: "Tensor", target: "Tensor") -> None:
        """Copy a `host` tensor, or a part of one, to the device. It may not be written before a later `mark` was waited for."""

    def download(self, source: "Tensor") -> "Callable[[], Tensor]":
        """Copy a device tensor as it is now to the host; the callable waits for it."""

    def mark(self) -> "Callable[[], None]":
        """The callable waits until all copies so far are done."""


class Platform(Protocol):
    """One device family in one process. Built by the worker's process; `start` is called once before anything else."""

    def start(self, local_rank: int) -> Device:
        """Bind device, cores and the one thread pool. Cold. A second engine in the process must agree, else ConfigError."""

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """Current numbers; cold. `reset_peak` starts a new peak measurement after reading."""

    def zeros(self, num_bytes: int) -> "Tensor":
        """uint8 memory for the KV cache. Raises ConfigError when there is too little."""

    def copies(self) -> Copies | None:
        """None = the device computes in the host's memory, and nothing is copied."""

    def replay(self, programs: Callable[[], Replay] | None) -> Replay | None:
        """What this rank records with; None = every step runs eagerly. programs: makes the `Replay` of a kernel plugin for this
        platform, None when none is suitable."""

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """Settings this platform prefers, by `EngineConfig` field name (dtype, block_size, …). A user's value wins, and each
        default used is recorded with the platform's name. Without kv_cache_memory_bytes, the worker runs a step of the largest
        size at start and measures how much memory is left for the KV cache. checkpoint_dtype: torch name of the weights' main
        type, None when they are all quantized."""

    def profile(self, path: Path | None) -> None:
        """Start the device profiler writing below `path`, or stop it (None)."""
