"""Engines on a fake GPU: with the scheduler, the kernels of Triton in its interpreter, and captured
steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from pegboard_executor_local.in_process import InProcessExecutor, Step

from pegboard import LLM
from pegboard.data.batch import Batch, StepOutput
from pegboard.interfaces.executor import ExecutorSpec
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_gpu import FakeGPU
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


@contextmanager
def engine_on_fake_gpu(model: Path, **settings: Any) -> Iterator[tuple[LLM, FakeGPU]]:
    """An engine in whose steps nothing waits for the device, as far as the caller checks
    `FakeGPU.host_reads`."""
    discover = Registry.discover
    instead = {
        ("platform", "cuda"): "pegboard_testing.fake_gpu:FAKE_GPU",
        ("executor", "uni"): "fake_gpu_engine:STEPS_AT_ONCE",
    }

    def with_fakes(*args: Any) -> Registry:
        found = discover(*args)
        entries = tuple(
            replace(entry, value=instead[entry.kind, entry.name])
            if (entry.kind, entry.name) in instead
            else entry
            for entry in found.scan.entries
        )
        return Registry(replace(found.scan, entries=entries), found.config)

    with (
        mock.patch.object(Registry, "discover", with_fakes),
        FakeGPU() as gpu,
        triton_on_fake_gpu(),
    ):
        engine = LLM(str(model), device="cuda", **{"kv_cache_memory_bytes": 2**20, **settings})
        yield engine, gpu
        engine.llm_engine.engine.stop()
