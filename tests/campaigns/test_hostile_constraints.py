"""A sample of the campaign over hostile constraints (hostile_constraints.py). `make nightly` runs
it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import hostile_constraints as campaign
from generated_bodies import write_model
from server_process import MODEL, Server


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="reads the memory of processes in /proc"
)
def test_hostile_constraints_disturb_nobody(tmp_path: Path) -> None:
    """Schemas that are refused and schemas that take seconds do not hold up a small one, and what
    they took is given back. Ambiguous constraints end by themselves or with an error that names the
    constraint, and the server goes on."""
    with Server(write_model(tmp_path / "model"), tmp_path, "--dtype", "float32") as server:
        found = campaign.Campaign(server.wait_until_ready())
        found.first_token_s(0)
        for schemas in (
            [campaign.refused(i) for i in range(3)],
            [campaign.large(i) for i in range(2)],
        ):
            times, num_mib = found.row("sample", schemas, num_first=3)
            assert times[-1] < 20 and num_mib < 100  # a busy machine is slow
        answers = found.slow([campaign.SLOW[1], campaign.SLOW[4]], 20)
        assert len(answers) == 2 and all(
            answer.endswith(": ended") or "constraint" in answer for answer in answers
        ), answers
        assert server.status("/health") == 200 and server.client().completions.create(
            model=MODEL, prompt="a", max_tokens=1
        )
