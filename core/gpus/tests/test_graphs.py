"""Graphs of torch.cuda, and what the platforms of GPUs share, on a fake of torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pegboard.errors import ConfigError, NoRoom
from pegboard.interfaces.platform import PlatformSetup
from pegboard_gpus import platform as module
from pegboard_gpus.driver import CUDADriver
from pegboard_gpus.graphs import GraphReplay
from pegboard_gpus.platform import GPUPlatform
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_testing.fake_torch_cuda import fake_torch_cuda


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


def test_each_rank_needs_a_device(gpu: FakeGPU) -> None:
    with pytest.raises(
        ConfigError, match="rank 1 needs a fast device of its own, but only 1 are visible"
    ):
        AnyPlatform(None, PlatformSetup()).start(1)


def test_a_device_without_bfloat16_computes_in_float16(gpu: FakeGPU) -> None:
    assert AnyPlatform(None, PlatformSetup()).defaults("bfloat16")["dtype"] == "float16"


def test_too_little_memory_names_the_numbers_and_the_settings(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = AnyPlatform(None, PlatformSetup())
    platform.start(0)

    def full(*args: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ConfigError,
        match=r"2.00 GiB was .* 0.06 of 0.06 GiB free; lower gpu_memory_utilization, kv_cache_mem",
    ):
        platform.zeros(2**31)


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


@pytest.mark.parametrize("is_captured", [False, True], ids=["run", "captured"])
def test_memory_of_a_graph_that_does_not_fit_is_given_back(gpu: FakeGPU, is_captured: bool) -> None:
    replay = GraphReplay()
    inputs = torch.zeros(8, 500, device=DEVICE)

    def run(x: Tensor) -> tuple[Tensor]:
        if len(x) > 4 and gpu.is_capturing == is_captured:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore words")
        return (x + 1,)

    with pytest.raises(NoRoom, match="^CUDA out of memory.$"):
        replay.record(run, [inputs])
    assert not replay.results and not replay.graphs
    replay.record(run, [inputs[:4]])
    (result,) = replay.results.values()
    assert len(result) == 4
