"""The contract of the kind for gloo, groups that meet at a port, and addresses."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pegboard_collective_torch.collective import TorchCollective, server_at

from pegboard.errors import CannotRecord, ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard_testing.contract_collective import CollectiveContract
from pegboard_testing.contract_generic import check_entry, installed_entry


@pytest.mark.parametrize("name", ["gloo", "nccl"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("collective", name))


class TestGloo(CollectiveContract):
    def collective(self, setup: CollectiveSetup) -> TorchCollective:
        return TorchCollective(None, setup)

    def rank_meets(self, setup: CollectiveSetup, address: str) -> tuple[list[float], list[float]]:
        """Be in two groups at one port."""
        first = replace(setup, address=address)
        second = replace(first, group="data")
        with self.member(first) as one, self.member(second) as two:
            x = torch.full((1, 2), float(setup.rank))
            return two.all_reduce(x.clone())[0].tolist(), one.all_gather(x)[0].tolist()

    def test_ranks_that_meet_at_a_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        found = self.on_ranks("rank_meets", f"tcp://127.0.0.1:{port}", ranks=(0, 1))
        assert found == [([1.0, 1.0], [0.0, 0.0, 1.0, 1.0])] * 2


@pytest.mark.parametrize("address", ["", "file:", "tcp://host", "udp://host:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"file:///path or tcp://host:port"):
        TorchCollective(None, CollectiveSetup("tensor", (0,), 0, address, "cpu", 1.0))


def alone(folder: Path, device: str = "cpu") -> TorchCollective:
    setup = CollectiveSetup("tensor", (0,), 0, f"{folder.as_uri()}/meet", device, 1.0)
    return TorchCollective(None, setup)


def test_a_device_without_nccl(tmp_path: Path) -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with pytest.raises(ConfigError, match="no NCCL"):
        alone(tmp_path, "cuda:0")


def test_stand_ins_are_refused(tmp_path: Path) -> None:
    class StandIn(torch.Tensor):
        pass

    collective = alone(tmp_path)
    with pytest.raises(CannotRecord, match="StandIn"):
        collective.all_reduce(torch.ones(1, 1).as_subclass(StandIn))
    collective.close()
    with pytest.raises(EngineDeadError, match="closed"):
        collective.all_gather(torch.ones(1, 1))


def test_a_port_that_is_still_in_use() -> None:
    """Rank 0 waits until it is free."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        timer = threading.Timer(0.5, holder.close)
        timer.start()
        store = server_at("127.0.0.1", port, True, timedelta(seconds=30))
        timer.join()
    store.set("a", "b")
    assert store.get("a") == b"b"
