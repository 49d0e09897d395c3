"""Specs of this package."""

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
NGRAMS = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_repetition.ngrams:NgramProcessor",
    arguments=("ngram_size", "window_size", "whitelist_token_ids"),
    validate="pegboard_logits_processor_repetition.ngram_request:validate",
    flags=frozenset({"host_tokens"}),
)
