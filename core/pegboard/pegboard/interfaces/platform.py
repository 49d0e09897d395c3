"""Kind `platform`: a device family. It is chosen by probe, and an explicit choice wins. If the
chosen platform is broken, Pegboard never silently uses the CPU instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(Spec):
    """Entry-point name: the device family ("cpu", "cuda"). flags: "device" = an Ok of its probe
    means that a device of its own is there; the platform then comes before those that compute on
    the host's processor. runs: other families whose plugins also run on this platform ("cpu", if
    its devices are torch's CPU)."""

    FLAGS = frozenset({"device"})

    runs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlatformSetup:
    """num_threads: compute threads of each rank that the user wants; None = the platform decides.
    local_ranks: how many ranks share this host."""

    num_threads: int | None = None
    local_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Device:
    """name: torch device string of this rank, "cpu" or "cuda:0". num_threads: compute threads of
    this process. fixed_tokens: the part of a step's time that does not depend on its tokens, as the
    number of tokens that would take as long. activations: torch name of the type that it computes
    in between the products with weights; None = the type of the weights (`dtype`)."""

    name: str
    num_threads: int
    fixed_tokens: float = 1.0
    activations: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryNumbers:
    """Memory on the device, in bytes: free now, total, used by this process, and the most that it
    has used since the last reset."""

    free_bytes: int
    total_bytes: int
    used_bytes: int
    peak_bytes: int

    def shortage(self, what: str, asked: str, advice: str) -> str:
        """Return the message of an error: something does not fit. asked: how much the part needs
        that was asked for last. advice: the settings that help."""
        return (
            f"{what} not fit: a part of {asked} was asked for, and the device has "
            f"{self.free_bytes / 2**30:.2f} of {self.total_bytes / 2**30:.2f} GiB free; {advice}"
        )


Trait = Literal["decode", "forward", "logits", "verify"]
"""What a recording computes. All its buffers have one row for each token of the step.

decode      a step whose tokens all need logits, recorded with one token per request:
            ids, the other inputs of `Model.embed`, positions → hidden states, logits
verify      the same, recorded with the most drafts of each request beside its token
forward     any step: rows that `Model.embed` returns, positions → hidden states
logits      hidden states → logits

A step with drafts may run in either of the first two. If the model hands out hidden states
(`Build.taps`), these follow the results of the first three.
"""


class Recording(Protocol):
    """One recorded call. size: the largest number of rows that it serves."""

    size: int

    def __call__(self, num_rows: int) -> "tuple[Tensor, ...]":
        """Compute from the current contents of the buffers, and return the first num_rows rows of
        the results. They are valid until any recording of the same `Replay` is called. If
        `Replay.pads`, the other rows of the buffers are also computed, and hold harmless values."""


class Replay(Protocol):
    """Records what a rank computes once, and replays it without running Python for each layer.
    Recordings may share memory, because only one runs at a time. pads: a recording always computes
    all of its rows, so a step is padded to the next larger size. Otherwise it serves every smaller
    step, however its tokens belong to requests."""

    pads: bool

    def sizes(self, trait: Trait, largest: int) -> Sequence[int]:
        """Return the numbers of rows to record this trait for, in ascending order, none above
        `largest`. With (), the trait runs eagerly. For "verify", the caller rounds them down to
        whole requests."""

    def record(
        self, run: "Callable[..., tuple[Tensor, ...]]", inputs: "Sequence[Tensor]"
    ) -> Recording:
        """Record `run(*inputs)`. The inputs are tensors whose first dimension is the rows and whose
        addresses do not change. A recorder may run the function, or call it with stand-ins for the
        inputs, which only know their shapes. Raises CannotRecord, which names the operation that
        cannot be recorded. Raises NoRoom if the device has no memory left to run or to record it.
        Any other exception of `run` is passed on."""

    def reset(self) -> None:
        """Discard all recordings and free their memory. Called because addresses that they use have
        changed."""


class PiecewiseReplay(Protocol):
    """An optional addition to the Replay: it can leave calls out of a recording, which then
    consists of the pieces between them."""

    def outside(self, call: "Callable[..., Tensor]", width: int) -> "Callable[..., Tensor]":
        """Return what a `run` that is recorded calls in place of `call`. What `call` is given has
        one row for each token, or is None, and what it returns is [rows, width], in the type of its
        first argument. To record, it is not called. A replay calls it between two pieces, with only
        those rows that the replay was asked for."""


class Copies(Protocol):
    """Copies between the host and a device with separate memory. They are in order with the
    computation on the device. No call waits."""

    def host(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """Return zeroed, pinned host memory, which the device can copy from by itself."""

    def upload(self, source: "Tensor", target: "Tensor") -> None:
        """Copy a `host` tensor, or a part of one, to the device. The tensor may not be written
        again until a later `mark` was waited for."""

    def download(self, source: "Tensor") -> "Callable[[], Tensor]":
        """Copy the current contents of a device tensor to the host. The callable waits for the copy
        and returns it."""

    def mark(self) -> "Callable[[], None]":
        """Return a callable that waits until all copies so far are done."""


@runtime_checkable
class SideCopies(Protocol):
    """An optional addition to the Copies: rows that are copied beside the computation, while it
    goes on. They are in order with each other. No call waits."""

    def store(self, rows: "Tensor", targets: "Sequence[Tensor]") -> None:
        """Copy the rows of a device tensor to parts of `Copies.host` tensors, one each, as soon as
        they are computed. The rows may not be changed afterwards. Only `load` may read the
        targets."""

    def load(self, sources: "Sequence[Tensor]") -> "Tensor":
        """Return parts of `Copies.host` tensors as the rows of a new device tensor. What is
        computed from now on waits for them, and what was started before does not hold them up."""


class Platform(Protocol):
    """One device family in one process. The worker's process builds it and calls `start` once,
    before anything else."""

    def start(self, local_rank: int) -> Device:
        """Bind the device, the cores and the one thread pool. Cold. A second engine in the process
        must use the same, else ConfigError."""

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """Return the current numbers. Cold. `reset_peak` starts a new peak measurement after
        reading, and gives back memory that nothing uses.

        If kv_cache_memory_bytes is not set, they say how large the KV cache is. With the weights
        loaded, the worker resets the peak, runs a step of the largest size and asks again. The
        cache gets total · gpu_memory_utilization − peak − what other processes use, which is total
        − free − used, and less where requests hold memory of their own or steps are recorded. A
        platform with a limit of its own returns it as the total.
        """

    def zeros(self, num_bytes: int) -> "Tensor":
        """Return zeroed uint8 memory for the KV cache. Raises ConfigError if there is too
        little."""

    def copies(self) -> Copies | None:
        """Return the copies of this device, or None if it computes in the host's memory and nothing
        needs to be copied."""

    def replay(self, programs: Callable[[], Replay] | None) -> Replay | None:
        """Return what this rank records with, or None if every step runs eagerly. programs: makes
        the `Replay` of a kernel plugin for this platform. It is None if no such plugin is
        suitable."""

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """Return settings that this platform prefers, by `EngineConfig` field name (dtype,
        block_size, …). A user's value wins. Each default that is used is recorded with the
        platform's name. One for kv_cache_memory_bytes spares the measurement (see `memory`).
        checkpoint_dtype: `Checkpoint.dtype`."""

    def profile(self, path: Path | None) -> None:
        """Start the device profiler, which writes below `path`. If `path` is None, stop it."""


class ReleasingPlatform(Protocol):
    """An optional addition to the Platform: it can give memory back while the engine sleeps."""

    def releasable(self, part: str, host_bytes: int = 0) -> AbstractContextManager[object]:
        """Return a context. `release` gives the memory back that this thread allocates on the
        device inside. Memory of different parts ("weights", "kv_cache") is apart. The first
        host_bytes of a part are in the host's memory, where the device reads them; they are not
        given back. Raises ConfigError if the device cannot do this."""

    def release(self, tensors: "Sequence[Tensor]", *, keep: bool) -> "Callable[[], None]":
        """Give the memory of these tensors back. Their addresses stay reserved. Call the returned
        function before they are used again: it brings back their contents if `keep`, else they are
        zero or what they were when the memory was mapped. Raises ConfigError, before anything has
        changed, if the contents cannot be kept."""
