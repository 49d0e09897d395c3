"""The sink passes the contract of its kind, and both plugins pass the generic contract."""

from __future__ import annotations

import pytest
from pegboard_metrics_prometheus.options import PrometheusOptions
from pegboard_metrics_prometheus.sink import PrometheusSink

from pegboard.interfaces.metrics import MetricsSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_metrics import MetricsContract


@pytest.mark.parametrize("kind", ["metrics", "api"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "prometheus"))


class TestPrometheusSink(MetricsContract):
    def sink(self, setup: MetricsSetup) -> PrometheusSink:
        return PrometheusSink(PrometheusOptions(), setup)
