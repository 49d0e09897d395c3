"""Measurements of the engine: gathered during a step, published once at its end. A sink that fails is switched off, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pegboard.interfaces.metrics import Metric, MetricsSink, Sample
from pegboard.log import get_logger
from pegboard.request import Request

log = get_logger(__name__)

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 50000.0, 100000.0)

METRICS: tuple[Metric, ...] = (
    Metric("num_requests_running", "gauge", "Completions that own a row"),
    Metric("num_requests_waiting", "gauge", "Completions waiting for a row"),
    Metric("kv_cache_usage_perc", "gauge", "Fraction of KV blocks in use, 0 to 1"),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of completions that produced their first token"),
    Metric("generation_tokens_total", "counter", "Tokens sampled and kept"),
    Metric("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache"),
    Metric("prefix_cache_hits_total", "counter", "Of those, tokens found"),
    Metric("num_preemptions_total", "counter", "Completions that gave their blocks back and recomputed"),
    Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified"),
    Metric("spec_decode_num_accepted_tokens_total", "counter", "Of those, tokens accepted"),
    *(
        Metric(f"request_finished_{reason}_total", "counter", f"Completions that ended with finish reason {reason!r}")
        for reason in ("stop", "length", "abort", "error")
    ),
    Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token", SECONDS),
    Metric("inter_token_latency_seconds", "histogram", "Between two outputs of a completion", SECONDS),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to the end", SECONDS),
    Metric("request_queue_time_seconds", "histogram", "From arrival to the first row", SECONDS),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a finished completion", TOKENS),
    Metric("request_generation_tokens", "histogram", "Output tokens of a finished completion", TOKENS),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in a step", TOKENS),
)


class StepMetrics:
    """Counts and observations since the last publish. All times are on the engine's clock."""

    def __init__(self, sinks: Sequence[MetricsSink], clock: Callable[[], float]) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._counters: dict[str, float] = {}
        self._observations: dict[str, list[float]] = {}
        self._totals: dict[str, float] = {}
        for sink in sinks:
            self._call(sink, "declare", METRICS)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter."""
        self._counters[name] = self._counters.get(name, 0) + n

    def count_up_to(self, name: str, total: float) -> None:
        """Set a counter that is kept as a total elsewhere."""
        before = self._totals.get(name, 0)
        if total != before:
            self._totals[name] = total
            self.count(name, total - before)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram."""
        self._observations.setdefault(name, []).append(value)

    def tokens(self, request: Request, num_tokens: int, now_s: float) -> None:
        """A completion has gained tokens."""
        self.count("generation_tokens_total", num_tokens)
        if request.first_token_s:
            self.observe("inter_token_latency_seconds", now_s - request.last_token_s)
        else:
            request.first_token_s = now_s
            self.count("prompt_tokens_total", request.num_prompt_tokens)
            self.observe("time_to_first_token_seconds", now_s - request.arrival_s)
            self.observe("request_queue_time_seconds", request.first_scheduled_s - request.arrival_s)
        request.last_token_s = now_s

    def drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A row has verified drafts."""
        self.count("spec_decode_num_draft_tokens_total", num_drafts)
        self.count("spec_decode_num_accepted_tokens_total", num_accepted)

    def finished(self, request: Request, now_s: float) -> None:
        """A completion has ended."""
        self.count(f"request_finished_{request.finish_reason}_total")
        self.observe("e2e_request_latency_seconds", now_s - request.arrival_s)
        self.observe("request_prompt_tokens", request.num_prompt_tokens)
        self.observe("request_generation_tokens", request.num_output_tokens)

    def publish(self, gauges: Mapping[str, float]) -> None:
        """Hand everything gathered to every sink and start anew."""
        sample = Sample(self._clock(), gauges, self._counters, self._observations)
        self._counters, self._observations = {}, {}
        for sink in tuple(self._sinks):
            self._call(sink, "publish", sample)

    def close(self) -> None:
        """No more samples."""
        for sink in tuple(self._sinks):
            self._call(sink, "close")
        self._sinks.clear()

    def _call(self, sink: MetricsSink, method: str, *args: object) -> None:
        try:
            getattr(sink, method)(*args)
        except Exception:  # metrics must never stop the engine: any failure switches the sink off
            self._sinks.remove(sink)
            log.warning(
                "metrics sink %s failed in %s and is off for the rest of the run", type(sink).__name__, method, exc_info=True
            )
