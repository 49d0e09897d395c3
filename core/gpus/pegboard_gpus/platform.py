"""One device of torch.cuda per rank, with memory numbers from torch's allocator and the driver."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pegboard.env import compute_threads
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import Device, MemoryNumbers, PlatformSetup, Replay
from pegboard_gpus.driver import Driver, DriverError
from pegboard_gpus.graphs import GraphReplay
from pegboard_gpus.virtual_memory import Segments, VirtualMemory

FAMILY = "cuda"
"""torch's name for these devices, also in a torch for ROCm."""
LARGE_DEVICE = 70 * 2**30
"""Bytes of memory from which larger steps are the default."""
FIXED_TOKENS = 64.0
"""An estimate: decoding reads all weights, whatever the number of tokens."""


def check_allocator(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if torch's allocator is set to take memory from nowhere else."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                "enable_sleep_mode and cpu_offload_gb do not work with expandable segments of "
                f"torch; remove expandable_segments from {name}"
            )


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeroed host memory that the device can copy from and to by itself."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


class GPUCopies:
    """See `pegboard.interfaces.platform.Copies` and `SideCopies`. All copies but those of `store`
    and `load` are on the stream that computes. The allocators of torch are told which memory the
    other stream uses, so it is not given away too early."""

    def __init__(self) -> None:
        self._side: Any = None

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pinned(shape, dtype)

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        host = pinned(tuple(source.shape), source.dtype)
        host.copy_(source, non_blocking=True)
        wait = self.mark()

        def result() -> Tensor:
            wait()
            return host

        return result

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def store(self, rows: Tensor, targets: Sequence[Tensor]) -> None:
        side = self._side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for row, target in zip(rows, targets, strict=True):
                target.copy_(row, non_blocking=True)
        rows.record_stream(side)

    def load(self, sources: Sequence[Tensor]) -> Tensor:
        side = self._side_stream()
        first = sources[0]
        with torch.cuda.stream(side):
            device = f"{FAMILY}:{torch.cuda.current_device()}"
            rows = torch.empty(len(sources), *first.shape, dtype=first.dtype, device=device)
            for row, source in zip(rows, sources, strict=True):
                row.copy_(source, non_blocking=True)
        computing = torch.cuda.current_stream()
        computing.wait_stream(side)
        rows.record_stream(computing)
        return rows

    def _side_stream(self) -> Any:
        if self._side is None:
            self._side = torch.cuda.Stream()
        return self._side


class GPUPlatform(ABC):
    """See `pegboard.interfaces.platform.Platform`. Rank i of this machine computes on the i-th
    visible device. kind: how messages call a device. repair: what to do if torch finds none.
    driver: reserves addresses."""

    kind: ClassVar[str]
    repair: ClassVar[str]
    driver: ClassVar[type[Driver]]

    def __init__(self, options: None, setup: PlatformSetup) -> None:
        self.num_threads = setup.num_threads or compute_threads()
        self.profiler: Any = None
        self.profile_path: Path | None = None
        self.virtual: VirtualMemory | None = None

    @abstractmethod
    def has_bfloat16(self) -> bool:
        """Whether the device of this rank computes products in bfloat16 at full speed."""

    def is_usable(self) -> bool:
        """Whether torch can use a device of this kind."""
        return torch.cuda.is_available()

    def start(self, local_rank: int) -> Device:
        if not self.is_usable():
            raise ConfigError(
                f"torch {torch.__version__} cannot use a {self.kind} device: {self.repair}, or "
                "choose --device cpu"
            )
        if local_rank >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"rank {local_rank} needs a {self.kind} device of its own, but only {count} are "
                "visible"
            )
        self.device = f"{FAMILY}:{local_rank}"
        torch.cuda.set_device(local_rank)
        torch.set_num_threads(self.num_threads)
        return Device(self.device, self.num_threads, FIXED_TOKENS)

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """`used` is what torch's allocator holds. Before a new peak is measured, it gives back what
        no tensor uses. An engine that was stopped has reference cycles, so these are collected
        first."""
        free, total = torch.cuda.mem_get_info()
        numbers = MemoryNumbers(
            free, total, torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
        )
        if reset_peak:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return numbers

    def zeros(self, num_bytes: int) -> Tensor:
        """Raises ConfigError with the numbers if the memory is not there."""
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            advice = "lower gpu_memory_utilization, kv_cache_memory_bytes or max_num_batched_tokens"
            asked = f"{num_bytes / 2**30:.2f} GiB"
            message = self.memory().shortage("the KV cache does", asked, advice)
            raise ConfigError(message) from error

    def releasable(self, part: str, host_bytes: int = 0) -> AbstractContextManager[object]:
        """The number of the device is torch's, which is also the driver's."""
        if self.virtual is None:
            check_allocator(os.environ)
            torch.cuda.mem_get_info()  # the driver has a context in this thread now
            device = torch.cuda.current_device()
            try:
                segments = Segments(self.driver.load(), device)
            except (OSError, AttributeError, DriverError) as error:
                raise ConfigError(
                    "enable_sleep_mode and cpu_offload_gb need a device with virtual memory, and "
                    f"{self.device} has none ({error}); remove the setting"
                ) from error
            self.virtual = VirtualMemory(segments, pinned)
        return self.virtual.pool(part, host_bytes)

    def release(self, tensors: Sequence[Tensor], *, keep: bool) -> Callable[[], None]:
        """Of the memory that was taken inside of `releasable`."""
        if self.virtual is None:
            raise ConfigError("no memory of this engine can be released; set enable_sleep_mode")
        torch.cuda.mem_get_info()
        return self.virtual.release(tensors, keep=keep)

    def copies(self) -> GPUCopies:
        return GPUCopies()

    def replay(self, programs: Callable[[], Replay] | None) -> GraphReplay:
        return GraphReplay()

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """dtype is float16 for checkpoints in float16 and on devices without bfloat16; otherwise
        bfloat16."""
        is_float16 = checkpoint_dtype == "float16" or not self.has_bfloat16()
        is_large = torch.cuda.mem_get_info()[1] >= LARGE_DEVICE
        return {
            "dtype": "float16" if is_float16 else "bfloat16",
            "block_size": 16,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192 if is_large else 2048,
            "max_in_flight": 2,
        }

    def profile(self, path: Path | None) -> None:
        if path is not None:
            self.profiler = torch.profiler.profile()
            self.profile_path = path
            self.profiler.start()
        elif self.profiler is not None:
            self.profiler.stop()
            assert self.profile_path is not None
            self.profile_path.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.profile_path / "trace.json"))
            self.profiler = None
