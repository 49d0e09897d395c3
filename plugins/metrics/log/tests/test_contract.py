"""The sink passes the contract of its kind and the generic contract."""

from __future__ import annotations

from pegboard_metrics_log.sink import LogSink

from pegboard.interfaces.metrics import MetricsSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_metrics import MetricsContract


def test_contract() -> None:
    check_entry(installed_entry("metrics", "log"))


class TestLogSink(MetricsContract):
    def sink(self, setup: MetricsSetup) -> LogSink:
        return LogSink(None, setup)
