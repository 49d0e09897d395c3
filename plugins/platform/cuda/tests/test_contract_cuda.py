"""The platform passes the contract of its kind on a fake of torch.cuda, and the generic
contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pegboard_platform_cuda import platform as module
from pegboard_platform_cuda.graphs import GraphReplay
from pegboard_platform_cuda.platform import CUDAPlatform

from pegboard.errors import CannotRecord, ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_platform import PlatformContract
from pegboard_testing.fake_gpu import DEVICE, TOTAL_BYTES, FakeGPU, Tape


class FakeCUDAGraph:
    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for operator, args, kwargs, out in self.calls:
                again = operator(*args, **kwargs)
                if again.data_ptr() != out.data_ptr():
                    out.copy_(again)


@contextlib.contextmanager
def fake_capture(graph: FakeCUDAGraph, pool: object, stream: object) -> Iterator[None]:
    """As in torch: what waits for the device while it is captured raises RuntimeError."""
    gpu = FakeGPU.current
    assert gpu is not None and pool == "pool"
    gpu.is_capturing = True
    try:
        with Tape() as tape:
            yield
    except CannotRecord:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines") from None
    finally:
        gpu.is_capturing = False
    graph.calls = tape.calls  # type: ignore[attr-defined]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with FakeGPU() as gpu:

        def reset() -> None:
            gpu.peak_bytes = gpu.used_bytes

        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "set_device": lambda index: None,
            "mem_get_info": lambda: (TOTAL_BYTES - gpu.used_bytes, TOTAL_BYTES),
            "memory_reserved": lambda: gpu.used_bytes,
            "max_memory_reserved": lambda: max(gpu.peak_bytes, gpu.used_bytes),
            "reset_peak_memory_stats": reset,
            "empty_cache": lambda: None,
            "get_device_capability": lambda: (9, 0),
            "graph_pool_handle": lambda: "pool",
            "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": FakeCUDAGraph,
            "graph": fake_capture,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(module, "FAMILY", "privateuseone")
        monkeypatch.setattr(module, "pinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        threads = torch.get_num_threads()
        yield gpu
        torch.set_num_threads(threads)


def test_contract() -> None:
    check_entry(installed_entry("platform", "cuda"))


class TestCUDAPlatform(PlatformContract):
    @pytest.fixture(autouse=True)
    def _on(self, gpu: FakeGPU) -> None: ...

    def platform(self, setup: PlatformSetup) -> CUDAPlatform:
        return CUDAPlatform(None, setup)


def test_each_rank_needs_a_device(gpu: FakeGPU) -> None:
    with pytest.raises(
        ConfigError, match="rank 1 needs a CUDA device of its own, but only 1 are visible"
    ):
        CUDAPlatform(None, PlatformSetup()).start(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use a CUDA device: .*--device cpu"):
        CUDAPlatform(None, PlatformSetup()).start(0)


def test_too_little_memory_names_the_numbers_and_the_settings(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = CUDAPlatform(None, PlatformSetup())
    platform.start(0)

    def full(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ConfigError,
        match=r"2.00 GiB .* of 0.06 GiB free; lower gpu_memory_utilization, kv_cache_memory",
    ):
        platform.zeros(2**31)


def test_types_by_checkpoint_and_device(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CUDAPlatform(None, PlatformSetup())
    found = [
        platform.defaults(dtype)["dtype"] for dtype in ("float32", "bfloat16", None, "float16")
    ]
    assert found == ["bfloat16", "bfloat16", "bfloat16", "float16"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert platform.defaults("bfloat16")["dtype"] == "float16"


def test_sizes_of_graphs() -> None:
    replay = GraphReplay()
    assert replay.sizes("decode", 1) == [1] and replay.sizes("logits", 20) == [1, 2, 4, 8, 16, 20]
    assert replay.sizes("decode", 10_000)[-2:] == [504, 512] and replay.sizes("forward", 64) == ()


def test_all_recordings_use_one_stream(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream."""
    streams: list[object] = []

    def stream() -> object:
        streams.append(SimpleNamespace(wait_stream=lambda other: None))
        return streams[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    replay = GraphReplay()
    for size in (1, 2, 4):
        replay.record(lambda x: (x + 1,), [torch.zeros(size, device=DEVICE)])
    assert len(streams) == 1


def test_recordings_write_their_results_to_the_same_tensors(gpu: FakeGPU) -> None:
    """The largest is recorded first."""
    replay = GraphReplay()
    weight = torch.ones(2, 500, device=DEVICE)
    inputs = torch.arange(16.0, device=DEVICE).view(8, 2)
    largest = replay.record(lambda x: (x + 1, x @ weight), [inputs])
    small = [replay.record(lambda x: (x + 1, x @ weight), [inputs[:size]]) for size in (4, 2, 1)]
    for recording in (*small, largest):
        hidden, logits = recording(recording.size)
        assert hidden.data_ptr() == largest.outputs[0].data_ptr()
        assert logits.data_ptr() == largest.outputs[1].data_ptr()
        torch.testing.assert_close(hidden, inputs[: recording.size] + 1)
        torch.testing.assert_close(logits, inputs[: recording.size] @ weight)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in replay.results.values())
    assert kept == 8 * (2 + 500) * 4
    replay.reset()
    assert not replay.results
