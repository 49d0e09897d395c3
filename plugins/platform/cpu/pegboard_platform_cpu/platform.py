"""The CPU platform: one thread pool per process, and memory numbers from the operating system.

torch is imported when it is needed.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.env import compute_threads, usable_cpus
from pegboard.errors import ConfigError
from pegboard.interfaces.platform import Device, MemoryNumbers, PlatformSetup, Replay
from pegboard.log import get_logger
from pegboard_platform_cpu.quota import cpu_quota, within_quota
from pegboard_platform_cpu.release import release
from pegboard_platform_cpu.topology import interleave, memory_nodes, num_cores

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)

PAGE = os.sysconf("SC_PAGE_SIZE")
GIB = 1024**3
KV_CACHE_LIMIT = 4 * GIB
KV_CACHE_SHARE = 0.4
UNLIMITED = 1 << 60
"""cgroup v1 writes a number of about 2^63 for "no limit"."""
KERNELS_ADVICE = "pip install pegboard-kernel-cpu (it needs a C compiler)"
ACTIVATIONS = "float32"
"""The type between products with weights. All kernels, the attention and the recorder know it."""
HALVES = ("bfloat16", "float16")
BLOCK_SIZE = 16
BATCHED_TOKENS = 512
"""With compiled kernels, prompts are computed as fast as with 2048, and running requests wait only
a quarter as long for them."""


class CPUPlatform:
    """All ranks of a process share the same cores. The processes of a host divide its cores."""

    threads_in_use: int | None = None

    def __init__(self, options: None, setup: PlatformSetup) -> None:
        default = within_quota(num_cores(usable_cpus()), cpu_quota())
        self.local_ranks = setup.local_ranks
        share = max(1, default // setup.local_ranks)
        self.num_threads = setup.num_threads or compute_threads(share)
        self.profiler: Any = None
        self.profile_path: Path | None = None

    def start(self, local_rank: int) -> Device:
        import torch

        used = CPUPlatform.threads_in_use
        if used is not None and used != self.num_threads:
            raise ConfigError(
                f"num_threads={self.num_threads}, but this process already computes with {used} "
                "threads"
            )
        if used is None:
            spread_memory()
        CPUPlatform.threads_in_use = self.num_threads
        torch.set_num_threads(self.num_threads)
        return Device("cpu", self.num_threads, activations=ACTIVATIONS)

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        """`free` is the memory that the system, and the limit of a container, can provide without
        swapping; each rank of the host has a share of that, and of the total. The peak cannot be
        reset, because it is that of the whole process."""
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        if (contained := container_memory()) is not None:
            limit, taken = contained
            total = min(total, limit)
            free = max(0, min(free, limit - taken))
        used = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ranks = self.local_ranks
        return MemoryNumbers(free // ranks, total // ranks, used, max(peak, used))

    def zeros(self, num_bytes: int) -> "torch.Tensor":
        """Return new private pages. They take memory only when they are written."""
        import torch

        try:
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the KV cache does not fit: there is no memory for a part of {num_bytes} bytes "
                f"({error}); lower kv_cache_memory_bytes"
            ) from error
        return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)

    def releasable(self, part: str, host_bytes: int = 0) -> AbstractContextManager[object]:
        """Any memory can be released, and all of it is the host's."""
        if host_bytes:
            raise ConfigError(
                "cpu_offload_gb: on a CPU, all weights are in the host's memory; remove the setting"
            )
        return nullcontext()

    def release(self, tensors: "Sequence[torch.Tensor]", *, keep: bool) -> Callable[[], None]:
        """Drop the pages, as `pegboard_platform_cpu.release` says."""
        return release(tensors, keep=keep)

    def copies(self) -> None:
        """Return None, because the host computes."""

    def replay(self, programs: Callable[[], Replay] | None) -> Replay | None:
        """Return the recorder of a kernel plugin, if there is one. A CPU has no graphs to
        capture."""
        if programs is None and find_spec("pegboard_kernel_cpu") is None:
            log.warning(
                (
                    "the model runs in plain torch, several times slower than with compiled "
                    "kernels: %s"
                ),
                KERNELS_ADVICE,
            )
        return programs() if programs is not None else None

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """dtype is the checkpoint's. Adapters of packed weights, whose checkpoint names no type,
        are in bfloat16: that takes half the time to read, and rounds less than such weights. The KV
        cache gets 4 GiB or 40 % of the free memory, whichever is less, divided among the ranks. The
        system allocates it only as blocks are used."""
        return {
            "dtype": checkpoint_dtype if checkpoint_dtype in HALVES else "float32",
            "lora_dtype": "bfloat16" if checkpoint_dtype is None else "auto",
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 128,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "max_in_flight": 2,
            "kv_cache_memory_bytes": int(
                min(KV_CACHE_LIMIT / self.local_ranks, KV_CACHE_SHARE * self.memory().free_bytes)
            ),
        }

    def profile(self, path: Path | None) -> None:
        import torch

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


def spread_memory() -> None:
    """If the threads may run on several nodes, take memory from all of them in turn. Weights would
    otherwise lie on the node whose CPU loads them, and all threads would wait for its memory."""
    nodes = memory_nodes(usable_cpus())
    if len(nodes) < 2:
        return
    if interleave(nodes):
        log.info("memory is taken from the nodes %s in turn", nodes)
    else:
        log.warning(
            (
                "this process may run on the nodes %s, but the system does not let it spread its "
                "memory over them; numactl --cpunodebind and --membind keep it on one"
            ),
            nodes,
        )


def container_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return the memory limit of this process' container and what it has taken, in bytes, or None
    if there is no limit. Pages of files that were not used lately do not count, because the system
    takes them back. root: where a container sees its own group (cgroup v2, or v1 below memory/)."""
    for limit, taken, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            text = (root / limit).read_text().strip()
            used = int((root / taken).read_text())
            fields = dict(
                line.split()
                for line in (root / limit).with_name("memory.stat").read_text().splitlines()
            )
        except OSError:
            continue
        return (
            None
            if text == "max" or int(text) >= UNLIMITED
            else (int(text), used - int(fields.get(inactive, 0)))
        )
    return None
