"""Turns the numbers into rows of one table, each with its goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

COLUMNS = {
    "llama.cpp": "llama.cpp",
    "llama-server": "llama.cpp",
    "openvino": "OpenVINO",
    "vllm": "vLLM",
    "transformers": "transformers",
}
"""The column of the table for the first word of a side's or server's name."""

OWN = "pegboard q4_1"
OWN_ZERO = "pegboard q4_0"
OWN_FLOAT = "pegboard float32"
QUANTIZED = ("llama.cpp q4_1", "openvino q4_1", "vllm float32", "transformers float32")
ZERO = ("llama.cpp q4_0", "openvino q4_0")
FLOAT = ("vllm float32", "transformers float32")
BEST = "best"

Sense = Literal["≥", "≤"]


@dataclass(frozen=True)
class Goal:
    """The goal: value `sense` factor · reference. against: a side of the row, BEST for the best of
    them, or a text that says what `reference` is. An absolute goal has no reference; then `factor`
    is the number to reach."""

    sense: Sense
    factor: float
    against: str = ""
    reference: float | None = None


@dataclass(frozen=True)
class Row:
    """One row. ratio: Pegboard's value over that of `against`. target: the goal as text, "" without
    a goal. reached: None if Pegboard, or the side that it is compared with, was not measured."""

    workload: str
    measure: str
    pegboard: float | None
    peers: dict[str, float]
    ratio: float | None = None
    against: str = ""
    target: str = ""
    reached: bool | None = None


@dataclass(frozen=True)
class Question:
    """Describes a row: where its value is in a side's numbers, and which sides it includes."""

    workload: str
    measure: str
    section: str
    key: str
    own: str
    peers: tuple[str, ...]
    goals: tuple[Goal, ...] = field(default=())
    is_higher_better: bool = True


QUESTIONS = (
    Question(
        "one stream, Q4_1",
        "tokens/s",
        "single",
        "tokens_per_s",
        OWN,
        QUANTIZED,
        (Goal("≥", 2, "llama.cpp q4_1"),),
    ),
    Question(
        "one stream, Q4_1",
        "first token, ms",
        "single",
        "ttft_ms",
        OWN,
        QUANTIZED,
        (Goal("≤", 0.6, BEST),),
        False,
    ),
    Question(
        "one stream, Q4_0",
        "tokens/s",
        "single",
        "tokens_per_s",
        OWN_ZERO,
        ZERO,
        (Goal("≥", 1.25, "llama.cpp q4_0"),),
    ),
    Question(
        "one stream, Q4_0",
        "first token, ms",
        "single",
        "ttft_ms",
        OWN_ZERO,
        ZERO,
        (Goal("≤", 0.6, BEST),),
        False,
    ),
    Question("one stream, float32", "tokens/s", "single", "tokens_per_s", OWN_FLOAT, FLOAT),
    Question(
        "one stream, float32", "first token, ms", "single", "ttft_ms", OWN_FLOAT, FLOAT, (), False
    ),
    Question(
        "offline, 32 requests, Q4_1",
        "output tokens/s",
        "offline",
        "tokens_per_s",
        OWN,
        QUANTIZED,
        (Goal("≥", 4, "vllm float32"), Goal("≥", 2.5, "openvino q4_1")),
    ),
    Question(
        "offline, 32 requests, float32",
        "output tokens/s",
        "offline",
        "tokens_per_s",
        OWN_FLOAT,
        FLOAT,
        (Goal("≥", 1.3, "vllm float32"),),
    ),
    Question(
        "16 requests share 1,500 tokens", "cold, s", "prefix", "cold_s", OWN, QUANTIZED, (), False
    ),
)


def rows(result: Mapping[str, Any]) -> list[Row]:
    """Returns the rows for everything that was measured."""
    found = [row for question in QUESTIONS for row in _answers(question, result["sides"])]
    found += _prefix(result)
    found += _serving(result)
    found += _start(result)
    found += _alone(result)
    return [row for row in found if row.pegboard is not None]


def as_data(found: list[Row]) -> list[dict[str, Any]]:
    """Returns the rows for a JSON file."""
    return [asdict(row) for row in found]


def _answers(question: Question, numbers: Mapping[str, Any]) -> Iterator[Row]:
    """Yields one row per goal, or one row that compares with the best peer."""

    def value(name: str) -> float | None:
        number = numbers.get(name, {}).get(question.section, {}).get(question.key)
        return None if number is None else float(number)

    peers = {name: number for name in question.peers if (number := value(name)) is not None}
    for goal in question.goals or (None,):
        yield make_row(
            question.workload,
            question.measure,
            value(question.own),
            peers,
            goal,
            question.is_higher_better,
        )


def make_row(
    workload: str,
    measure: str,
    own: float | None,
    peers: Mapping[str, float],
    goal: Goal | None = None,
    is_higher_better: bool = True,
) -> Row:
    """Compare Pegboard with the goal. peers: the values of the other sides, by name."""
    best = (max if is_higher_better else min)(peers.items(), key=lambda peer: peer[1], default=None)
    columns = {COLUMNS[name.split()[0]]: number for name, number in peers.items()}
    if goal is None:
        ratio = own / best[1] if own is not None and best else None
        return Row(workload, measure, own, columns, ratio, _column(best[0]) if best else "")
    if not goal.against:
        return Row(
            workload,
            measure,
            own,
            columns,
            None,
            "",
            f"{goal.sense} {goal.factor:g}",
            _is_reached(own, goal, 1.0),
        )
    against = goal.against
    reference = goal.reference
    if goal.against == BEST:
        against, reference = best if best else (BEST, None)
    elif reference is None:
        reference = peers.get(goal.against)
    words = (
        f"{goal.sense} {goal.factor:g} × "
        f"{'the best peer' if goal.against == BEST else _column(goal.against)}"
    )
    ratio = own / reference if own is not None and reference else None
    return Row(
        workload,
        measure,
        own,
        columns,
        ratio,
        _column(against),
        words,
        _is_reached(own, goal, reference),
    )


def _is_reached(own: float | None, goal: Goal, reference: float | None) -> bool | None:
    if own is None or reference is None:
        return None
    limit = goal.factor * reference
    return own >= limit if goal.sense == "≥" else own <= limit


def _column(name: str) -> str:
    return COLUMNS.get(name.split()[0], name) if name else ""


def _prefix(result: Mapping[str, Any]) -> Iterator[Row]:
    prefix = {name: side["prefix"] for name, side in result["sides"].items() if "prefix" in side}
    if "pegboard q4_1" not in prefix:
        return
    own = prefix["pegboard q4_1"]
    peers = {name: prefix[name]["warm_s"] for name in QUANTIZED if name in prefix}
    goals = (Goal("≤", 0.1, "cold", own["cold_s"]), Goal("≤", 0.2, "vllm float32"))
    for goal in goals:
        yield make_row(
            "16 requests share 1,500 tokens", "warm, s", own["warm_s"], peers, goal, False
        )


def _serving(result: Mapping[str, Any]) -> Iterator[Row]:
    servers = result["servers"]
    for format, has_goal in (("q4_1", True), ("q4_0", False)):
        own, peer = (
            servers.get(f"{name} {format}", {}).get("load", {})
            for name in ("pegboard", "llama-server")
        )
        workload = f"serving 8 clients, {format.upper()}"
        goals = {
            "tokens_per_s": ("output tokens/s", Goal("≥", 4, f"llama-server {format}")),
            "itl_ms_p50": ("between tokens, p50, ms", None),
            "itl_ms_p99": ("between tokens, p99, ms", Goal("≤", 0.1, f"llama-server {format}")),
            "ttft_ms_p50": ("first token, p50, ms", None),
            "ttft_ms_p99": ("first token, p99, ms", None),
            "rss_mib": ("resident memory, MiB", Goal("≤", 667.6) if has_goal else None),  # 700 MB
            "pss_mib": ("the same, shared pages once, MiB", None),
        }
        for key, (measure, goal) in goals.items():
            peers = {f"llama-server {format}": peer[key]} if key in peer else {}
            is_relative = goal is not None and goal.against
            shown = goal if has_goal or not is_relative else None
            yield make_row(workload, measure, own.get(key), peers, shown, key == "tokens_per_s")


def _start(result: Mapping[str, Any]) -> Iterator[Row]:
    servers = result["servers"]
    sides = result["sides"]
    start = result["start"]
    own = servers.get("pegboard q4_1", {})
    peers = (
        {"llama-server q4_1": servers["llama-server q4_1"]}
        if "llama-server q4_1" in servers
        else {}
    )
    others = {
        name: sides[name]["start_to_first_token_s"] for name in QUANTIZED[1:] if name in sides
    }
    health = {name: server["health_s"] for name, server in peers.items()}
    first = {**{name: server["first_token_s"] for name, server in peers.items()}, **others}
    yield make_row(
        "start of the process",
        "/health answers, s",
        own.get("health_s"),
        health,
        Goal("≤", 1),
        False,
    )
    allowed = round(start["import_torch_ms"] / 1e3 + 1.2, 2)
    yield make_row(
        "start of the process",
        "first token, s",
        own.get("first_token_s"),
        first,
        Goal("≤", allowed),
        False,
    )
    yield make_row(
        "start of the process",
        "first token (stretch), s",
        own.get("first_token_s"),
        first,
        Goal("≤", 1.5),
        False,
    )
    for key, measure in (
        ("import_torch_ms", "import torch, ms"),
        ("import_ms", "import pegboard, ms"),
        ("help_ms", "pegboard --help, ms"),
    ):
        yield make_row("start of the process", measure, start.get(key), {})


def _alone(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yields the rows that are not compared with any peer."""
    for batch_size, limit in (("1", 8), ("32", 5)):
        shares = result["host"].get(batch_size)
        measure = "outside kernels, % of a step"
        yield make_row(
            f"decode, batch {batch_size}",
            measure,
            shares and 100 * shares["host_share"],
            {},
            Goal("≤", limit),
            False,
        )
