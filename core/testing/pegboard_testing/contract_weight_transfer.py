"""Contract tests of the kind `weight_transfer`. A plugin's test file:

class TestMyTransfer(WeightTransferContract):
    def transfer(self) -> WeightTransfer:
        return a new plugin, connected to a trainer

    def sent(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[Mapping[str, Any]]:
        let the trainer send these weights, and yield what the plugin needs of `update_info`
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_transfer import SentTensor, WeightTransfer


def listed(weights: Mapping[str, Tensor]) -> list[SentTensor]:
    """Return what core gives a plugin for these tensors."""
    return [
        SentTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in weights.items()
    ]


def weights_of(seed: int) -> dict[str, Tensor]:
    """Return tensors of several types and shapes, among them one without numbers."""
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(33, 7),
        "a.bias": torch.randn(5).bfloat16(),
        "scale": torch.tensor(float(seed)),
        "b.weight": torch.randn(3, 2, 4).half(),
        "codes": torch.randint(-100, 100, (9,), dtype=torch.int32),
        "empty": torch.zeros(0, 4),
        "view": torch.randn(6, 8)[:, ::2],
    }


class WeightTransferContract:
    """Every weight transfer passes these. Override `transfer` and `sent`."""

    def transfer(self) -> WeightTransfer:
        """Return a new plugin, connected to a trainer."""
        raise AssertionError("override WeightTransferContract.transfer")

    def sent(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[Mapping[str, Any]]:
        """Let the trainer send these weights, and yield the values of `update_info` that are not
        lists of tensors."""
        raise AssertionError("override WeightTransferContract.sent")

    def test_what_is_sent_arrives(self) -> None:
        """Several times, and nothing changes a tensor after it was yielded."""
        transfer = self.transfer()
        for seed in (1, 2):
            weights = weights_of(seed)
            with self.sent(weights) as info:
                received = [*transfer.receive(listed(weights), info)]
            assert len(received) == len(weights)
            for tensor, expected in zip(received, weights.values(), strict=True):
                assert tensor.dtype == expected.dtype and torch.equal(tensor.cpu(), expected)
        transfer.close()

    def test_an_engine_that_stops_to_read_can_take_the_next_weights(self) -> None:
        transfer = self.transfer()
        weights = weights_of(3)
        with (
            self.sent(weights) as info,
            closing(transfer.receive(listed(weights), info)) as received,
        ):
            assert torch.equal(next(received).cpu(), weights["a.weight"])
        weights = weights_of(4)
        with self.sent(weights) as info:
            received = transfer.receive(listed(weights), info)
            assert torch.equal(next(received).cpu(), weights["a.weight"])
            received.close()
        transfer.close()

    @pytest.mark.parametrize("info", [{"no such value": 1}, {"": None}])
    def test_wrong_values_are_refused(self, info: Mapping[str, Any]) -> None:
        transfer = self.transfer()
        with pytest.raises((RequestError, ModelError)):
            next(transfer.receive(listed(weights_of(1)), info))
        with pytest.raises(RequestError) as refusal:
            transfer.init(info)
        assert refusal.value.parameter == "init_info"
        transfer.close()
