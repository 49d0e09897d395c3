"""The contract of the kind, and trainers that do not come or do not send."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from pegboard_weight_transfer_torch.options import TorchOptions
from pegboard_weight_transfer_torch.trainer import Trainer
from pegboard_weight_transfer_torch.transfer import TorchTransfer
from torch import Tensor

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_transfer import WeightTransfer, WeightTransferSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_transfer import WeightTransferContract, listed, weights_of


@pytest.mark.parametrize("name", ["torch", "nccl"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("weight_transfer", name))


def free_place() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}


def connected(timeout_s: float = 20) -> tuple[Trainer, TorchTransfer]:
    place = free_place()
    transfer = TorchTransfer(TorchOptions(timeout_s=timeout_s), WeightTransferSetup("cpu"))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(transfer.init, place)
        trainer = Trainer(place["master_port"], timeout_s=timeout_s)
        answer.result()
    return trainer, transfer


class TestTorch(WeightTransferContract):
    def transfer(self) -> WeightTransfer:
        self.trainer, transfer = connected()
        return transfer

    @contextmanager
    def sent(self, weights: Mapping[str, Tensor]) -> Iterator[Mapping[str, Any]]:
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(self.trainer.send, weights)
            yield {"packed": False}
            answer.result()


@pytest.mark.parametrize(
    "values",
    [
        {"master_port": 0},
        {"master_port": "80"},
        {"master_address": ""},
        {"rank_offset": 2},
        {"world_size": 1},
        {"more": 1},
    ],
)
def test_wrong_places(values: dict[str, Any]) -> None:
    transfer = TorchTransfer(TorchOptions(), WeightTransferSetup("cpu"))
    with pytest.raises(RequestError) as refusal:
        transfer.init({**free_place(), **values})
    assert refusal.value.parameter == "init_info"


def test_no_trainer() -> None:
    transfer = TorchTransfer(TorchOptions(timeout_s=1), WeightTransferSetup("cpu"))
    with pytest.raises(RequestError, match="no trainer is connected"):
        next(transfer.receive([], {}))
    with pytest.raises(ModelError, match="there is no trainer at"):
        transfer.init(free_place())


def test_a_refused_update_sends_nothing() -> None:
    trainer, transfer = connected(timeout_s=2)
    with pytest.raises(RuntimeError, match="0 of 1 ranks"):
        trainer.send(weights_of(1))
    weights = weights_of(2)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(trainer.send, weights)
        received = [*transfer.receive(listed(weights), {})]
        answer.result()
    assert [*map(float, received[2:3])] == [2.0]
    with pytest.raises(ModelError, match="has not sent a.weight; connect it again"):
        [*transfer.receive(listed(weights), {})]
