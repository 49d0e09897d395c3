"""A fake of torch.cuda with one device, on the GPU of `fake_gpu`: for tests of platforms of GPUs.

with fake_torch_cuda(monkeypatch, pegboard_gpus.platform) as gpu:
    platform.start(0)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard_testing.fake_driver import install_driver
from pegboard_testing.fake_gpu import TOTAL_BYTES, FakeGPU, Tape


class FakeCUDAGraph:
    """A graph that runs its operators again."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._tape = Tape()

    def capture_begin(self, pool: object) -> None:
        gpu = FakeGPU.current
        assert gpu is not None and pool == "pool" and not gpu.is_capturing
        gpu.is_capturing = True
        self._tape.__enter__()

    def capture_end(self) -> None:
        gpu = FakeGPU.current
        assert gpu is not None and gpu.is_capturing
        self._tape.__exit__(None, None, None)
        gpu.is_capturing = False
        gpu.captured_bytes = 0
        self.calls = self._tape.calls

    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for operator, args, kwargs, out in self.calls:
                again = operator(*args, **kwargs)
                if again.data_ptr() != out.data_ptr():
                    out.copy_(again)


def not_permitted(reason: str) -> RuntimeError:
    """As in torch: what waits for the device while it is captured raises RuntimeError."""
    return RuntimeError(f"operation not permitted when stream is capturing\n{reason}")


@contextlib.contextmanager
def fake_torch_cuda(
    monkeypatch: pytest.MonkeyPatch, platform: ModuleType, **more: Any
) -> Iterator[FakeGPU]:
    """Replaces functions of torch.cuda, and what `platform` (the module pegboard_gpus.platform)
    takes from torch. more: further functions by name."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with FakeGPU() as gpu:
        gpu.refusal = not_permitted

        def reset() -> None:
            gpu.peak_bytes = gpu.used_bytes

        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "set_device": lambda index: None,
            "current_device": lambda: 0,
            "mem_get_info": lambda: (TOTAL_BYTES - gpu.used_bytes, TOTAL_BYTES),
            "memory_reserved": lambda: gpu.used_bytes,
            "max_memory_reserved": lambda: max(gpu.peak_bytes, gpu.used_bytes),
            "reset_peak_memory_stats": reset,
            "empty_cache": lambda: None,
            "graph_pool_handle": lambda: "pool",
            "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": FakeCUDAGraph,
            "synchronize": lambda: None,
            **more,
        }
        install_driver(monkeypatch, gpu)
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

        def record_stream(tensor: Tensor, stream: Any) -> None:
            gpu.uses.append((tensor.data_ptr(), stream))

        monkeypatch.setattr(Tensor, "record_stream", record_stream)
        monkeypatch.setattr(platform, "FAMILY", "privateuseone")
        monkeypatch.setattr(
            platform, "pinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype)
        )
        threads = torch.get_num_threads()
        try:
            yield gpu
        finally:
            torch.set_num_threads(threads)
