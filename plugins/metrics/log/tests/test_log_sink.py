"""The times at which the sink writes its line, and the content of the line. Time comes from the
samples only."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_metrics_log.sink import LogSink

from pegboard.interfaces.metrics import MetricsSetup, Sample


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    handler = Lines()
    logger = logging.getLogger("pegboard.metrics_log.sink")
    old_level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(old_level)


def _sink() -> LogSink:
    return LogSink(None, MetricsSetup(model_name="m"))


def _sample(time_s: float, running: int = 1, waiting: int = 0, **counters: float) -> Sample:
    gauges = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": 0.041,
    }
    return Sample(time_s=time_s, gauges=gauges, counters=counters)


def test_line_has_the_wording_and_the_rates(lines):
    sink = _sink()
    sink.publish(_sample(100.0))
    sink.publish(
        _sample(
            105.0,
            3,
            2,
            prompt_tokens_total=512,
            prefix_cache_queries_total=80,
            prefix_cache_hits_total=30,
        )
    )
    assert lines == []
    sink.publish(_sample(110.0, 3, 2, generation_tokens_total=1184))
    assert lines == [
        "Engine 000: Avg prompt throughput: 51.2 tokens/s, Avg generation throughput: 118.4 "
        "tokens/s, Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 4.1%, Prefix cache hit rate: "
        "37.5%"
    ]


def test_quiet_intervals_leave_no_line(lines):
    sink = _sink()
    for second in range(0, 100, 5):
        sink.publish(_sample(float(second), running=0))
    sink.close()
    assert lines == []


def test_waiting_without_progress_is_news(lines):
    sink = _sink()
    sink.publish(_sample(0.0, running=0, waiting=1))
    sink.publish(_sample(11.0, running=0, waiting=1))
    assert len(lines) == 1
    assert "Waiting: 1 reqs" in lines[0]


def test_a_short_burst_is_reported_when_the_engine_goes_idle(lines):
    sink = _sink()
    sink.publish(_sample(0.0))
    sink.publish(_sample(2.0, running=0, generation_tokens_total=20))
    assert len(lines) == 1
    assert "generation throughput: 10.0 tokens/s" in lines[0]
    sink.publish(_sample(3.0))
    sink.publish(_sample(4.0, running=0, generation_tokens_total=20))
    assert len(lines) == 1, "at most one line per interval"


def test_idle_time_is_in_no_average(lines):
    sink = _sink()
    sink.publish(_sample(0.0))
    sink.publish(_sample(2.0, running=0, generation_tokens_total=20))
    sink.publish(_sample(1000.0))
    sink.publish(_sample(1010.0, generation_tokens_total=50))
    assert "generation throughput: 5.0 tokens/s" in lines[1]


def test_a_slow_step_keeps_its_time(lines):
    sink = _sink()
    sink.publish(_sample(0.0))
    sink.publish(_sample(40.0, prompt_tokens_total=400))
    assert "prompt throughput: 10.0 tokens/s" in lines[0]


def test_hit_rate_is_kept_without_lookups_and_preemptions_are_told(lines):
    sink = _sink()
    sink.publish(_sample(0.0, prefix_cache_queries_total=4, prefix_cache_hits_total=1))
    sink.publish(_sample(10.0))
    sink.publish(_sample(20.0, num_preemptions_total=2))
    assert "hit rate: 25.0%" in lines[1]
    assert "Preemptions" not in lines[0]
    assert lines[1].endswith("Preemptions: 2")


def test_close_flushes_what_is_pending_and_missing_metrics_are_zero(lines):
    sink = _sink()
    sink.publish(Sample(time_s=5.0, counters={"generation_tokens_total": 3}))
    sink.close()
    assert len(lines) == 1
    assert "Running: 0 reqs" in lines[0]


@given(gaps=st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 50)), max_size=60))
@settings(max_examples=50, deadline=None)
def test_every_token_is_in_exactly_one_line(gaps):
    """Rate times window length, summed over all lines, equals the number of tokens, however the
    samples are spaced."""
    sink = _sink()
    windows = []
    sink.publish(_sample(0.0))
    now = 0.0
    start = 0.0
    tokens = 0
    handler = Lines()
    logger = logging.getLogger("pegboard.metrics_log.sink")
    logger.addHandler(handler)
    old_level = logger.level
    logger.setLevel("INFO")
    try:
        for gap, count in gaps:
            now += gap
            tokens += count
            sink.publish(_sample(now, generation_tokens_total=count))
            if len(handler.lines) > len(windows):
                windows.append(now - start)
                start = now
        sink.close()
        windows.extend([now - start] * (len(handler.lines) - len(windows)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old_level)
    rates = [
        float(re.search(r"generation throughput: ([\d.]+)", line)[1]) for line in handler.lines
    ]
    counted = sum(rate * window for rate, window in zip(rates, windows, strict=True))
    assert counted == pytest.approx(tokens, abs=0.051 * sum(windows) + 1e-6)
