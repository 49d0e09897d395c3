"""Memory that is released while its addresses stay, on fakes of drivers and of torch's pools."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard_gpus import platform as module
from pegboard_gpus.driver import Access, CUDADriver, Driver, DriverError, HIPDriver, Properties
from pegboard_gpus.platform import GPUPlatform
from pegboard_gpus.virtual_memory import Segments, common, gaps, merged
from pegboard_testing.fake_driver import (
    GRANULARITY,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    FakeLibrary,
    install_driver,
)
from pegboard_testing.fake_gpu import DEVICE, TOTAL_BYTES, FakeGPU
from pegboard_testing.fake_torch_cuda import fake_torch_cuda

MIB = 2**20
SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5)


class AnyPlatform(GPUPlatform):
    kind = "fast"
    repair = "buy one"
    driver = CUDADriver

    def has_bfloat16(self) -> bool:
        return False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    with fake_torch_cuda(monkeypatch, module) as gpu:
        yield gpu


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU) -> FakeLibrary:
    return install_driver(monkeypatch, gpu)


@pytest.fixture
def platform(library: FakeLibrary) -> AnyPlatform:
    platform = AnyPlatform(None, PlatformSetup())
    platform.start(0)
    return platform


def test_structures_are_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(Properties) == 32 and Properties.location.offset == 8
    assert Properties.win32_metadata.offset == 16 and Properties.flags.offset == 24
    assert ctypes.sizeof(Access) == 12 and Access.flags.offset == 8


@pytest.mark.parametrize("kind", [CUDADriver, HIPDriver])
def test_both_drivers(library: FakeLibrary, gpu: FakeGPU, kind: type[Driver]) -> None:
    driver = kind.load()
    size = driver.granularity(0)
    address = driver.reserve(size)
    handle = driver.create(size, 0)
    assert gpu.used_bytes == size == GRANULARITY
    driver.map(address, size, handle, 0)
    driver.clear(address, size)
    host = torch.arange(4, dtype=torch.uint8)
    driver.upload(address + 2, host.data_ptr(), 4)
    back = torch.zeros(8, dtype=torch.uint8)
    driver.download(back.data_ptr(), address, 8)
    assert back.tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    driver.synchronize()
    driver.unmap(address, size)
    driver.release(handle)
    driver.free(address, size)
    assert gpu.used_bytes == 0
    with pytest.raises(DriverError, match=f"{kind.prefix}MemCreate: out of memory") as caught:
        driver.create(2 * TOTAL_BYTES, 0)
    assert caught.value.status == OUT_OF_MEMORY


def test_the_fake_refuses_what_drivers_refuse(library: FakeLibrary) -> None:
    driver = CUDADriver.load()
    size = driver.granularity(0)
    address = driver.reserve(size)
    handle = driver.create(size, 0)
    refused = pytest.raises(DriverError, match="invalid argument")
    with refused:
        driver.reserve(size + 1)
    with refused:
        driver.create(size - 512, 0)
    with refused:
        driver.clear(address, size)
    with refused:
        driver.map(address + 512, size, handle, 0)
    driver.map(address, size, handle, 0)
    with refused:
        driver.map(address, size, handle, 0)
    with refused:
        driver.release(handle)
    with refused:
        driver.free(address, size)
    with refused:
        driver.upload(address, handle, size + 1)
    driver.unmap(address, size)
    with refused:
        driver.unmap(address, size)
    driver.release(handle)
    with refused:
        driver.release(handle)


def test_memory_without_access_is_not_left_mapped(library: FakeLibrary, gpu: FakeGPU) -> None:
    memory = Segments(CUDADriver.load(), 0)
    library.failures["MemSetAccess"] = INVALID_VALUE
    with pytest.raises(DriverError, match="cuMemSetAccess: invalid argument"):
        memory.allocate(1)
    assert not library.ranges and not library.handles and gpu.used_bytes == 0


@pytest.mark.parametrize("keep", [True, False])
def test_other_memory_of_a_segment_keeps_its_contents(
    platform: AnyPlatform, gpu: FakeGPU, keep: bool
) -> None:
    """All are in one segment. The views, too, are at the same addresses."""
    with platform.releasable("weights"):
        weight = torch.arange(5000.0, device=DEVICE).view(50, 100)
        table = torch.arange(3000.0, device=DEVICE) + 1
        other = torch.ones(7, device=DEVICE) * 3
    views = [weight.T, weight[3:], table[5:]]
    before = [tensor.clone() for tensor in (*views, other)]
    places = [tensor.data_ptr() for tensor in views]
    used = gpu.used_bytes
    restore = platform.release([weight[1:], other], keep=keep)
    assert gpu.used_bytes == used - GRANULARITY
    with pytest.raises(RuntimeError, match="illegal memory access"):
        table.add_(1)
    restore()
    assert gpu.used_bytes == used and [tensor.data_ptr() for tensor in views] == places
    assert torch.equal(views[2], before[2])
    expected = before if keep else [tensor * 0 for tensor in before]
    assert torch.equal(views[0], expected[0]) and torch.equal(views[1], expected[1])
    assert torch.equal(other, expected[3])


def test_parts_are_apart(platform: AnyPlatform, gpu: FakeGPU) -> None:
    with platform.releasable("weights"):
        weight = torch.ones(100, device=DEVICE)
    with platform.releasable("kv_cache"):
        cache = platform.zeros(3 * MIB)
        more = platform.zeros(100)
    outside = torch.ones(100, device=DEVICE)
    used = gpu.used_bytes
    wake_weights = platform.release([weight], keep=True)
    wake_cache = platform.release([cache, more, outside], keep=False)
    assert used - gpu.used_bytes == 8 * MIB, "what was taken elsewhere stays"
    assert bool(outside.all())
    wake_cache()
    assert not cache.any() and not more.any()
    wake_weights()
    assert gpu.used_bytes == used and bool(weight.all())


def test_memory_goes_back_with_the_platform(library: FakeLibrary, gpu: FakeGPU) -> None:
    platform = AnyPlatform(None, PlatformSetup())
    platform.start(0)
    with platform.releasable("weights"):
        weight = torch.ones(MIB, device=DEVICE)
    assert len(library.ranges) == 1 == len(library.handles)
    platform.release([weight], keep=False)
    del platform, weight
    assert not library.ranges and not library.handles and gpu.used_bytes == 0


def test_without_memory_torch_says_so(
    platform: AnyPlatform, gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    refused = pytest.raises(ConfigError, match=r"the KV cache does not fit: a part of 0.12 GiB")
    with platform.releasable("kv_cache"), refused:
        platform.zeros(2 * TOTAL_BYTES)
    assert not caplog.text


def test_other_refusals_of_the_driver_are_logged(
    platform: AnyPlatform, library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    with platform.releasable("kv_cache"):
        library.failures["MemMap"] = INVALID_VALUE
        with pytest.raises(ConfigError):
            platform.zeros(100)
    assert "the driver gives no memory: cuMemMap: invalid argument" in caplog.text
    assert not library.ranges and not library.handles


def test_what_the_host_cannot_hold_stays(
    platform: AnyPlatform, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module, "pinned", refuse)
    with platform.releasable("weights"):
        weight = torch.ones(100, device=DEVICE)
    used = gpu.used_bytes
    with pytest.raises(ConfigError, match="2 MiB of the device cannot be saved.*sleep level 2"):
        platform.release([weight], keep=True)
    assert gpu.used_bytes == used and bool(weight.all())


def test_memory_that_others_took_is_asked_for_again(
    platform: AnyPlatform, library: FakeLibrary
) -> None:
    with platform.releasable("weights"):
        weights = [torch.full((MIB,), value, device=DEVICE) for value in (1.0, 2.0)]
    restore = platform.release(weights, keep=True)
    library.failures["MemCreate"] = OUT_OF_MEMORY
    with pytest.raises(ConfigError, match="taken again .*; wake|free memory of the device"):
        restore()
    restore()
    assert [float(weight.sum()) / MIB for weight in weights] == [1, 2]


def test_expandable_segments_are_refused(
    platform: AnyPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would not ask the pool for memory."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match="remove expandable_segments from PYTORCH_CUDA_ALLOC"):
        platform.releasable("weights")


def test_a_device_without_virtual_memory(platform: AnyPlatform, library: FakeLibrary) -> None:
    with pytest.raises(ConfigError, match="set enable_sleep_mode"):
        platform.release([], keep=False)
    library.failures["MemGetAllocationGranularity"] = INVALID_VALUE
    with pytest.raises(
        ConfigError,
        match="enable_sleep_mode and cpu_offload_gb need .*cuMemGetAllocation.*: invalid",
    ):
        platform.releasable("weights")


@given(SPANS, st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted))
def test_spans(spans: list[tuple[int, int]], within: list[int]) -> None:
    """The parts of a span inside of others, and those outside, make it up."""
    within_span = (within[0], within[1])
    union = merged(spans)
    inside = list(common(union, within_span))
    outside = list(gaps(inside, within_span))
    known = {place for span in spans for place in range(*span)}
    assert {place for span in inside for place in range(*span)} == known & set(range(*within))
    assert {place for span in outside for place in range(*span)} == set(range(*within)) - known
    assert all(before[1] < after[0] for before, after in zip(union, union[1:], strict=False))
