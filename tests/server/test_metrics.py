"""/metrics and traces of a real server: the scraped numbers agree with what clients received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from prometheus_client.parser import text_string_to_metric_families
from server_process import HTTP, MODEL, Server, wait_until

COMMON = {"model_name", "engine", "le", "status"}
Values = dict[tuple[str, str], float]
"""Maps (name of the sample, value of its own label) to its value."""


def scrape(server: Server) -> Values:
    text = HTTP.get(f"{server.url}/metrics").raise_for_status().text
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [
                value
                for label, value in sorted(sample.labels.items())
                if label not in ("model_name", "engine", "le", "status")
            ]
            key = sample.name, " ".join(own)
            found[key] = found.get(key, 0) + sample.value
            assert sample.labels.get("model_name", MODEL) == MODEL
    return found


def gained(before: Values, after: Values, name: str, own: str = "") -> float:
    return after[name, own] - before.get((name, own), 0)


def test_scrapes_while_serving(server: Server) -> None:
    client = server.client()
    before = scrape(server)
    stream = client.completions.create(
        model=MODEL,
        prompt="One two three",
        max_tokens=200,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until(
        lambda: scrape(server)["vllm:num_requests_running", ""] == 1, "the request is seen running"
    )
    usages = [chunk.usage for chunk in stream if chunk.usage is not None]
    for stop, max_tokens in ((None, 5), (None, 7), ([" the", " a", "e"], 50)):
        answer = client.completions.create(
            model=MODEL,
            prompt="One two three",
            max_tokens=max_tokens,
            temperature=0,
            stop=stop,
            n=1,
        )
        usages.append(answer.usage)
    refused = HTTP.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": -1})
    assert refused.status_code == 400
    server.wait_until_idle()
    wait_until(
        lambda: gained(before, scrape(server), "vllm:request_success_total", "stop") == 1,
        "the stop string is counted",
    )
    after = scrape(server)

    assert [after[f"vllm:num_requests_{state}", ""] for state in ("running", "waiting")] == [0, 0]
    assert gained(before, after, "vllm:prompt_tokens_total") == sum(
        usage.prompt_tokens for usage in usages if usage
    )
    told = [usage.completion_tokens for usage in usages if usage]
    assert gained(before, after, "vllm:generation_tokens_total") >= sum(told) and told[0] == 200
    assert gained(before, after, "vllm:request_success_total", "length") == 3
    assert gained(before, after, "vllm:time_to_first_token_seconds_count") == 4
    assert gained(before, after, "vllm:e2e_request_latency_seconds_count") == 4
    times = [
        gained(before, after, f"vllm:{name}_seconds_sum")
        for name in ("time_to_first_token", "e2e_request_latency")
    ]
    assert 0 < times[0] < times[1]
    assert gained(before, after, "http_requests_total", "/v1/completions POST") == 5
    assert ("pegboard_plugin_seconds_total", "model LlamaForCausalLM forward") in after


class Collector(ThreadingHTTPServer):
    """Receives spans over HTTP and keeps them by request id."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.spans: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(
            self.rfile.read(int(self.headers["Content-Length"]))
        )
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {item.key: item.value for item in span.attributes}
                    self.server.spans[values[("gen_ai.request.id")].string_value] = (span, values)  # type: ignore[attr-defined]
        body = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_two_api_processes_show_one_server_and_trace_its_requests(
    start_server: Callable[..., Server], collector: Collector
) -> None:
    flags = [
        "--api-server-count",
        "2",
        "--otlp-traces-endpoint",
        collector.url,
        "--collect-detailed-traces",
        "model",
    ]
    server = start_server(
        *flags, "--metrics.opentelemetry.protocol", "http/protobuf", OTEL_BSP_SCHEDULE_DELAY="100"
    )
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    parent_id = "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    for _ in range(6):  # each on its own connection, so on either process
        body = {"prompt": "One two", "max_tokens": 3, "ignore_eos": True}
        HTTP.post(f"{server.url}/v1/completions", json=body, headers=headers).raise_for_status()

    def shows_all(values: Values) -> bool:
        ended = values["vllm:request_success_total", "length"]
        answered = values["http_requests_total", "/v1/completions POST"]
        return ended == answered == 6

    wait_until(
        lambda: all(shows_all(scrape(server)) for _ in range(10)),
        "every process shows all six requests",
    )
    wait_until(lambda: len(collector.spans) == 6, "six spans have arrived")
    for span, values in collector.spans.values():
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
            "llm_request",
            trace_id,
            parent_id,
        )
        assert values["gen_ai.response.model"].string_value == MODEL
        assert values["gen_ai.usage.completion_tokens"].int_value == 3
        assert values["gen_ai.latency.time_in_model_forward"].double_value > 0
        assert "gen_ai.latency.time_in_model_execute" not in values
