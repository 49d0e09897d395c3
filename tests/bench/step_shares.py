"""Measures the shares of a decode step. It puts timers around the parts of the engine, without
changing the engine's code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from pegboard import LLM, SamplingParams


class Timer:
    """Measures the seconds spent in a method of one object since the last `take`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._owner = owner
        self._name = name
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def remove(self) -> None:
        delattr(self._owner, self._name)


def measure_shares(llm: LLM, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    """Decode all prompts together, sampling at temperature 0.8 with top_p, and return the median
    milliseconds of each part of a step that decoded all of them; the share of everything that is
    neither the model nor its inputs; and the share of host time: of everything outside the compiled
    kernels (torch's operators count as host), or, when this machine has no compiled kernels,
    outside the model's forward, head and sampling. If the engine keeps steps in flight, parts
    overlap: "update" is the rest of a step, and may be negative."""
    text_engine = llm.llm_engine
    engine = text_engine.engine
    runner = engine._parts.executor.worker.running
    timers = {
        "engine": Timer(engine, "step"),
        "schedule": Timer(engine._scheduler, "schedule"),
        "logits": Timer(runner.stages, "logits"),
        "forward": Timer(
            runner.stages, "decode" if runner.stages.recordings.by_trait else "forward"
        ),
        "run": Timer(runner, "run"),
        "sample": Timer(runner.ending, "end"),
    }
    kernels = _kernel_library()
    if kernels is not None:
        timers["kernels"] = Timer(kernels, "run")
    try:
        steps = _run(text_engine, timers, prompts, max_tokens)
    finally:
        for timer in timers.values():
            timer.remove()
    parts = {name: 1e3 * _median([step[name] for step in steps]) for name in steps[0]}
    others = parts["schedule"] + parts["update"] + parts["sample"] + parts["text"]
    computed = (
        parts["kernels"]
        if kernels is not None
        else parts["forward"] + parts["logits"] + parts["sample"]
    )
    host = 1 - computed / parts["step"]
    return {
        "milliseconds": parts,
        "share": others / parts["step"],
        "host_share": host,
        "num_steps": len(steps),
    }


def _kernel_library() -> Any:
    """Returns the compiled kernels of this process, or None when it has none. Every call of them
    passes through `run`."""
    module = sys.modules.get("pegboard_kernel_cpu.library")
    return module._current if module is not None else None


def _run(
    engine: Any, timers: dict[str, Timer], prompts: list[list[int]], max_tokens: list[int]
) -> list[dict[str, float]]:
    """Returns the seconds per part of every step in which all requests decoded."""
    for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True)):
        params = SamplingParams(
            temperature=0.8, top_p=0.95, seed=index, max_tokens=count, ignore_eos=True
        )
        engine.add_request(f"shares-{index}", prompt, params)
    steps = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = engine.step()
        total = time.perf_counter() - started
        took = {name: timer.take() for name, timer in timers.items()}
        if len(outputs) < len(prompts):
            continue
        steps.append(
            {
                "step": total,
                "schedule": took["schedule"],
                "prepare": took["run"] - took["forward"] - took["sample"],
                "forward": took["forward"],
                "logits": took["logits"],
                "sample": took["sample"] - took["logits"],
                "update": took["engine"] - took["schedule"] - took["run"],
                "text": total - took["engine"],
                "kernels": took.get("kernels", 0.0),
            }
        )
    return steps[1:-1]  # the first step is the prefill, and the last one also cleans up


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
