"""The simulated replicas answer as engines do."""

from __future__ import annotations

import pytest
from replicas import ROUTERS, Costs, Simulation, between

COSTS = Costs((0.003, 0.0035, 0.004, 0.005, 0.008, 0.013), (0.006, 0.022, 0.09, 0.18))


def test_values_between_measured_ones_and_beyond() -> None:
    assert between((0, 10, 20), (0.0, 1.0, 3.0), 5) == pytest.approx(0.5)
    assert between((0, 10, 20), (0.0, 1.0, 3.0), 10) == pytest.approx(1.0)
    assert between((0, 10, 20), (0.0, 1.0, 3.0), 30) == pytest.approx(5.0)


def test_the_balance_finds_more_in_the_caches() -> None:
    shares = {}
    for name, router in ROUTERS.items():
        simulation = Simulation(6, COSTS, router)
        simulation.run(12.0)
        shares[name] = simulation.cached / simulation.prompt_tokens
        assert simulation.tokens > 1000 and len(simulation.first_s) > 50
        running = sum(
            replica.engine.stats()["num_requests_running"]
            + replica.engine.stats()["num_requests_waiting"]
            for replica in simulation.replicas
        )
        assert running == len(simulation.users), "no request is lost"
    assert max(shares, key=shares.__getitem__) == "Pegboard's balance"
