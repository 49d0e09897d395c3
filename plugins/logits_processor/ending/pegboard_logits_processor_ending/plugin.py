"""Spec of the logits processor `ending`."""

from __future__ import annotations

from pegboard.interfaces.logits_processor import LogitsProcessorSpec

ENDING = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_ending.processor:EndingProcessor",
    options="pegboard_logits_processor_ending.options:EndingOptions",
    arguments=("ending_tokens",),
    validate="pegboard_logits_processor_ending.request:validate",
    flags=frozenset({"host_tokens"}),
)
