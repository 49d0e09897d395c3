"""The result of a load test under vLLM's names. It is computed from the measurements of each
request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegboard.errors import UsageError
from pegboard_command_bench.load import Measured
from pegboard_command_bench.results import percent_name, percentiles

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Maps a metric to its short name and its headline."""

OF_TOKENS = (
    "total_output_tokens",
    "output_throughput",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "max_output_tokens_per_s",
)
"""Fields of the result about tokens of the output."""


@dataclass(frozen=True)
class Wanted:
    """What to report. metrics: those of TITLES. percentages: 0 to 100. goodput: maps a metric to
    the milliseconds that a good request stays below. pools: the answers have no tokens, so there is
    nothing of tokens of the output to report."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentages: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] | None = None
    pools: bool = False

    @classmethod
    def parsed(
        cls,
        metrics: str | None,
        percentages: str,
        goodput: Sequence[str] | None,
        *,
        pools: bool = False,
    ) -> "Wanted":
        """Reads the flags "ttft,tpot", "50,99", ["ttft:100"]. Raises UsageError."""
        metrics = metrics or ("e2el" if pools else "ttft,tpot,itl")
        names = tuple(name.strip() for name in metrics.split(",") if name.strip())
        unknown = [name for name in names if name not in TITLES]
        if unknown:
            raise UsageError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(TITLES)}")
        try:
            wanted = tuple(float(part) for part in percentages.split(","))
        except ValueError:
            raise UsageError(
                f"--metric-percentiles {percentages!r}: expected numbers, such as 50,99"
            ) from None
        if not all(0 <= value <= 100 for value in wanted):
            raise UsageError(
                f"--metric-percentiles {percentages!r}: expected numbers from 0 to 100"
            )
        limits = _goodput(goodput) if goodput else None
        of_tokens = [name for name in (*names, *(limits or ())) if name != "e2el"]
        if pools and of_tokens:
            raise UsageError(f"{of_tokens[0]} needs tokens of an output; here there is only e2el")
        return cls(names, wanted, limits, pools)


def _goodput(pairs: Sequence[str]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise UsageError(
                f"--goodput {pair!r}: expected ttft, tpot or e2el and milliseconds, such as "
                "ttft:200"
            )
        try:
            limits[name] = float(value)
        except ValueError:
            raise UsageError(
                f"--goodput {pair!r}: {value!r} is not a number of milliseconds"
            ) from None
    return limits


def summarize(measured: Sequence[Measured], duration_s: float, wanted: Wanted) -> dict[str, Any]:
    """Computes the result of a run. Lists have one entry per request, in order. A failed request
    has zeros."""
    good = [one for one in measured if one.success]
    series = {
        "ttft": [one.ttft for one in good],
        "tpot": [_tpot(one) for one in good if one.output_tokens > 1],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    num_input = sum(one.prompt_len for one in good)
    num_output = sum(one.output_tokens for one in good)
    first_s = min((one.start_s for one in measured), default=0.0)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(measured) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": _num_good(good, wanted.goodput) / duration_s if wanted.goodput else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "input_lens": [one.prompt_len for one in measured],
        "output_lens": [one.output_tokens if one.success else 0 for one in measured],
        "ttfts": [one.ttft for one in measured],
        "itls": [one.itl for one in measured],
        "latencies": [one.latency for one in measured],
        "start_times": [one.start_s - first_s for one in measured],
        "generated_texts": [one.text for one in measured],
        "errors": [one.error for one in measured],
        **_peaks(good, first_s),
    }
    for name in wanted.metrics:
        values = 1e3 * np.array(series[name] or [0.0])
        result[f"mean_{name}_ms"] = float(np.mean(values))
        result[f"median_{name}_ms"] = float(np.median(values))
        result[f"std_{name}_ms"] = float(np.std(values))
        for percent, value in percentiles(values.tolist(), wanted.percentages).items():
            result[f"p{percent}_{name}_ms"] = value
    if wanted.pools:
        return {name: value for name, value in result.items() if name not in OF_TOKENS}
    return result


def _tpot(one: Measured) -> float:
    return (one.latency - one.ttft) / (one.output_tokens - 1) if one.output_tokens > 1 else 0.0


def _num_good(good: Sequence[Measured], limits: Mapping[str, float]) -> int:
    def is_good(one: Measured) -> bool:
        values = {"ttft": one.ttft, "tpot": _tpot(one), "e2el": one.latency}
        return all(1e3 * values[name] <= limit for name, limit in limits.items())

    return sum(map(is_good, good))


def _peaks(good: Sequence[Measured], first_s: float) -> dict[str, Any]:
    """Returns the most tokens that were received, and the most requests that were running, in any
    one second."""
    tokens: dict[int, int] = {}
    running: dict[int, int] = {}
    for one in good:
        at_s = one.start_s - first_s + one.ttft
        for gap in [0.0, *one.itl]:
            at_s += gap
            tokens[int(at_s)] = tokens.get(int(at_s), 0) + 1
        start = int(one.start_s - first_s)
        for second in range(start, int(one.start_s - first_s + one.latency) + 1):
            running[second] = running.get(second, 0) + 1
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": max(running.values(), default=0),
    }


def table(result: Mapping[str, Any], wanted: Wanted) -> str:
    """Returns the text of the result, as in vLLM's table."""

    def line(text: str, value: Any) -> str:
        return (
            f"{text:<40} {value:<10.2f}" if isinstance(value, float) else f"{text:<40} {value:<10}"
        )

    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines.append(line("Successful requests:", result["completed"]))
    lines.append(line("Failed requests:", result["failed"]))
    if result.get("max_concurrency") is not None:
        lines.append(line("Maximum request concurrency:", result["max_concurrency"]))
    if result.get("request_rate") not in (None, "inf"):
        lines.append(line("Request rate configured (RPS):", float(result["request_rate"])))
    lines.append(line("Benchmark duration (s):", result["duration"]))
    lines.append(line("Total input tokens:", result["total_input_tokens"]))
    if not wanted.pools:
        lines.append(line("Total generated tokens:", result["total_output_tokens"]))
    lines.append(line("Request throughput (req/s):", result["request_throughput"]))
    if result["request_goodput"] is not None:
        lines.append(line("Request goodput (req/s):", result["request_goodput"]))
    if not wanted.pools:
        peak = result["max_output_tokens_per_s"]
        lines.append(line("Output token throughput (tok/s):", result["output_throughput"]))
        lines.append(line("Peak output token throughput (tok/s):", peak))
    lines.append(line("Peak concurrent requests:", float(result["max_concurrent_requests"])))
    lines.append(line("Total token throughput (tok/s):", result["total_token_throughput"]))
    for name in wanted.metrics:
        short, title = TITLES[name]
        lines.append(f"{title:-^50}")
        lines.append(line(f"Mean {short} (ms):", result[f"mean_{name}_ms"]))
        lines.append(line(f"Median {short} (ms):", result[f"median_{name}_ms"]))
        for percentage in wanted.percentages:
            shown = percent_name(percentage)
            lines.append(line(f"P{shown} {short} (ms):", result[f"p{shown}_{name}_ms"]))
    return "\n".join([*lines, "=" * 50])
