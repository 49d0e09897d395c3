"""Spec of the api `anthropic`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

ANTHROPIC = ApiSpec(
    api="1.0",
    implementation="pegboard_api_anthropic.api:AnthropicApi",
    flags=frozenset({"adapters"}),
)
