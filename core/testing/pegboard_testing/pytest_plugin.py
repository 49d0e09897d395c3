"""pytest plugin of Pegboard: fixtures for plugin authors. Every pytest run loads it where pegboard is installed, so it imports
nothing from Pegboard until a fixture is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pegboard_testing.fake_distributions import FakeDistributions


@pytest.fixture
def fake_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["FakeDistributions"]:
    """A folder on sys.path in which a test installs fake plugin distributions."""
    from pegboard_testing.fake_distributions import FakeDistributions

    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    yield FakeDistributions(root)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the default model. It is fetched on first use; the test is skipped when this fails."""
    from pegboard.config.schema import Settings
    from pegboard.errors import PegboardError
    from pegboard.plan.engine_plan import resolve

    try:
        plan, _ = resolve(Settings())
    except PegboardError as error:
        pytest.skip(f"the default model is not available: {error}")
    return plan.checkpoint.path
