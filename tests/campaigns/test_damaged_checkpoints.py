"""A sample of the campaign over damaged checkpoints (damaged_checkpoints.py), small enough for every run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import damaged_checkpoints as campaign

SAMPLE = 20


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return campaign.write_all_healthy(tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize("kind", campaign.KINDS)
def test_a_damaged_checkpoint_is_served_or_refused_by_name(kind: str, healthy: Path) -> None:
    found = campaign.run(kind, SAMPLE, healthy, seed=1, limit_s=60)  # a busy machine is slow
    assert found.bad == []
    assert sum(found.counts.values()) == SAMPLE


def test_the_healthy_checkpoints_are_served(healthy: Path) -> None:
    assert campaign.serve(healthy / "hf") == "served"
    assert campaign.serve(healthy / "model.gguf") == "served"
