"""Engines on a fake GPU: with the scheduler, the kernels of Triton in its interpreter, and captured
steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pegboard_attention_triton import backend
from pegboard_executor_local.in_process import InProcessExecutor, Step
from torch import Tensor

from pegboard import LLM
from pegboard.data.batch import Batch, StepOutput
from pegboard.interfaces.executor import ExecutorSpec
from pegboard.interfaces.platform import PlatformSpec
from pegboard.plugins.registry import Registry
from pegboard_gpus.driver import CUDADriver
from pegboard_gpus.platform import GPUPlatform
from pegboard_gpus.virtual_memory import VirtualMemory
from pegboard_testing.fake_gpu import DEVICE, FakeGPU, FakeGPUPlatform
from pegboard_testing.fake_triton import triton_on_fake_gpu


class ReadStep(Step):
    """A step that knows whether its result was requested."""

    was_read = False

    def result(self) -> StepOutput:
        self.was_read = True
        return super().result()


class StepsAtOnce(InProcessExecutor):
    """Starts a step when it is submitted, in the engine's thread, because the fake device belongs
    to this thread. A step that needs masks, and the steps after it, start when their results are
    requested."""

    def new_step(self, batch: Batch) -> Step:
        return ReadStep(self, batch)

    def is_idle(self) -> bool:
        """Return whether the results of all steps were requested."""
        return self.last is None or (isinstance(self.last, ReadStep) and self.last.was_read)

    def submit(self, batch: Batch) -> Step:
        before = self.last
        step = self.last = self.new_step(batch)
        if batch.needs_masks:
            self.masked[batch.step] = step
        elif before is None or before.ran.is_set():
            step.run()
        return step


STEPS_AT_ONCE = ExecutorSpec(api="1.0", implementation="fake_gpu_engine:StepsAtOnce")
"""Only for this test."""


class SleepingGPU(FakeGPUPlatform):
    """Releases memory as GPUs do. It needs `fake_driver.install_driver`."""

    driver = CUDADriver
    device = DEVICE
    virtual: VirtualMemory | None = None
    releasable = GPUPlatform.releasable
    release = GPUPlatform.release


SLEEPING_GPU = PlatformSpec(
    api="1.0", implementation="fake_gpu_engine:SleepingGPU", flags=frozenset({"device"})
)


def store_in_torch(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *_: Any
) -> None:
    """`store_kv`, for caches of k's type. Tokens without a slot leave block 0 as it is."""
    size = k_cache.shape[1]
    place = slots.clamp(min=0)
    has_slot = (slots >= 0).view(-1, 1, 1)
    for new, cache in ((k, k_cache), (v, v_cache)):
        index = (place // size, place % size)
        cache.index_put_(index, torch.where(has_slot, new, cache[index]))


def attend_in_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *_: Any,
) -> Tensor:
    """`paged_attention` to all tokens before, for layers without a window or other additions. The
    reference of the contract tests reads the lengths on the host, so it cannot be captured."""
    tokens = torch.arange(len(q), device=q.device)
    rows = torch.searchsorted(query_start_loc, tokens, right=True).sub(1)
    rows = rows.clamp(max=len(seq_lens) - 1)
    positions = tokens - query_start_loc[rows + 1] + seq_lens[rows]
    blocks = block_table[rows].long()
    keys = k_cache[blocks].flatten(1, 2)  # [T, n, K, D]
    values = v_cache[blocks].flatten(1, 2)
    group = q.shape[1] // keys.shape[2]
    keys, values = (each.repeat_interleave(group, 2) for each in (keys, values))
    scores = torch.einsum("thd,tnhd->thn", q, keys) * scale
    later = torch.arange(keys.shape[1], device=q.device) > positions.unsqueeze(1)
    shares = scores.masked_fill(later.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("thn,tnhd->thd", shares.nan_to_num(), values)


def submitted_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, bool]]:
    """Return the steps that are submitted from now on, and whether the one before has been read."""
    steps: list[tuple[Batch, bool]] = []
    submit = StepsAtOnce.submit

    def watched(self: StepsAtOnce, batch: Batch) -> Step:
        steps.append((batch, self.is_idle()))
        return submit(self, batch)

    monkeypatch.setattr(StepsAtOnce, "submit", watched)
    return steps


@contextmanager
def engine_on_fake_gpu(
    model: Path,
    by_triton: bool = True,
    kernels: Collection[str] = (),
    platform: str = "pegboard_testing.fake_gpu:FAKE_GPU",
    gpu: FakeGPU | None = None,
    **settings: Any,
) -> Iterator[tuple[LLM, FakeGPU]]:
    """An engine in whose steps nothing waits for the device, as far as the caller checks
    `FakeGPU.host_reads`. by_triton: False = torch computes attention and ops on the fake device,
    because the interpreter of Triton takes far longer; kernels: the ops and weight formats that
    Triton computes all the same, and "attention". platform: its spec. gpu: see `FakeGPU`."""
    discover = Registry.discover
    instead = {
        ("platform", "cuda"): platform,
        ("executor", "uni"): "fake_gpu_engine:STEPS_AT_ONCE",
    }

    def with_fakes(*args: Any) -> Registry:
        found = discover(*args)
        entries = tuple(
            replace(entry, value=instead[entry.kind, entry.name])
            if (entry.kind, entry.name) in instead
            else entry
            for entry in found.scan.entries
            if by_triton
            or entry.kind != "kernel"
            or ".triton" not in entry.name
            or entry.name.partition(".triton")[0] in kernels
        )
        return Registry(replace(found.scan, entries=entries), found.config)

    in_torch = {"store_kv": store_in_torch, "paged_attention": attend_in_torch}
    with (
        mock.patch.object(Registry, "discover", with_fakes),
        nullcontext()
        if by_triton or "attention" in kernels
        else mock.patch.multiple(backend, **in_torch),
        gpu or FakeGPU() as gpu,
        triton_on_fake_gpu(),
    ):
        gpu.total_bytes = 2**30
        engine = LLM(str(model), device="cuda", **{"kv_cache_memory_bytes": 2**20, **settings})
        try:
            yield engine, gpu
        finally:
            engine.llm_engine.engine.stop()


def decisions_of(llm: LLM) -> Any:
    """Return the choices that the worker made: (kind, key) → `Decision`."""
    executor: Any = llm.llm_engine.engine._parts.executor
    return executor.worker.registry.decisions


def attention_of(llm: LLM) -> set[str]:
    """Return the names of the attention backends that were chosen for the layers."""
    decisions = decisions_of(llm)
    return {each.require().name for (kind, _), each in decisions.items() if kind == "attention"}


def recorder_notes(llm: LLM) -> tuple[str, ...]:
    """Return what cannot be recorded, and why."""
    notes: tuple[str, ...] = decisions_of(llm)["kernel", "recorder"].notes
    return notes
