"""The spec. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

LABEL = ApiSpec(
    api="1.0",
    implementation="pegboard_api_label.api:LabelApi",
    options="pegboard_api_label.options:LabelOptions",
)
