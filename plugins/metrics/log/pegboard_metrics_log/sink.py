"""The metrics sink `log`. Its clock is `Sample.time_s`: it has no thread and never reads the time
itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pegboard.interfaces.metrics import Metric, MetricsSetup, Sample
from pegboard.log import get_logger

logger = get_logger(__name__)


INTERVAL_S = 10.0
"""Seconds that one line covers."""


class LogSink:
    """Adds up the samples of a window. Writes a line when the window is `interval_s` long, or when
    the engine becomes idle and the last line is at least that old. A window without work gives no
    line. The prefix cache hit rate is that of the window, or of the last window that had
    lookups."""

    def __init__(self, options: None, setup: MetricsSetup, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._gauges: dict[str, float] = {}
        self._sums: Counter[str] = Counter()
        self._start_s: float | None = None
        self._last_s = 0.0
        self._reported_s: float | None = None
        self._hit_rate = 0.0
        self._engine = 0

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Prepares nothing, because a metric that never arrives counts as 0."""

    def publish(self, sample: Sample) -> None:
        now = sample.time_s
        if self._start_s is None:
            self._start_s = now
        elif self._is_idle() and now - self._last_s >= self._interval_s:
            # idle time belongs to no window: earlier work is averaged over the busy time
            self._report()
            self._start_s = now
        self._gauges.update(sample.gauges)
        self._sums.update(sample.counters)
        self._last_s = now
        self._engine = sample.engine
        elapsed_s = now - self._start_s
        is_due = self._reported_s is None or now - self._reported_s >= self._interval_s
        if elapsed_s >= self._interval_s or (elapsed_s > 0 and self._is_idle() and is_due):
            self._report()

    def close(self) -> None:
        self._report()

    def _is_idle(self) -> bool:
        return not self._gauges.get("num_requests_running") and not self._gauges.get(
            "num_requests_waiting"
        )

    def _report(self) -> None:
        """Write the line of the window that ends with the last sample, if anything happened in it,
        and open the next window."""
        sums = self._sums
        self._sums = Counter()
        start_s = self._start_s
        self._start_s = self._last_s
        if start_s is None or (self._is_idle() and not any(sums.values())):
            return
        self._reported_s = self._last_s
        elapsed_s = self._last_s - start_s
        if queries := sums["prefix_cache_queries_total"]:
            self._hit_rate = sums["prefix_cache_hits_total"] / queries
        line = (
            f"Engine {self._engine:03d}: Avg prompt throughput: "
            f"{_rate(sums['prompt_tokens_total'], elapsed_s):.1f} tokens/s, Avg generation "
            f"throughput: {_rate(sums['generation_tokens_total'], elapsed_s):.1f} tokens/s, "
            f"Running: {self._gauges.get('num_requests_running', 0):.0f} reqs, Waiting: "
            f"{self._gauges.get('num_requests_waiting', 0):.0f} reqs, KV cache usage: "
            f"{100 * self._gauges.get('kv_cache_usage_perc', 0):.1f}%, Prefix cache hit rate: "
            f"{100 * self._hit_rate:.1f}%"
        )
        if preemptions := sums["num_preemptions_total"]:
            line += f", Preemptions: {preemptions:.0f}"
        logger.info("%s", line)
        if drafted := sums["spec_decode_num_draft_tokens_total"]:
            self._report_drafts(
                drafted,
                sums["spec_decode_num_accepted_tokens_total"],
                sums["spec_decode_num_drafts_total"],
                elapsed_s,
            )

    def _report_drafts(
        self, drafted: float, accepted: float, num_drafts: float, elapsed_s: float
    ) -> None:
        """Writes vLLM's line about speculative decoding. A verified draft always gives one token
        more than the number of accepted ones."""
        logger.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f "
            "tokens/s, Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d "
            "tokens, Avg Draft acceptance rate: %.1f%%",
            1 + accepted / num_drafts if num_drafts else 1.0,
            _rate(accepted, elapsed_s),
            _rate(drafted, elapsed_s),
            accepted,
            drafted,
            100 * accepted / drafted,
        )


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0
