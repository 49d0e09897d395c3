"""Stat loggers in vLLM's form are metrics sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pegboard_vllm_compat import stat_adapter
from pegboard_vllm_compat.entry_points import table
from pegboard_vllm_compat.processors import adapted_loggers
from pegboard_vllm_compat.serve import with_plugins
from pegboard_vllm_compat.stat_adapter import VllmStatLogger
from pegboard_vllm_compat.stat_interface import StatLogger

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.metrics import MetricsSetup, Sample, series
from pegboard_testing.contract_metrics import MetricsContract
from pegboard_testing.fake_engine import FakeEngine


class Recorder(StatLogger):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.model = vllm_config.model_config.model
        self.calls: list[Any] = [engine_index]

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self.calls.append((scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))

    def log_engine_initialized(self) -> None:
        self.calls.append("ready")

    def log(self) -> None:
        self.calls.append("log")

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        self.calls.append(("sleep", is_awake, level))


class Adapter(VllmStatLogger):
    target = "given:test"
    base_model = "here"


def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    monkeypatch.setitem(stat_adapter.GIVEN, "given:test", Recorder)
    return Adapter(None, MetricsSetup("served"))


class TestContract(MetricsContract):
    def sink(self, setup: MetricsSetup) -> VllmStatLogger:
        stat_adapter.GIVEN["given:test"] = Recorder
        return Adapter(None, setup)


def test_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that vLLM's loggers read."""
    sink = adapter(monkeypatch)
    engine = FakeEngine(metrics=[sink], measured={"wants_records": True})
    engine.generate([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    sink.close()
    logger = sink._loggers[0]
    assert logger.model == "here" and logger.calls[:2] == [0, "ready"]
    records = [call for call in logger.calls if isinstance(call, tuple) and call[0] != "sleep"]
    steps = [iteration for _, iteration, _, _ in records]
    assert sum(step.num_generation_tokens for step in steps) == 4
    assert sum(step.num_prompt_tokens for step in steps) == 3
    assert sum(step.prompt_token_stats.computed for step in steps) == 3
    assert sum(len(step.time_to_first_tokens_iter) for step in steps) == 1
    (request,) = [each for step in steps for each in step.finished_requests]
    assert (request.num_prompt_tokens, request.num_generation_tokens) == (3, 4)
    assert (request.finish_reason, request.max_tokens_param) == ("length", 4)
    assert request.e2e_latency >= request.inference_time >= request.decode_time >= 0
    assert logger.calls[-1] == "log"


def test_the_fields_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = adapter(monkeypatch)
    sink.declare(())
    positions = {
        series("spec_decode_num_accepted_tokens_per_pos_total", str(place)): 2 - place
        for place in range(2)
    }
    counters = {
        "prefix_cache_queries_total": 8,
        "prefix_cache_hits_total": 3,
        "mm_cache_queries_total": 2,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 6,
        "spec_decode_num_accepted_tokens_total": 3,
        **positions,
    }
    gauges = {
        "num_requests_running": 2.0,
        "num_requests_waiting": 1.0,
        "kv_cache_usage_perc": 0.5,
        series("engine_sleep_state", "awake"): 0.0,
        series("engine_sleep_state", "discard_all"): 1.0,
    }
    sink.publish(Sample(5.0, gauges, counters, engine=1))
    sink.publish(Sample(6.0, {}, {"http_requests_total": 1}))
    sink.publish(Sample(16.0, {"num_requests_running": 0.0}))
    assert sink._loggers[0].calls[2:] and "log" in sink._loggers[0].calls
    number, ready, sleep, record, log = sink._loggers[1].calls
    assert (number, ready, sleep, log) == (1, "ready", ("sleep", 0, 2), "log")
    scheduler, _, media, engine = record
    assert (scheduler.num_running_reqs, scheduler.num_waiting_reqs) == (2, 1)
    assert scheduler.kv_cache_usage == 0.5 and engine == 1
    cache = scheduler.prefix_cache_stats
    assert (cache.queries, cache.hits, media.queries) == (8, 3, 2)
    assert scheduler.spec_decoding_stats.num_accepted_tokens_per_pos == [2, 1]
    with pytest.raises(AttributeError, match=r"does not measure SchedulerStats\.cudagraph_stats"):
        _ = scheduler.cudagraph_stats


@pytest.mark.usefixtures("vllm")
def test_an_installed_stat_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """serve and AsyncLLM use it. One of another form, or that is gone, is left out."""
    info = tmp_path / "counts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\na = counts:Logger\nb = counts:other\nc = counts:gone\n"
    )
    (tmp_path / "counts.py").write_text(
        "from vllm.v1.metrics.loggers import StatLoggerBase\n"
        "class Logger(StatLoggerBase):\n    pass\n\ndef other():\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (item,) = adapted_loggers(None)
    assert (item.kind, item.name, item.target) == ("metrics", "vllm-0-Logger", "counts:Logger")
    words = with_plugins(["here", "--shadow"])
    assert "'metrics:vllm-0-Logger'" in Path(words[-1]).read_text("utf-8")
    assert "  a = counts:Logger  (counts)" in table()
