"""The metrics sink `opentelemetry`: every finished request becomes a span, which a thread of the
OpenTelemetry library sends."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pegboard.errors import ConfigError
from pegboard.interfaces.metrics import Metric, MetricsSetup, RequestRecord, Sample
from pegboard_metrics_opentelemetry.options import OpenTelemetryOptions

SPAN_NAME = "llm_request"
SCOPE = "vllm.llm_engine"
"""The instrumentation scope. It is the same as vLLM's, because back ends filter by it."""
SERVICE = "pegboard"
FLUSH_S = 1.0
"""Seconds that sending the queued spans may take when the engine stops."""


class OpenTelemetrySink:
    """exporter: receives the spans instead of the endpoint, for tests."""

    def __init__(
        self,
        options: OpenTelemetryOptions,
        setup: MetricsSetup,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._options = options
        self._model_name = setup.model_name
        # a name from the environment wins
        named = Resource({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(
            resource=Resource.create().merge(named), shutdown_on_exit=False
        )
        processor = BatchSpanProcessor(
            exporter or make_exporter(options),
            max_queue_size=options.max_queue_size,
            max_export_batch_size=min(512, options.max_queue_size),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()

    def declare(self, metrics: Sequence[Metric]) -> None:
        """Does nothing: spans do not depend on the declared metrics."""

    def publish(self, sample: Sample) -> None:
        """Queue a span for each request. A full queue drops the span. This method sends nothing."""
        for record in sample.requests:
            context = self._propagator.extract(dict(record.trace_headers or {}))
            span = self._tracer.start_span(
                SPAN_NAME,
                context=context,
                kind=SpanKind.SERVER,
                attributes=self.attributes(record),
                start_time=_ns(record.arrival_s),
            )
            span.end(_ns(record.finished_s))

    def close(self) -> None:
        """Send the queued spans, within FLUSH_S. The library itself would wait half a minute for a
        missing collector."""
        leaving = Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        leaving.start()
        leaving.join(FLUSH_S)

    def attributes(self, record: RequestRecord) -> dict[str, AttributeValue]:
        """Returns vLLM's attributes. Events that never happened and parameters that were not given
        have none."""
        values: dict[str, AttributeValue | None] = {
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.temperature": record.temperature,
            "gen_ai.request.top_p": record.top_p,
            "gen_ai.request.n": record.n,
            "gen_ai.response.model": record.lora_name or self._model_name,
            "gen_ai.response.finish_reasons": list(record.finish_reasons),
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_generated_tokens,
            "gen_ai.usage.num_sequences": record.n,
            "gen_ai.latency.e2e": record.finished_s - record.arrival_s,
        }
        if record.first_scheduled_s:
            values["gen_ai.latency.time_in_queue"] = record.first_scheduled_s - record.arrival_s
        if record.first_token_s:
            values["gen_ai.latency.time_to_first_token"] = record.first_token_s - record.arrival_s
            values["gen_ai.latency.time_in_model_prefill"] = (
                record.first_token_s - record.first_scheduled_s
            )
            values["gen_ai.latency.time_in_model_decode"] = (
                record.last_token_s - record.first_token_s
            )
            values["gen_ai.latency.time_in_model_inference"] = (
                record.last_token_s - record.first_scheduled_s
            )
        if self._options.wants("model"):
            values["gen_ai.latency.time_in_model_forward"] = record.forward_s
        if self._options.wants("worker"):
            values["gen_ai.latency.time_in_model_execute"] = record.execute_s
        return {name: value for name, value in values.items() if value is not None}


def make_exporter(options: OpenTelemetryOptions) -> SpanExporter:
    """Returns the exporter for the endpoint. It connects when it has something to send. Raises
    ConfigError for an unknown protocol or a missing endpoint."""
    try:
        protocol = options.chosen_protocol
    except ValueError as error:
        raise ConfigError(str(error)) from error
    endpoint = options.endpoint
    if endpoint is None:
        raise ConfigError(
            "traces need a collector: set --otlp-traces-endpoint, for example to "
            "grpc://localhost:4317"
        )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        is_insecure = not endpoint.startswith("https://")
        return GrpcExporter(
            endpoint.replace("grpc://", "http://", 1),
            insecure=is_insecure,
            timeout=options.timeout_s,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter(endpoint.replace("grpc://", "http://", 1), timeout=options.timeout_s)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
