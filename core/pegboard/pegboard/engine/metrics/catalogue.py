"""The metrics of an engine. `catalogue.toml` contains the table of all metrics."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pegboard.config.limits import Limits
from pegboard.interfaces.metrics import COMMON_LABELS, Metric, series

_TABLE = tomllib.loads(
    files("pegboard.engine.metrics").joinpath("catalogue.toml").read_text("utf-8")
)
ROWS: dict[str, dict[str, Any]] = _TABLE["metrics"]
"""The name of a metric → its row of the table."""


def by_label(name: str) -> dict[str, str]:
    """Return label value → series, for a metric with one label that has fixed values."""
    return {value: series(name, value) for value in ROWS[name]["values"]}


def token_buckets(most: int) -> tuple[float, ...]:
    """Return the bucket limits 1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


def engine_metrics(
    limits: Limits, *, cache_config: Mapping[str, str] | None = None, show_hidden: str | None = None
) -> tuple[Metric, ...]:
    """Return all metrics of an engine. cache_config: labels of cache_config_info. show_hidden:
    metrics that vLLM has hidden since this version are included."""
    there = {
        "watched_blocks": limits.kv_metrics_share,
        "drafts": limits.max_drafts,
        "adapters": limits.max_loras,
    }
    there["cache_config"] = len(cache_config or ())
    buckets = {**_TABLE["buckets"], "tokens": token_buckets(limits.max_model_len)}
    labels = {"cache_config_info": tuple(cache_config or ())}
    shown = _numbers(show_hidden or "999")  # without a version, what was hidden in any stays hidden
    places = [str(place) for place in range(limits.max_drafts)]
    return tuple(
        Metric(
            name,
            row["type"],
            row["help"],
            tuple(buckets[row["buckets"]]) if "buckets" in row else (),
            labels.get(name, tuple(row.get("labels", ()))),
            tuple(
                (value,)
                for value in row.get("values", places if row.get("labels") == ["position"] else ())
            ),
            tuple(row.get("common", COMMON_LABELS)),
            row.get("prefixed", True),
            row.get("latest", False),
        )
        for name, row in ROWS.items()
        if ("where" not in row or there[row["where"]])
        and ("hidden_in" not in row or _numbers(row["hidden_in"]) >= shown)
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]
