"""Writes the Grafana dashboards beside this file: latency, throughput, KV cache, speculative
decoding and plugins. Edit the panels here, and run `python make_dashboards.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
CHOSEN = 'model_name=~"$model",instance=~"$instance"'
WIDTH = 12
HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """One graph. queries: legend → PromQL. unit: a unit of Grafana."""

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""


def quantiles(metric: str) -> dict[str, str]:
    """Return the median, the 95th and the 99th percentile of a histogram."""
    by_bucket = f"sum by (le) (rate({metric}_bucket{{{CHOSEN}}}[$__rate_interval]))"
    return {
        f"p{round(100 * share)}": f"histogram_quantile({share}, {by_bucket})"
        for share in (0.5, 0.95, 0.99)
    }


def total(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{CHOSEN}}})"


def rate(metric: str, by: str = "") -> str:
    within = f"sum{f' by ({by})' if by else ''}"
    return f"{within} (rate({metric}{{{CHOSEN}}}[$__rate_interval]))"


def ratio(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


DASHBOARDS = {
    "latency": [
        Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("Whole requests", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Waiting for a row", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
        Panel("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
    ],
    "throughput": [
        Panel(
            "Tokens per second",
            "short",
            {
                "prompt": rate("vllm:prompt_tokens_total"),
                "output": rate("vllm:generation_tokens_total"),
            },
        ),
        Panel(
            "Requests",
            "short",
            {
                "running": total("vllm:num_requests_running"),
                "waiting": total("vllm:num_requests_waiting"),
            },
        ),
        Panel(
            "Requests that ended, per second",
            "reqps",
            {"{{finished_reason}}": rate("vllm:request_success_total", "finished_reason")},
        ),
        Panel("Tokens in a step", "short", quantiles("vllm:iteration_tokens_total")),
        Panel("Prompt tokens of a request", "short", quantiles("vllm:request_prompt_tokens")),
        Panel("Output tokens of a request", "short", quantiles("vllm:request_generation_tokens")),
    ],
    "kv_cache": [
        Panel("KV blocks in use", "percentunit", {"{{instance}}": "vllm:kv_cache_usage_perc"}),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            {"share": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")},
        ),
        Panel(
            "Preemptions per second",
            "short",
            {"preemptions": rate("vllm:num_preemptions_total")},
            "Each computes its prompt again: the KV cache is too small for the load.",
        ),
        Panel(
            "Prompt tokens by source, per second",
            "short",
            {"{{source}}": rate("vllm:prompt_tokens_by_source_total", "source")},
        ),
        Panel(
            "Found by KV connectors",
            "percentunit",
            {
                "share": ratio(
                    "vllm:external_prefix_cache_hits_total",
                    "vllm:external_prefix_cache_queries_total",
                )
            },
        ),
        Panel(
            "Idle time of blocks before they are evicted",
            "s",
            quantiles("vllm:kv_block_idle_before_evict_seconds"),
            "Needs --kv-cache-metrics.",
        ),
    ],
    "speculative_decoding": [
        Panel(
            "Accepted drafts",
            "percentunit",
            {
                "share": ratio(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_draft_tokens_total",
                )
            },
        ),
        Panel(
            "Tokens per step of a row",
            "short",
            {
                "mean": "1 + "
                + ratio(
                    "vllm:spec_decode_num_accepted_tokens_total",
                    "vllm:spec_decode_num_drafts_total",
                )
            },
        ),
        Panel(
            "Accepted per second, by position",
            "short",
            {
                "{{position}}": rate(
                    "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
                )
            },
        ),
    ],
    "plugins": [
        Panel(
            "Time in plugins",
            "percentunit",
            {
                "{{kind}} {{name}} {{part}}": rate(
                    "pegboard_plugin_seconds_total", "kind, name, part"
                )
            },
            "Seconds in each second.",
        ),
        Panel(
            "Time in the engine's loop",
            "percentunit",
            {"{{part}}": rate("pegboard_step_seconds_total", "part")},
            "`execute` waits for the workers.",
        ),
        Panel(
            "HTTP requests per second",
            "reqps",
            {
                "{{handler}} {{status}}": "sum by (handler, status) "
                "(rate(http_requests_total[$__rate_interval]))"
            },
        ),
        Panel(
            "HTTP requests, 95th percentile",
            "s",
            {
                "{{handler}}": "histogram_quantile(0.95, sum by (handler, le) "
                "(rate(http_request_duration_seconds_bucket[$__rate_interval])))"
            },
        ),
    ],
}


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    """Return what Grafana imports: two panels a row, and variables for the model and server."""
    return {
        "uid": f"pegboard-{name.replace('_', '-')}",
        "title": f"Pegboard: {name.replace('_', ' ')}",
        "schemaVersion": 39,
        "tags": ["pegboard"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "links": [{"type": "dashboards", "tags": ["pegboard"], "asDropdown": False}],
        "templating": {
            "list": [_variable("model", "model_name"), _variable("instance", "instance")]
        },
        "panels": [_graph(index, panel) for index, panel in enumerate(panels)],
    }


def _variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(vllm:num_requests_running, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _graph(index: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {
            "x": index % 2 * WIDTH,
            "y": index // 2 * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": query,
                "legendFormat": legend,
            }
            for at, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def files() -> dict[Path, str]:
    """Return each dashboard's file and text."""
    return {
        FOLDER / f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
