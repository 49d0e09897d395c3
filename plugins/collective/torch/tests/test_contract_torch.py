"""The collectives of torch pass the contract of their kind."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from pegboard_collective_torch.groups import check, open_store

from pegboard.errors import CannotRecord, ConfigError
from pegboard_testing.contract_collective import CollectiveContract
from pegboard_testing.contract_generic import check_entry, installed_entry


@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("collective", name))


class TestGloo(CollectiveContract):
    collective = "pegboard_collective_torch.groups:gloo"


def test_ranks_meet_at_a_file_or_a_port() -> None:
    with pytest.raises(ConfigError, match="ranks meet at 'http://x'; expected file:///path or tcp"):
        open_store("http://x", True, timedelta(seconds=1))


def test_a_stand_in_is_refused() -> None:
    class StandIn(torch.Tensor): ...

    with pytest.raises(CannotRecord, match="outside of recordings"):
        check(StandIn())
