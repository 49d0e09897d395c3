"""A trace from the client to the engine: the client's span is the parent of the server's one. The
program is also the collector that the server sends its spans to.

export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf
pegboard serve --otlp-traces-endpoint http://localhost:4318/v1/traces
python examples/online/opentelemetry_client.py
"""

import argparse
import secrets
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(BaseHTTPRequestHandler):
    """Keeps the spans that are posted to it."""

    spans: list = []

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--port", type=int, default=4318)
    words = parser.parse_args()
    trace = secrets.token_hex(16)
    parent = secrets.token_hex(8)
    with HTTPServer(("127.0.0.1", words.port), Collector) as collector:
        httpx.post(
            f"{words.url}/v1/completions",
            json={"prompt": "San Francisco is a", "max_tokens": 8},
            headers={"traceparent": f"00-{trace}-{parent}-01"},
            timeout=60,
        ).raise_for_status()
        while not (spans := [one for one in Collector.spans if one.trace_id.hex() == trace]):
            collector.handle_request()
    for span in spans:
        print(f"{span.name}, child of the client's span: {span.parent_span_id.hex() == parent}")
        for attribute in span.attributes:
            print(f"  {attribute.key} = {str(attribute.value).strip()}")


if __name__ == "__main__":
    main()
