"""Spec of the logits processor `ban`."""

from __future__ import annotations

from pegboard.interfaces.logits_processor import LogitsProcessorSpec

BAN = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_ban.processor:BanProcessor",
    options="pegboard_logits_processor_ban.options:BanOptions",
    arguments=(),
)
