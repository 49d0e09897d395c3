"""The spec of this package. Its module imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.logits_processor import LogitsProcessorSpec

PER_REQUEST = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_per_request.processor:PerRequestProcessor",
    options="pegboard_logits_processor_per_request.options:PerRequestOptions",
    flags=frozenset({"host_tokens"}),
)
