"""Writes samples as they arrive. The file is the only state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.interfaces.metrics import Metric, MetricsSetup, Sample

if TYPE_CHECKING:
    from pegboard_metrics_jsonl.options import JsonlOptions


class JsonlSink:
    """Writes one line per sample: the time, the model, and every gauge, counter and observation in
    the sample."""

    def __init__(self, options: JsonlOptions, setup: MetricsSetup) -> None:
        self._model_name = setup.model_name
        # line by line, so that a reader sees whole lines
        self._file = options.path.open("a", encoding="utf-8", buffering=1)

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Do nothing: every line names its metrics."""

    def publish(self, sample: Sample) -> None:
        values = {
            **sample.gauges,
            **sample.counters,
            **{name: list(seen) for name, seen in sample.observations.items()},
        }
        self._file.write(
            json.dumps({"time_s": sample.time_s, "model": self._model_name, **values}) + "\n"
        )

    def close(self) -> None:
        self._file.close()
