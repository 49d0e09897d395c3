"""Makes a metrics sink of Pegboard from a stat logger in vLLM's form. It runs in the API process,
as in vLLM, and gets the samples of all engines a few times per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

from pegboard.interfaces.metrics import Metric, MetricsSetup, RequestRecord, Sample, series
from pegboard_vllm_compat.stat_interface import (
    FinishedRequestStats,
    IterationStats,
    MultiModalCacheStats,
    PrefixCacheStats,
    PromptTokenStats,
    SchedulerStats,
    SpecDecodingStats,
    StatLogger,
)
from pegboard_vllm_compat.targets import load

LOG_INTERVAL_S = 10.0
"""Seconds between two calls of `log`."""
SLEEP_LEVELS = {"weights_offloaded": 1, "discard_all": 2}
GIVEN: dict[str, Callable[..., Any]] = {}
"""Target → what the program of this process passed to `AsyncLLM(stat_loggers=[…])`."""


def give(factory: Callable[..., Any]) -> str:
    """Keep a factory and return its target, which has a meaning in this process only."""
    target = f"given:{len(GIVEN)}"
    GIVEN[target] = factory
    return target


def is_stat_logger(value: Any) -> bool:
    """Return whether this is a class with vLLM's methods."""
    return isinstance(value, type) and issubclass(value, StatLogger)


class VllmStatLogger:
    """Implements `pegboard.interfaces.metrics.MetricsSink`. target: a class or factory in vLLM's
    form. There is one stat logger per engine. base_model: the model as the user named it."""

    target: ClassVar[str]
    base_model: ClassVar[str] = ""
    shadow: ClassVar[bool] = False
    spec_fields: ClassVar[Mapping[str, Any]] = {"process": "api"}
    requests: ClassVar[bool] = True

    def __init__(self, options: None, setup: MetricsSetup) -> None:
        self._factory = GIVEN.get(self.target) or load(self.target, shadow=self.shadow)
        self._config = vllm_config(setup, self.base_model)
        self._loggers: dict[int, Any] = {}
        self._log_s: float | None = None
        self._first = setup.engine

    def declare(self, metrics: Sequence[Metric]) -> None:
        """See `MetricsSink.declare`."""
        self._logger(self._first)

    def _logger(self, engine: int) -> Any:
        """Return the logger of an engine."""
        if engine not in self._loggers:
            self._loggers[engine] = self._factory(self._config, engine)
            self._loggers[engine].log_engine_initialized()
        return self._loggers[engine]

    def publish(self, sample: Sample) -> None:
        """See `MetricsSink.publish`. What the HTTP server measures is left out."""
        gauges = sample.gauges
        if "num_requests_running" not in gauges:
            return
        logger = self._logger(sample.engine)
        states = {name: series("engine_sleep_state", name) for name in ("awake", *SLEEP_LEVELS)}
        if states["awake"] in gauges and hasattr(logger, "record_sleep_state"):
            levels = (level for name, level in SLEEP_LEVELS.items() if gauges.get(states[name]))
            logger.record_sleep_state(int(gauges[states["awake"]]), next(levels, 0))
        logger.record(
            scheduler_stats(sample),
            iteration_stats(sample),
            mm_cache_stats=MultiModalCacheStats(*_pair(sample, "mm_cache")),
            engine_idx=sample.engine,
        )
        if self._log_s is None:
            self._log_s = sample.time_s
        if sample.time_s - self._log_s >= LOG_INTERVAL_S:
            self._log_s = sample.time_s
            self._log()

    def _log(self) -> None:
        for logger in self._loggers.values():
            logger.log()

    def close(self) -> None:
        """See `MetricsSink.close`."""
        self._log()


def vllm_config(setup: MetricsSetup, base_model: str) -> Any:
    """Return the parts of vLLM's configuration that are known here."""
    model = SimpleNamespace(
        model=base_model or setup.model_name,
        tokenizer=base_model or setup.model_name,
        served_model_name=setup.model_name,
    )
    return SimpleNamespace(instance_id=uuid4().hex[:5], model_config=model)


def _count(sample: Sample, name: str) -> int:
    return int(sample.counters.get(name, 0))


def _pair(sample: Sample, name: str) -> tuple[int, int]:
    return _count(sample, f"{name}_queries_total"), _count(sample, f"{name}_hits_total")


def scheduler_stats(sample: Sample) -> SchedulerStats:
    """Return the state of an engine."""
    external = _pair(sample, "external_prefix_cache")
    prefix = "spec_decode_num_"
    accepted: list[int] = []
    while (
        key := series(f"{prefix}accepted_tokens_per_pos_total", str(len(accepted)))
    ) in sample.counters:
        accepted.append(_count(sample, key))
    drafts = SpecDecodingStats(
        _count(sample, f"{prefix}drafts_total"),
        _count(sample, f"{prefix}draft_tokens_total"),
        _count(sample, f"{prefix}accepted_tokens_total"),
        accepted,
    )
    return SchedulerStats(
        num_running_reqs=int(sample.gauges.get("num_requests_running", 0)),
        num_waiting_reqs=int(sample.gauges.get("num_requests_waiting", 0)),
        kv_cache_usage=sample.gauges.get("kv_cache_usage_perc", 0.0),
        prefix_cache_stats=PrefixCacheStats(*_pair(sample, "prefix_cache")),
        connector_prefix_cache_stats=PrefixCacheStats(*external) if any(external) else None,
        spec_decoding_stats=drafts if drafts.num_drafts else None,
    )


def iteration_stats(sample: Sample) -> IterationStats:
    """Return what happened since the last sample."""
    seen = sample.observations
    computed, local, external = (
        _count(sample, series("prompt_tokens_by_source_total", source))
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    )
    num_prompt_tokens = _count(sample, "prompt_tokens_total")
    return IterationStats(
        iteration_timestamp=sample.time_s,
        num_generation_tokens=_count(sample, "generation_tokens_total"),
        num_prompt_tokens=num_prompt_tokens,
        num_preempted_reqs=_count(sample, "num_preemptions_total"),
        prompt_token_stats=PromptTokenStats(computed, local, external, num_prompt_tokens),
        finished_requests=[finished(record) for record in sample.requests],
        max_num_generation_tokens_iter=_numbers(seen, "request_max_num_generation_tokens"),
        n_params_iter=_numbers(seen, "request_params_n"),
        time_to_first_tokens_iter=list(seen.get("time_to_first_token_seconds", ())),
        inter_token_latencies_iter=list(seen.get("inter_token_latency_seconds", ())),
    )


def _numbers(seen: Mapping[str, Sequence[float]], name: str) -> list[int]:
    return [int(value) for value in seen.get(name, ())]


def finished(record: RequestRecord) -> FinishedRequestStats:
    """Return what is known of a request that has ended. Times that did not begin are 0."""
    first = record.first_scheduled_s
    begun = record.first_token_s
    decode_s = record.last_token_s - begun if begun else 0.0
    others = record.num_generated_tokens - record.n
    return FinishedRequestStats(
        request_id=record.request_id,
        finish_reason=record.finish_reasons[0] if record.finish_reasons else "abort",
        e2e_latency=record.finished_s - record.arrival_s,
        num_prompt_tokens=record.num_prompt_tokens,
        num_generation_tokens=record.num_generated_tokens,
        num_cached_tokens=record.num_cached_tokens,
        max_tokens_param=record.max_tokens,
        queued_time=first - record.arrival_s if first else 0.0,
        prefill_time=begun - first if begun else 0.0,
        inference_time=record.last_token_s - first if begun else 0.0,
        decode_time=decode_s,
        mean_time_per_output_token=decode_s * record.n / others if others > 0 else 0.0,
    )
