"""Some cores of a CPU and a limit of memory. Everything that a platform must answer is here; what
depends on the machine is in `cpus.py` and `memory.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from pegboard.env import usable_cpus
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import Device, MemoryNumbers, PlatformSetup, Replay
from pegboard_platform_slice.cpus import numbers, share
from pegboard_platform_slice.memory import reset_peak as reset_resident_peak
from pegboard_platform_slice.memory import resident

if TYPE_CHECKING:
    from pegboard_platform_slice.options import SliceOptions

DEVICE = "cpu"
GIB = 1 << 30
HALVES = ("bfloat16", "float16")


class SlicePlatform:
    """All engines of a process have the same slice, because its threads are the same."""

    in_use: ClassVar[tuple[list[int], int] | None] = None
    """CPUs and number of threads of this process' engines."""
    base_bytes: ClassVar[int] = 0
    """What the process had taken before its first engine."""

    def __init__(self, options: SliceOptions, setup: PlatformSetup) -> None:
        self._cpus = numbers(options.cpus) or usable_cpus()
        self._num_threads = setup.num_threads
        self._ranks = setup.local_ranks
        self._total_bytes = int(options.memory_gib * GIB) // setup.local_ranks
        self._profiler: Any = None
        self._profile_path: Path | None = None

    def start(self, local_rank: int) -> Device:
        """Bind this thread, and so all threads that it will start, to the CPUs of the rank."""
        cpus = share(self._cpus, local_rank, self._ranks)
        num_threads = self._num_threads or len(cpus)
        if SlicePlatform.in_use is None:
            if missing := sorted(set(cpus) - set(usable_cpus())):
                raise ConfigError(
                    f"platform.slice.cpus: this process may not run on {missing}, only on "
                    f"{usable_cpus()}"
                )
            reset_resident_peak()
            SlicePlatform.base_bytes = resident()[0]
            SlicePlatform.in_use = (cpus, num_threads)
        elif SlicePlatform.in_use != (cpus, num_threads):
            raise ConfigError(
                f"{num_threads} threads on the CPUs {cpus} are wanted, but this process already "
                f"computes with {SlicePlatform.in_use[1]} on {SlicePlatform.in_use[0]}"
            )
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(num_threads)
        return Device(DEVICE, num_threads)

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """Return the numbers of the slice: what the process has taken since its first engine."""
        used, peak = (max(0, size - SlicePlatform.base_bytes) for size in resident())
        if reset_peak:
            reset_resident_peak()
        return MemoryNumbers(
            free_bytes=max(0, self._total_bytes - used),
            total_bytes=self._total_bytes,
            used_bytes=used,
            peak_bytes=peak,
        )

    def zeros(self, num_bytes: int) -> Tensor:
        """Refuse what is over the limit. Pages are written, so that they count from now on."""
        numbers = self.memory()
        if num_bytes > numbers.free_bytes:
            asked = f"{num_bytes / GIB:.2f} GiB"
            advice = "raise platform.slice.memory_gib or lower kv_cache_memory_bytes"
            raise ConfigError(numbers.shortage("the KV cache does", asked, advice))
        return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE).zero_()

    def copies(self) -> None:
        """Return None: the host computes, so nothing is copied."""

    def replay(self, programs: Callable[[], Replay] | None) -> Replay | None:
        """Return the recorder of a kernel plugin for CPUs, if there is one."""
        return programs() if programs is not None else None

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """kv_cache_memory_bytes is not among them, so the worker measures what is left of the
        slice."""
        return {
            "dtype": checkpoint_dtype if checkpoint_dtype in HALVES else "float32",
            "block_size": 16,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
        }

    def profile(self, path: Path | None) -> None:
        if path is not None:
            self._profiler = torch.profiler.profile()
            self._profile_path = path
            self._profiler.start()
        elif self._profiler is not None and self._profile_path is not None:
            self._profiler.stop()
            self._profile_path.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._profile_path / "trace.json"))
            self._profiler = None
