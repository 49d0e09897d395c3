"""Copies beside the computation: the order of the streams, and the memory that they use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pegboard.interfaces.platform import SideCopies
from pegboard_gpus import platform as module
from pegboard_gpus.platform import GPUCopies
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_testing.fake_torch_cuda import fake_torch_cuda


class Stream:
    """Notes for which streams it has waited."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


@contextlib.contextmanager
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeGPU, list[str], Stream, Stream]]:
    notes: list[str] = []
    computing = Stream("computing", notes)
    side = Stream("side", notes)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        notes.append(f"on {stream.name}")
        yield
        notes.append("off")

    more: dict[str, Any] = {
        "Stream": lambda: side,
        "current_stream": lambda: computing,
        "stream": on,
    }
    with fake_torch_cuda(monkeypatch, module, **more) as gpu:
        monkeypatch.setattr(module, "FAMILY", DEVICE.partition(":")[0])
        yield gpu, notes, computing, side


def test_rows_are_stored_after_what_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch must not give their memory away while the other stream reads it."""
    with streams(monkeypatch) as (gpu, notes, _, side):
        copies = GPUCopies()
        assert isinstance(copies, SideCopies)
        memory = copies.host((3, 2), torch.int64)
        rows = torch.arange(4, device=DEVICE).view(2, 2)
        copies.store(rows, [memory[2], memory[0]])
        assert notes == ["side waits for computing", "on side", "off"]
        assert gpu.uses == [(rows.data_ptr(), side)]
        assert memory.tolist() == [[2, 3], [0, 0], [0, 1]]


def test_only_what_is_computed_later_waits_for_loaded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are allocated on the stream that copies, so this does not wait for the computation."""
    with streams(monkeypatch) as (gpu, notes, computing, _):
        copies = GPUCopies()
        memory = copies.host((3, 2), torch.int64)
        memory[1] = 7
        rows = copies.load([memory[1], memory[0]])
        assert notes == ["on side", "off", "computing waits for side"]
        assert gpu.uses == [(rows.data_ptr(), computing)]
        assert rows.tolist() == [[7, 7], [0, 0]]
