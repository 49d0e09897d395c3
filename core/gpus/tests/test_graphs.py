"""Graphs of torch.cuda, and what the platforms of GPUs share, on a fake of torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pegboard.errors import CannotRecord, ConfigError, NoRoom
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
    assert replay.sizes("decode", 10_000)[-2:] == [504, 512]
    sizes = replay.sizes("forward", 10_000)
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and sizes[-3:] == [1536, 1792, 2048]
    assert all(later <= 1.25 * size for size, later in zip(sizes[6:], sizes[7:], strict=False))
    assert replay.sizes("forward", 60)[-3:] == [48, 56, 60]


def test_a_call_outside_is_made_in_each_replay(gpu: FakeGPU) -> None:
    """With the rows of the step, and with what the piece before it has computed. Here the call
    reads its rows on the host, which no graph could."""
    replay = GraphReplay()
    numbers: list[int] = []

    def sums(x: Tensor, y: Tensor, nothing: None) -> Tensor:
        numbers.append(len(x))
        return torch.full((len(x), 3), float((x + y).sum()), device=DEVICE)

    outside = replay.outside(sums, 3)

    def run(x: Tensor) -> tuple[Tensor]:
        first = outside(x, x + 1, None)
        second = outside(first[:, :2] * 2, x, None)
        return (first + second + x.sum(1, keepdim=True),)

    inputs = torch.arange(16.0, device=DEVICE).view(8, 2)
    recordings = [replay.record(run, [inputs[:size]]) for size in (8, 4)]
    assert not numbers and [len(each.pieces) for each in recordings] == [5, 5]
    for recording, num_rows in ((recordings[0], 6), (recordings[1], 3), (recordings[0], 8)):
        inputs.add_(1)
        reads = gpu.host_reads
        (result,) = recording(num_rows)
        assert gpu.host_reads == reads + 2 and numbers[-2:] == [num_rows] * 2
        x = inputs[:num_rows]
        first = float((2 * x + 1).sum())
        wanted = first + float((2 * first + x).sum()) + x.sum(1, keepdim=True)
        torch.testing.assert_close(result, wanted.expand(-1, 3))
    given = [key for key in replay.shared if isinstance(key[0], tuple)]
    assert len(given) == 2, "all recordings and calls share what is given"
    replay.reset()
    assert not replay.shared and not recordings[0].pieces


def test_a_capture_that_fails_in_a_later_piece_is_ended(gpu: FakeGPU) -> None:
    replay = GraphReplay()
    outside = replay.outside(lambda x: x, 2)

    def run(x: Tensor) -> tuple[Tensor]:
        y = outside(x)
        return (y * float(y.sum()),)

    inputs = torch.ones(4, 2, device=DEVICE)
    with pytest.raises(CannotRecord, match="^operation not permitted when stream is capturing$"):
        replay.record(run, [inputs])
    assert not gpu.is_capturing and not replay.graphs
    (result,) = replay.record(lambda x: (outside(x) + 1,), [inputs])(3)
    assert result.tolist() == [[2.0, 2.0]] * 3


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
        assert hidden.data_ptr() == largest.results[0].data_ptr()
        assert logits.data_ptr() == largest.results[1].data_ptr()
        torch.testing.assert_close(hidden, inputs[: recording.size] + 1)
        torch.testing.assert_close(logits, inputs[: recording.size] @ weight)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in replay.shared.values())
    assert kept == 8 * (2 + 500) * 4
    replay.reset()
    assert not replay.shared


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
    assert not replay.shared and not replay.graphs
    replay.record(run, [inputs[:4]])
    (result,) = replay.shared.values()
    assert len(result) == 4
