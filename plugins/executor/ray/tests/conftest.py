"""One Ray for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_ray() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="warning")
    yield
    ray.shutdown()
