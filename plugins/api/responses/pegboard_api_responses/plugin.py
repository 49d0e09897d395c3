"""Spec of the api `responses`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

RESPONSES = ApiSpec(
    api="1.0",
    implementation="pegboard_api_responses.api:ResponsesApi",
    options="pegboard_api_responses.options:ResponsesOptions",
    flags=frozenset({"adapters"}),
)
