"""The metrics page: the names, types, labels and buckets that dashboards read, and correct
numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_metrics_prometheus.options import PrometheusOptions
from pegboard_metrics_prometheus.sink import PrometheusSink
from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.metrics.catalogue import engine_metrics
from pegboard.interfaces.metrics import Metric, MetricsSetup, Sample, series
from pegboard_server.http_metrics import HTTP_METRICS
from pegboard_testing.contract_metrics import OWN, random_sample
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_limits import fake_limits

FIXTURE = Path(__file__).parent / "vllm_metrics.tsv"
ENGINE = engine_metrics(
    fake_limits(max_model_len=2048, max_drafts=2, max_loras=1),
    cache_config={"block_size": "16"},
    show_hidden="0.12",
)


def make_sink(
    metrics: tuple[Metric, ...] = (*ENGINE, *HTTP_METRICS), **options: object
) -> PrometheusSink:
    sink = PrometheusSink(PrometheusOptions(**options), MetricsSetup("org/model"))  # type: ignore[arg-type]
    sink.declare(metrics)
    return sink


def families(sink: PrometheusSink) -> dict[str, Family]:
    return {
        family.name: family
        for family in text_string_to_metric_families(generate_latest(sink.registry).decode())
    }


def everything(sink: PrometheusSink) -> None:
    """At least one series of every metric."""
    metrics = (*ENGINE, *HTTP_METRICS)
    keys = {metric.name: series(metric.name, *("1" for _ in metric.labels)) for metric in metrics}
    sink.publish(
        Sample(
            1.0,
            {keys[metric.name]: 1.0 for metric in metrics if metric.type == "gauge"},
            {keys[metric.name]: 1.0 for metric in metrics if metric.type == "counter"},
            {
                keys[metric.name]: [1.0]
                for metric in metrics
                if metric.type in ("histogram", "summary")
            },
        )
    )


def fixture() -> Iterator[tuple[str, str, list[str], list[float]]]:
    for line in FIXTURE.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, kind, labels, buckets = line.split("\t")
            yield name, kind, labels.split(), [float(edge) for edge in buckets.split()]


@pytest.mark.parametrize(
    ("name", "kind", "labels", "buckets"),
    list(fixture()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dashboards_for_vllm_find_what_they_read(
    name: str, kind: str, labels: list[str], buckets: list[float]
) -> None:
    sink = make_sink()
    everything(sink)
    family = families(sink)[name]
    assert family.type == kind
    for sample in family.samples:
        own = [label for label in sample.labels if label != "le"]
        assert "*" in labels or sorted(own) == sorted(labels)
        assert (
            sample.labels.get("model_name", "org/model") == "org/model"
            and sample.labels.get("engine", "0") == "0"
        )
    if kind == "counter":
        assert {sample.name for sample in family.samples} == {f"{name}_total"}
    edges = {
        float(sample.labels["le"]) for sample in family.samples if sample.name == f"{name}_bucket"
    }
    assert edges == ({*buckets, float("inf")} if kind == "histogram" else set())


def test_nothing_else_has_vllms_prefix() -> None:
    sink = make_sink()
    everything(sink)
    known = {name for name, *_ in fixture()}
    own = {"pegboard_plugin_seconds", "pegboard_step_seconds"}
    assert {
        name for name in families(sink) if not name.startswith(("process_", "python_"))
    } == known | own


def test_series_exist_before_anything_happens() -> None:
    """Before the first request, a dashboard shows 0 and not "no data". A rate over the first
    request is right."""
    found = families(make_sink())
    assert [sample.value for sample in found["vllm:num_requests_running"].samples] == [0]
    reasons = {
        sample.labels["finished_reason"]: sample.value
        for sample in found["vllm:request_success"].samples
    }
    assert reasons == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert len(found["vllm:e2e_request_latency_seconds"].samples) == 21 + 3


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_numbers_are_the_sums_of_the_samples(seed: int) -> None:
    """The counts are right, and histograms are cumulative."""
    rng = np.random.default_rng(seed)
    sink = make_sink(OWN)
    samples = [random_sample(rng, float(step)) for step in range(10)]
    for sample in samples:
        sample.engine = 0
        sink.publish(sample)
    found = families(sink)
    name = "inter_token_latency_seconds"
    values = [value for sample in samples for value in sample.observations.get(name, ())]
    by_name = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in found[f"vllm:{name}"].samples
    }
    assert (
        by_name[f"vllm:{name}_count", None] == by_name[f"vllm:{name}_bucket", "+Inf"] == len(values)
    )
    assert by_name[f"vllm:{name}_sum", None] == pytest.approx(sum(values))
    for (_, edge), count in by_name.items():
        assert edge is None or count == sum(value <= float(edge) for value in values)
    tokens = sum(sample.counters.get("generation_tokens_total", 0) for sample in samples)
    assert [sample.value for sample in found["vllm:generation_tokens"].samples] == [tokens]


def test_two_engines_have_a_label_each() -> None:
    sink = make_sink()
    for engine in (0, 1):
        sink.publish(Sample(1.0, counters={"generation_tokens_total": engine + 5.0}, engine=engine))
    tokens = families(sink)["vllm:generation_tokens"].samples
    assert {sample.labels["engine"]: sample.value for sample in tokens} == {"0": 5, "1": 6}


def test_the_prefix_is_the_users() -> None:
    sink = make_sink(prefix="llm_", process_metrics=False)
    everything(sink)
    names = set(families(sink))
    assert (
        "llm_num_requests_running" in names
        and "http_requests" in names
        and "pegboard_step_seconds" in names
    )
    assert not any(name.startswith(("vllm:", "process_", "python_")) for name in names)
    with pytest.raises(ValidationError, match="letters, digits"):
        PrometheusOptions(prefix="my prefix")


def test_a_real_engines_samples() -> None:
    sink = make_sink(engine_metrics(fake_limits()))
    engine = FakeEngine(metrics=[sink])
    for index in range(5):
        engine.generate(
            range(2 + index), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        )
    found = families(sink)
    totals = {
        name: found[f"vllm:{name}"].samples[0].value
        for name in ("prompt_tokens", "generation_tokens", "num_requests_running")
    }
    assert totals == {
        "prompt_tokens": 2 + 3 + 4 + 5 + 6,
        "generation_tokens": 20,
        "num_requests_running": 0,
    }
    reasons = {
        sample.labels["finished_reason"]: sample.value
        for sample in found["vllm:request_success"].samples
    }
    assert reasons == {"stop": 0, "length": 5, "abort": 0, "error": 0}


def test_odd_label_values_are_escaped() -> None:
    sink = make_sink()
    name = 'a"b\\c\nd|e%7C'
    sink.publish(Sample(1.0, {series("lora_requests_info", "1", "", name): 5.0}))
    (sample,) = families(sink)["vllm:lora_requests_info"].samples
    assert sample.labels["running_lora_adapters"] == name
