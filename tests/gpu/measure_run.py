"""What the parts of `measure.py` share: the device, random numbers, times and shares of roofs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative error of each type."""
PLATFORM = "rocm" if torch.version.hip else "cuda"
"""Pegboard's name for torch's "cuda"."""


class Run:
    """device: torch device. tiny: sizes that the interpreter can compute. results: of the parts
    before, by their names. note: takes what a part knows before its end. engine: the engine that
    the last part left, and its name."""

    def __init__(
        self,
        device: str,
        tiny: bool,
        results: dict[str, Any],
        note: Callable[[dict[str, Any]], None] = lambda values: None,
    ) -> None:
        self.device = device
        self.tiny = tiny
        self.results = results
        self.note = note
        self.engine: tuple[str, Any] | None = None

    @property
    def platform(self) -> str:
        """Return Pegboard's name of the device."""
        return PLATFORM if self.device.startswith("cuda") else self.device

    def engine_of(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the engine of this name, which the parts of a model share."""
        if self.engine is None or self.engine[0] != name:
            self.close()
            self.engine = (name, make())
        return self.engine[1]

    def is_usable(self) -> bool:
        """Return whether the device still answers. After some errors, none of a process's calls
        does."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001 – whatever it is, another process must go on
            return False
        return True

    def close(self) -> None:
        """Stop the engine that the last part left."""
        if self.engine is not None:
            self.engine[1].shutdown()
            self.engine = None

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def seconds(self, call: Callable[[], object], captured: bool = True) -> float:
        """Return how long a call takes on the device: the median of five rounds of several calls.
        captured: on a GPU, each round is one graph, so that the host's time for launches is not in
        it."""
        rounds, calls = (1, 1) if self.tiny else (5, 10)

        def run() -> None:
            for _ in range(calls):
                call()

        call()
        if captured and self.device.startswith("cuda"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph.replay()
            run = graph.replay
        times = []
        for _ in range(rounds):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append((time.perf_counter() - started) / calls)
        return sorted(times)[len(times) // 2]

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def of_roof(self, rate: float, roof: str) -> float | None:
        """Return the share of a roof that this run has measured."""
        known = self.results.get(roof, {}).get("rate")
        return round(rate / known, 3) if known else None


def error(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Return the relative norm of the difference, and whether the type allows it."""
    wide = expected.double()
    relative = float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))
    return {"error": relative, "right": relative <= LIMITS[str(found.dtype).removeprefix("torch.")]}
