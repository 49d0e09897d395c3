"""What the engine measures: vLLM's names, types, labels and buckets where vLLM has the metric, our own names elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.config.limits import Limits
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
AWAKE = series("engine_sleep_state", "awake")
BY_SOURCE = {source: series("prompt_tokens_by_source_total", source) for source in PROMPT_SOURCES}

PLUGIN_SECONDS = "pegboard_plugin_seconds_total"
STEP_SECONDS = "pegboard_step_seconds_total"
STEP_PARTS = ("schedule", "execute", "apply")


def token_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


def engine_metrics(
    limits: Limits, *, cache_config: Mapping[str, str] | None = None, show_hidden: str | None = None
) -> tuple[Metric, ...]:
    """All metrics of an engine. cache_config: labels of cache_config_info. show_hidden: version whose hidden metrics show."""
    metrics = [*ALWAYS, *_requests(token_buckets(limits.max_model_len)), *hidden_metrics(show_hidden)]
    if cache_config:
        text = "Settings of the KV cache, as labels"
        info = Metric("cache_config_info", "gauge", text, labels=tuple(cache_config), common=("engine",), latest=True)
        metrics.append(info)
    if limits.max_loras:
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        text = "Adapters of running and waiting requests, as labels; the value is the unix time"
        metrics.append(Metric("lora_requests_info", "gauge", text, labels=labels, common=(), latest=True))
    if limits.kv_metrics_share:
        metrics += BLOCKS
    if limits.max_drafts:
        metrics += DRAFTS
        places = [str(place) for place in range(limits.max_drafts)]
        name, text = "spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted, by their place in the draft"
        metrics.append(_by(name, text, "position", places))
    return tuple(metrics)


def _by(name: str, help: str, label: str, values: Sequence[str], *, prefixed: bool = True) -> Metric:
    """A counter by the values of one label."""
    return Metric(name, "counter", help, labels=(label,), initial=tuple((value,) for value in values), prefixed=prefixed)


ALWAYS = (
    Metric("num_requests_running", "gauge", "Completions that own a row"),
    Metric("num_requests_waiting", "gauge", "Completions waiting for a row"),
    Metric("kv_cache_usage_perc", "gauge", "Fraction of KV blocks in use, 0 to 1"),
    Metric("engine_sleep_state", "gauge", "Always awake", labels=("sleep_state",)),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of completions that produced their first token"),
    Metric("prompt_tokens_cached_total", "counter", "Of those, tokens that came from a cache"),
    _by("prompt_tokens_by_source_total", "Prompt tokens by where their keys and values came from", "source", PROMPT_SOURCES),
    Metric("generation_tokens_total", "counter", "Tokens sampled and kept"),
    Metric("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache"),
    Metric("prefix_cache_hits_total", "counter", "Of those, tokens found"),
    Metric("external_prefix_cache_queries_total", "counter", "Tokens looked up at KV connectors"),
    Metric("external_prefix_cache_hits_total", "counter", "Of those, tokens found"),
    Metric("num_preemptions_total", "counter", "Completions that gave their blocks back and recomputed"),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in a step", STEP_TOKENS),
    _by("request_success_total", "Completions that ended, by finish reason", "finished_reason", FINISH_REASONS),
    Metric("request_params_n", "histogram", "Parameter n of a request", COMPLETIONS),
    Metric("request_num_preemptions", "histogram", "How often a completion was preempted", PREEMPTIONS),
    Metric("time_to_first_token_seconds", "histogram", "From arrival to the first token", FIRST_TOKEN_S),
    Metric("inter_token_latency_seconds", "histogram", "Between two outputs of a completion", TOKEN_S),
    Metric("request_time_per_output_token_seconds", "histogram", "Mean time per token after the first", TOKEN_S),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to the end", REQUEST_S),
    Metric("request_queue_time_seconds", "histogram", "From arrival to the first row", REQUEST_S),
    Metric("request_prefill_time_seconds", "histogram", "From the first row to the first token", REQUEST_S),
    Metric("request_decode_time_seconds", "histogram", "From the first token to the last", REQUEST_S),
    Metric("request_inference_time_seconds", "histogram", "From the first row to the last token", REQUEST_S),
    Metric(
        PLUGIN_SECONDS,
        "counter",
        "Time spent in plugins, by kind, name and what they did",
        labels=("kind", "name", "part"),
        prefixed=False,
    ),
    _by(STEP_SECONDS, "Time of the engine's loop, by what it did", "part", STEP_PARTS, prefixed=False),
)

BLOCKS = (
    Metric("kv_block_lifetime_seconds", "histogram", "From taking a KV block to losing its content", STAY_S),
    Metric("kv_block_idle_before_evict_seconds", "histogram", "From the last use of a KV block to losing it", STAY_S),
    Metric("kv_block_reuse_gap_seconds", "histogram", "Between two uses of a KV block by prefix hits", STAY_S),
)

DRAFTS = (
    Metric("spec_decode_num_drafts_total", "counter", "Rows that verified drafts, summed over the steps"),
    Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified"),
    Metric("spec_decode_num_accepted_tokens_total", "counter", "Of those, tokens accepted"),
)


def _requests(tokens: tuple[float, ...]) -> tuple[Metric, ...]:
    """Token counts of a request, in buckets up to the longest one."""
    return (
        Metric("request_prompt_tokens", "histogram", "Prompt tokens of a completion that ended", tokens),
        Metric("request_generation_tokens", "histogram", "Output tokens of a completion that ended", tokens),
        Metric("request_max_num_generation_tokens", "histogram", "Output tokens of a request's longest completion", tokens),
        Metric("request_params_max_tokens", "histogram", "Parameter max_tokens of a request", tokens),
        Metric("request_prefill_kv_computed_tokens", "histogram", "Prompt tokens computed, not taken from a cache", tokens),
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
