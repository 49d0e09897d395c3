"""The parts of `measure.py` in their order, with their goals and the seconds that they may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import measure_engines
import measure_kernels
import measure_models
import measure_requests
from measure_run import Run

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that a part should reach. path: where it is in the part's result. is_most: it is the
    largest good number. of: the part whose number it is a multiple of."""

    number: float
    path: tuple[str, ...] = ("of_roof",)
    is_most: bool = False
    of: str = ""

    def words(self) -> str:
        """Return the goal in words."""
        sign = "≤" if self.is_most else "≥"
        other = f" × that of {self.of}" if self.of else ""
        return f"{'.'.join(self.path)} {sign} {self.number:g}{other}"

    def judge(self, name: str, results: Results) -> str:
        """Return whether the part of this name has reached it: "reached", "missed" or
        "unknown"."""
        number = self.number_of(results.get(name))
        known = self.number_of(results.get(self.of)) if self.of else 1.0
        if number is None or not known:
            return "unknown"
        share = number / known
        reached = share <= self.number if self.is_most else share >= self.number
        return "reached" if reached else "missed"

    def number_of(self, result: Any) -> float | None:
        """Return the number in a part's result; None if there is none."""
        for key in self.path:
            result = result.get(key) if isinstance(result, dict) else None
        return float(result) if isinstance(result, int | float) else None


GOALS = {
    "bench_decode_attention": Goal(0.85),
    "bench_prefill_attention": Goal(0.60),
    "bench_packed_int4": Goal(0.75, ("1", "of_roof")),
    "bench_host_time": Goal(1.0, ("greedy", "median_ms"), is_most=True),
    "llama_8b_decode_1": Goal(0.85),
    "llama_8b_decode_256": Goal(0.75),
    "llama_8b_prefill_8192": Goal(0.65),
    "llama_8b_int4_decode_1": Goal(0.75),
    "bench_generate": Goal(2.0, ("prompts_per_s",), of="bench_generate_full_decode_only"),
}
"""By the name of the part."""


@dataclass(frozen=True, slots=True)
class Stage:
    """call: the part. group: parts of one group run in one process, as long as none of them breaks
    it. expected_s: how long it takes on a large GPU; a guess until a card has run it. limit_s: when
    it is stopped."""

    name: str
    call: Callable[[Run], dict[str, Any]]
    group: str
    expected_s: float
    limit_s: float
    goal: Goal | None


SECONDS = {
    "states_float32": 8.0,
    "tokens_equal_the_cpu": 30.0,
    "bench_host_time": 6.0,
    "llama_8b_start": 35.0,
    "llama_8b_decode_256": 14.0,
    "requests": 25.0,
    "llama_8b_int4_start": 40.0,
    "mixtral_start": 25.0,
    "deepseek_start": 40.0,
    "requests_transformers": 90.0,
}
"""The expected seconds of the parts that take longer than others of their group."""
GROUPS: tuple[tuple[str, float, float, dict[str, Callable[[Run], dict[str, Any]]]], ...] = (
    ("kernels", 1.5, 60, {**measure_kernels.CHECKS, **measure_kernels.ROOFS}),
    ("models", 3, 60, measure_models.CHECKS),
    ("default model", 30, 120, measure_engines.CHECKS),
    (
        "llama_8b",
        4,
        90,
        {**measure_models.LLAMA_BENCHES, "requests": measure_requests.pegboard_requests},
    ),
    ("llama_8b_int4", 4, 90, measure_models.PACKED_BENCHES),
    ("kernels' speed", 2, 60, measure_kernels.BENCHES),
    ("mixtral", 4, 90, measure_models.MIXTRAL_BENCHES),
    ("deepseek", 4, 90, measure_models.DEEPSEEK_BENCHES),
    (
        "transformers",
        90,
        180,
        {"requests_transformers": measure_requests.transformers_requests},
    ),
    ("default model's speed", 20, 120, measure_engines.BENCHES),
)
"""The name of a group, the expected seconds and the least limit of a part, and the parts."""


def stages() -> Iterator[Stage]:
    """Yield all parts in their order."""
    for group, seconds, limit, parts in GROUPS:
        for name, call in parts.items():
            expected = SECONDS.get(name, seconds)
            yield Stage(name, call, group, expected, max(limit, 3 * expected), GOALS.get(name))


STAGES = tuple(stages())
"""What is right comes before what is fast, and what has a goal before what has none."""
BY_NAME = {stage.name: stage for stage in STAGES}


def is_done(result: dict[str, Any] | None) -> bool:
    """Return whether a part has run and is not wrong."""
    return result is not None and bool(result.get("right", True))


def lines(stages: Sequence[Stage]) -> list[str]:
    """Return a line for each part: its expected seconds, and its goal."""
    return [
        f"{stage.name}: {stage.expected_s:g} s"
        + (f", goal {stage.goal.words()}" if stage.goal else "")
        for stage in stages
    ]
