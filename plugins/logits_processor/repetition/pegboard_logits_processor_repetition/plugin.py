"""Spec of the logits processor `repetition`."""

from __future__ import annotations

from pegboard.interfaces.logits_processor import LogitsProcessorSpec

REPETITION = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_repetition.processor:RepetitionProcessor",
    options="pegboard_logits_processor_repetition.options:RepetitionOptions",
    arguments=("stop_repetition",),
    validate="pegboard_logits_processor_repetition.request:validate",
    flags=frozenset({"host_tokens"}),
)
