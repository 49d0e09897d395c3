"""The spec of the logits processor `top_n_sigma`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.logits_processor import LogitsProcessorSpec

TOP_N_SIGMA = LogitsProcessorSpec(
    api="1.0",
    implementation="pegboard_logits_processor_top_n_sigma.processor:TopNSigma",
    arguments=("top_n_sigma",),
    validate="pegboard_logits_processor_top_n_sigma.request:validate",
)
