"""Spec of the api `pooling`."""

from __future__ import annotations

from pegboard.interfaces.api import ApiSpec

POOLING = ApiSpec(
    api="1.0", implementation="pegboard_api_pooling.api:PoolingApi", flags=frozenset({"adapters"})
)
