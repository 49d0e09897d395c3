"""The contract of the kind, and segments that are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_weight_transfer_shared_memory.options import SharedMemoryOptions
from pegboard_weight_transfer_shared_memory.segment import FOLDER
from pegboard_weight_transfer_shared_memory.trainer import shared
from pegboard_weight_transfer_shared_memory.transfer import SharedMemoryTransfer
from torch import Tensor

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_transfer import WeightTransfer, WeightTransferSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_transfer import WeightTransferContract, listed

WEIGHTS = {"a": torch.ones(40), "b": torch.zeros(3, 2)}


def test_contract() -> None:
    check_entry(installed_entry("weight_transfer", "shared_memory"))


def make_transfer(**options: Any) -> SharedMemoryTransfer:
    return SharedMemoryTransfer(SharedMemoryOptions(**options), WeightTransferSetup("cpu"))


class TestSharedMemory(WeightTransferContract):
    def transfer(self) -> WeightTransfer:
        return make_transfer()

    @contextmanager
    def sent(self, weights: Mapping[str, Tensor]) -> Iterator[Mapping[str, Any]]:
        with shared(weights) as info:
            yield {"segment": info["segment"]}


def test_a_segment_is_private_and_goes() -> None:
    with shared(WEIGHTS) as info:
        path = FOLDER / info["segment"]
        assert path.stat().st_mode & 0o777 == 0o600
        assert info["shapes"] == [[40], [3, 2]] and info["dtype_names"] == ["float32"] * 2
    assert not path.exists()


@pytest.mark.parametrize(
    "name",
    ["", "other", "pegboard-weights-/../a", "../pegboard-weights-a", "pegboard-weights-é"],
)
def test_names_that_clients_may_not_give(name: object) -> None:
    with pytest.raises(RequestError) as refusal:
        next(make_transfer().receive(listed(WEIGHTS), {"segment": name}))
    assert refusal.value.parameter == "update_info"


def test_a_segment_that_is_gone_too_short_or_a_link(tmp_path: Path) -> None:
    def read(name: str) -> None:
        [*make_transfer().receive(listed(WEIGHTS), {"segment": name})]

    with shared(WEIGHTS) as info:
        name = info["segment"]
        link = FOLDER / f"{name}-link"
        link.symlink_to(FOLDER / name)
        try:
            with pytest.raises(ModelError, match="cannot be read"):
                read(link.name)
        finally:
            link.unlink()
        received = make_transfer().receive(listed(WEIGHTS), {"segment": name})
        assert torch.equal(next(received), WEIGHTS["a"])
        os.truncate(FOLDER / name, 170)
        with pytest.raises(ModelError, match="became shorter"):
            next(received)
        with pytest.raises(ModelError, match="has 170 bytes; its tensors take 216"):
            read(name)
    with pytest.raises(ModelError, match="cannot be read"):
        read(name)


def test_another_prefix() -> None:
    with shared(WEIGHTS, prefix="mine-") as info:
        transfer = make_transfer(prefix="mine-")
        assert len([*transfer.receive(listed(WEIGHTS), {"segment": info["segment"]})]) == 2
