"""A sample of the campaign over damaged checkpoints (damaged_checkpoints.py). `make nightly` runs
it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import damaged_checkpoints as campaign

SAMPLE = 10


@pytest.mark.slow
def test_a_damaged_checkpoint_is_served_or_refused_by_name(tmp_path: Path) -> None:
    healthy = campaign.write_all_healthy(tmp_path / "healthy")
    found = campaign.Campaign(list(campaign.KINDS), SAMPLE, healthy, seed=1).run()
    assert {kind: result.bad for kind, result in found.items() if result.bad} == {}
    assert [sum(result.counts.values()) for result in found.values()] == [SAMPLE] * len(
        campaign.KINDS
    )
