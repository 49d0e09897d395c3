"""What the engine measures: vLLM's names, types, labels and buckets where vLLM has the metric, our own names elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pegboard.interfaces.metrics import Metric, series

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
STAY_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0,
    1800.0,
)  # fmt: skip
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

FINISH_REASONS = ("stop", "length", "abort", "error")
SUCCESS = {reason: series("request_success_total", reason) for reason in FINISH_REASONS}
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
BY_SOURCE = {source: series("prompt_tokens_by_source_total", source) for source in PROMPT_SOURCES}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")

PLUGIN_SECONDS = "pegboard_plugin_seconds_total"
STEP_SECONDS = "pegboard_step_seconds_total"
STEP_PARTS = ("schedule", "execute", "apply")


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What of an engine decides which metrics it has.

    max_drafts: above 0 where drafts are on. max_loras: above 0 where adapters are on. cache_config: labels of
    cache_config_info. watches_blocks: how long KV blocks stay is measured. plugin_names: kind → names of the plugins in use.
    show_hidden: version whose hidden metrics are shown.
    """

    max_model_len: int
    max_drafts: int = 0
    max_loras: int = 0
    cache_config: Mapping[str, str] = field(default_factory=dict)
    plugin_names: Mapping[str, str] = field(default_factory=dict)
    show_hidden: str | None = None
    watches_blocks: bool = False


def token_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


def engine_metrics(engine: MeasuredEngine) -> tuple[Metric, ...]:
    """All metrics of an engine."""
    return (
        *_load(engine),
        *_tokens(engine),
        *_blocks(engine),
        *_requests(engine),
        *_drafts(engine),
        *_costs(),
        *hidden_metrics(engine.show_hidden),
    )


def _load(engine: MeasuredEngine) -> Iterator[Metric]:
    yield Metric("num_requests_running", "gauge", "Completions that own a row")
    yield Metric("num_requests_waiting", "gauge", "Completions waiting for a row")
    yield Metric("kv_cache_usage_perc", "gauge", "Fraction of KV blocks in use, 0 to 1")
    yield Metric(
        "engine_sleep_state",
        "gauge",
        "1 for the state the engine is in",
        labels=("sleep_state",),
        initial=tuple((state,) for state in SLEEP_STATES),
    )
    if engine.cache_config:
        yield Metric(
            "cache_config_info",
            "gauge",
            "Settings of the KV cache, as labels",
            labels=tuple(engine.cache_config),
            common=("engine",),
            latest=True,
        )
    if engine.max_loras:
        yield Metric(
            "lora_requests_info",
            "gauge",
            "Adapters of running and waiting requests, as labels; the value is the unix time",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            common=(),
            latest=True,
        )


def _tokens(engine: MeasuredEngine) -> Iterator[Metric]:
    yield Metric("prompt_tokens_total", "counter", "Prompt tokens of completions that produced their first token")
    yield Metric("prompt_tokens_cached_total", "counter", "Of those, tokens that came from a cache")
    yield Metric(
        "prompt_tokens_by_source_total",
        "counter",
        "Prompt tokens by where their keys and values came from",
        labels=("source",),
        initial=tuple((source,) for source in PROMPT_SOURCES),
    )
    yield Metric("generation_tokens_total", "counter", "Tokens sampled and kept")
    yield Metric("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache")
    yield Metric("prefix_cache_hits_total", "counter", "Of those, tokens found")
    yield Metric("external_prefix_cache_queries_total", "counter", "Tokens looked up at KV connectors")
    yield Metric("external_prefix_cache_hits_total", "counter", "Of those, tokens found")
    yield Metric("num_preemptions_total", "counter", "Completions that gave their blocks back and recomputed")
    yield Metric("iteration_tokens_total", "histogram", "Tokens computed in a step", STEP_TOKENS)


def _blocks(engine: MeasuredEngine) -> Iterator[Metric]:
    if not engine.watches_blocks:
        return
    yield Metric("kv_block_lifetime_seconds", "histogram", "From taking a KV block to losing its content", STAY_S)
    yield Metric("kv_block_idle_before_evict_seconds", "histogram", "From the last use of a KV block to losing it", STAY_S)
    yield Metric("kv_block_reuse_gap_seconds", "histogram", "Between two uses of a KV block by prefix hits", STAY_S)


def _requests(engine: MeasuredEngine) -> Iterator[Metric]:
    tokens = token_buckets(engine.max_model_len)
    reasons = tuple((reason,) for reason in FINISH_REASONS)
    yield Metric(
        "request_success_total",
        "counter",
        "Completions that ended, by finish reason",
        labels=("finished_reason",),
        initial=reasons,
    )
    yield Metric("corrupted_requests_total", "counter", "Completions whose logits held NaN")
    yield Metric("request_prompt_tokens", "histogram", "Prompt tokens of a completion that ended", tokens)
    yield Metric("request_generation_tokens", "histogram", "Output tokens of a completion that ended", tokens)
    yield Metric("request_max_num_generation_tokens", "histogram", "Output tokens of a request's longest completion", tokens)
    yield Metric("request_params_n", "histogram", "Parameter n of a request", COMPLETIONS)
    yield Metric("request_params_max_tokens", "histogram", "Parameter max_tokens of a request", tokens)
    yield Metric("request_prefill_kv_computed_tokens", "histogram", "Prompt tokens computed, not taken from a cache", tokens)
    yield Metric("request_num_preemptions", "histogram", "How often a completion was preempted", PREEMPTIONS)
    yield Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token", FIRST_TOKEN_S)
    yield Metric("inter_token_latency_seconds", "histogram", "Between two outputs of a completion", TOKEN_S)
    yield Metric("request_time_per_output_token_seconds", "histogram", "Mean time per token after the first", TOKEN_S)
    yield Metric("e2e_request_latency_seconds", "histogram", "From arrival to the end", REQUEST_S)
    yield Metric("request_queue_time_seconds", "histogram", "From arrival to the first row", REQUEST_S)
    yield Metric("request_prefill_time_seconds", "histogram", "From the first row to the first token", REQUEST_S)
    yield Metric("request_decode_time_seconds", "histogram", "From the first token to the last", REQUEST_S)
    yield Metric("request_inference_time_seconds", "histogram", "From the first row to the last token", REQUEST_S)


def _drafts(engine: MeasuredEngine) -> Iterator[Metric]:
    if not engine.max_drafts:
        return
    yield Metric("spec_decode_num_drafts_total", "counter", "Rows that verified drafts, summed over the steps")
    yield Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified")
    yield Metric("spec_decode_num_accepted_tokens_total", "counter", "Of those, tokens accepted")
    yield Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Draft tokens accepted, by their place in the draft",
        labels=("position",),
        initial=tuple((str(position),) for position in range(engine.max_drafts)),
    )


def _costs() -> Iterator[Metric]:
    yield Metric(
        PLUGIN_SECONDS,
        "counter",
        "Time spent in plugins, by kind, name and what they did",
        labels=("kind", "name", "part"),
        prefixed=False,
    )
    yield Metric(
        STEP_SECONDS,
        "counter",
        "Time of the engine's loop, by what it did",
        labels=("part",),
        initial=tuple((part,) for part in STEP_PARTS),
        prefixed=False,
    )


HIDDEN = {
    (0, 12): Metric(
        "time_per_output_token_seconds", "histogram", "Old name of inter_token_latency_seconds, to be removed", TOKEN_S
    ),
}
"""vLLM's version that hid a metric → the metric."""

SAME_AS = {"inter_token_latency_seconds": "time_per_output_token_seconds"}
"""A metric → the hidden one that repeats it."""


def hidden_metrics(version: str | None) -> list[Metric]:
    """Those that vLLM hid in this version or later."""
    if version is None:
        return []
    major, minor = version.split(".")[:2]
    return [metric for hidden_in, metric in HIDDEN.items() if (int(major), int(minor)) <= hidden_in]
