"""Fixtures: the vocabulary of the real model, and every installed backend with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.config.schema import Settings
from pegboard.config.sources import engine_settings
from pegboard.engine.build import structured_output_setup
from pegboard.interfaces.structured_output import StructuredOutputSetup
from pegboard.plan.engine_plan import resolve
from pegboard.plugins.registry import Registry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real_model)


@pytest.fixture(scope="session")
def registry_and_setup(smollm2_gguf: Path) -> tuple[Registry, StructuredOutputSetup]:
    settings: Settings = engine_settings(str(smollm2_gguf), {})
    plan, registry = resolve(settings)
    return registry, structured_output_setup(registry, plan)


@pytest.fixture(scope="session")
def setup_(registry_and_setup: tuple[Registry, StructuredOutputSetup]) -> StructuredOutputSetup:
    return registry_and_setup[1]
