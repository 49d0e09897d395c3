"""The sink passes the contract of its kind and the generic contract."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from pegboard_metrics_zmq.options import ZmqOptions
from pegboard_metrics_zmq.sink import ZmqSink

from pegboard.config.schema import EngineConfig
from pegboard.config.sources import engine_settings
from pegboard.errors import ConfigError, PegboardError
from pegboard.interfaces.metrics import MetricsSetup
from pegboard.plan.sinks import metrics_flags, sink_entries
from pegboard.plugins.discovery import scan
from pegboard.plugins.registry import Registry
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_metrics import MetricsContract

_number = count()


def test_contract() -> None:
    check_entry(installed_entry("metrics", "zmq"))


class TestZmqSink(MetricsContract):
    def sink(self, setup: MetricsSetup) -> ZmqSink:
        return ZmqSink(ZmqOptions(endpoint=f"inproc://contract-{next(_number)}"), setup)


def enabled(**config: Any) -> Registry:
    return Registry(scan(), engine_settings(None, {"kv_events_config": config}).plugins)


def test_the_setting_enables_the_publisher() -> None:
    registry = enabled(enable_kv_cache_events=True, topic="kv", int_block_hashes=False)
    assert "kv_events" in metrics_flags(registry)
    options = registry.options(registry.find("metrics", "zmq"))
    assert (options.topic, options.int_block_hashes, options.endpoint) == (
        "kv",
        False,
        "tcp://*:5557",
    )
    assert "kv_events" in metrics_flags(enabled(enable_kv_cache_events=True, publisher=None))
    silent = EngineConfig(disable_log_stats=True)
    assert [entry.name for entry in sink_entries(registry, silent, "engine")] == ["zmq"]
    for off in ({}, {"enable_kv_cache_events": True, "publisher": "null"}, {"publisher": "zmq"}):
        assert "kv_events" not in metrics_flags(enabled(**off))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="expected true or false for enable_kv_cache_events, got 'yes'"
    ):
        enabled(enable_kv_cache_events="yes")
    with pytest.raises(PegboardError, match="topics"):
        registry = enabled(enable_kv_cache_events=True, topics="kv")
        registry.options(registry.find("metrics", "zmq"))
