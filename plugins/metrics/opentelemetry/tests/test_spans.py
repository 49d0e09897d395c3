"""The spans that are sent, their content, and that the engine never waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from pegboard_metrics_opentelemetry.options import PROTOCOL_VARIABLE, OpenTelemetryOptions
from pegboard_metrics_opentelemetry.sink import OpenTelemetrySink, make_exporter
from pydantic import ValidationError

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.metrics import MetricsSetup, RequestRecord, Sample
from pegboard_testing.fake_engine import FakeEngine

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def options(**more: object) -> OpenTelemetryOptions:
    return OpenTelemetryOptions(endpoint="grpc://collector:4317", **more)  # type: ignore[arg-type]


def record(**more: object) -> RequestRecord:
    times = {
        "arrival_s": 100.0,
        "first_scheduled_s": 100.5,
        "first_token_s": 102.0,
        "last_token_s": 106.0,
        "finished_s": 106.25,
    }
    sizes = {
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_generated_tokens": 9,
        "finish_reasons": ("length",),
    }
    return RequestRecord(request_id="r1", **{**times, **sizes, **more})  # type: ignore[arg-type]


def spans_of(*records: RequestRecord, **more: object) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    sink = OpenTelemetrySink(options(**more), MetricsSetup("org/model"), exporter)
    sink.publish(Sample(1.0, requests=records))
    sink.close()
    return exporter.get_finished_spans()


def test_a_span_has_vllms_name_and_attributes() -> None:
    (span,) = spans_of(record(max_tokens=9, temperature=0.5, top_p=0.9, n=1))
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER and span.parent is None
    assert (span.start_time, span.end_time) == (100_000_000_000, 106_250_000_000)
    assert dict(span.attributes or {}) == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": "org/model",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 9,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.e2e": 6.25,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.time_in_model_prefill": 1.5,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_in_model_inference": 5.5,
    }


def test_what_never_came_has_no_attribute() -> None:
    """The request was aborted while it waited. It spent no time in the model, so these attributes
    are not written."""
    (span,) = spans_of(
        record(
            first_scheduled_s=0.0, first_token_s=0.0, last_token_s=0.0, finish_reasons=("abort",)
        )
    )
    latencies = [name for name in span.attributes or {} if name.startswith("gen_ai.latency.")]
    assert latencies == ["gen_ai.latency.e2e"]


@pytest.mark.parametrize("state", ["a=b,c=d", None])
def test_a_clients_trace_is_continued(state: str | None) -> None:
    headers = {"traceparent": TRACEPARENT, **({"tracestate": state} if state else {})}
    (span,) = spans_of(record(trace_headers=headers))
    assert f"{span.context.trace_id:032x}" == TRACE_ID and span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.context.trace_state.get("a") == ("b" if state else None)


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-00", TRACEPARENT[:-3]])
def test_a_header_that_is_none_starts_a_new_trace(header: str) -> None:
    (span,) = spans_of(record(trace_headers={"traceparent": header}))
    assert span.parent is None and span.context.trace_id


@pytest.mark.parametrize(
    ("collect", "extra"),
    [
        (None, set()),
        ("model", {"forward"}),
        ("worker", {"execute"}),
        (["model", "worker"], {"forward", "execute"}),
        ("model,worker", {"forward", "execute"}),
        ("all", {"forward", "execute"}),
    ],
)
def test_details(collect: object, extra: set[str]) -> None:
    more = {} if collect is None else {"collect": collect}
    (span,) = spans_of(record(forward_s=1.0, execute_s=2.0), **more)
    found = {name.removeprefix("gen_ai.latency.time_in_model_") for name in span.attributes or {}}
    assert found & {"forward", "execute"} == extra


def test_one_span_per_request_of_a_real_engine() -> None:
    exporter = InMemorySpanExporter()
    sink = OpenTelemetrySink(options(collect="all"), MetricsSetup("m"), exporter)
    engine = FakeEngine(metrics=[sink], measured={"wants_records": True})
    params = SamplingParams(n=3, seed=0, max_tokens=5, ignore_eos=True)
    engine.add("many", [2, 3, 4], params, trace_headers={"traceparent": TRACEPARENT})
    engine.add("one", [2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    engine.run()
    engine.engine.stop()
    spans = {
        (span.attributes or {})["gen_ai.request.id"]: span for span in exporter.get_finished_spans()
    }
    assert set(spans) == {"many", "one"} and len(exporter.get_finished_spans()) == 2
    many, one = (dict(spans[name].attributes or {}) for name in ("many", "one"))
    assert many["gen_ai.usage.completion_tokens"] == 15 and many["gen_ai.request.n"] == 3
    assert spans["many"].parent is not None and spans["one"].parent is None
    parts = one["gen_ai.latency.time_in_model_prefill"] + one["gen_ai.latency.time_in_model_decode"]
    assert parts == pytest.approx(one["gen_ai.latency.time_in_model_inference"])
    assert (
        0
        < one["gen_ai.latency.time_in_model_forward"]
        <= one["gen_ai.latency.time_in_model_execute"]
    )


class Stuck(SpanExporter):
    """A collector that does not answer."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_a_stuck_collector_costs_spans_not_time() -> None:
    """While nothing can be sent, publishing continues at the same cost, spans that do not fit the
    queue are dropped, and stopping does not hang."""
    stuck = Stuck()
    sink = OpenTelemetrySink(options(max_queue_size=16), MetricsSetup("m"), stuck)
    started = time.process_time()
    for _ in range(500):
        sink.publish(Sample(1.0, requests=[record()]))
    assert time.process_time() - started < 1.0
    sink.close()
    stuck.gate.set()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "localhost:4317"}, "starts with grpc://"),
        ({"endpoint": "ftp://host"}, "starts with grpc://"),
        ({"endpoint": "grpc://"}, "names a host"),
        ({"endpoint": "http://h", "collect": "everything"}, "model"),
        ({"endpoint": "http://h", "protocol": "udp"}, "grpc"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        OpenTelemetryOptions(**given)  # type: ignore[arg-type]


def test_without_an_endpoint_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match="set --otlp-traces-endpoint"):
        OpenTelemetrySink(OpenTelemetryOptions(), MetricsSetup("m"))


def test_the_protocol_is_the_options_else_the_environments_else_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(**more: object) -> str:
        exporter = make_exporter(options(**more))
        exporter.shutdown()
        return type(exporter).__module__.split(".")[4]

    monkeypatch.delenv(PROTOCOL_VARIABLE, raising=False)
    assert chosen() == "grpc"
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/protobuf")
    assert chosen() == "http" and chosen(protocol="grpc") == "grpc"
    monkeypatch.setenv(PROTOCOL_VARIABLE, "smoke")
    with pytest.raises(
        ConfigError, match=f"{PROTOCOL_VARIABLE}: expected grpc or http/protobuf, got 'smoke'"
    ):
        chosen()
