"""For the trainer's process: sends weights to engines. Needs only torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pegboard_weight_transfer_torch.group import Group
from pegboard_weight_transfer_torch.options import TIMEOUT_S


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the `update_info` for these tensors, all of a checkpoint, by name."""
    return {
        "names": [*weights],
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
        "shapes": [[*each.shape] for each in weights.values()],
    }


class Trainer:
    """Rank 0 of the group. world_size: this process and all ranks of all engines. host: the address
    of this machine that the engines reach. device: of the weights that are sent. timeout_s: how
    long the others may take to come, or to take a tensor.

    The constructor waits until all engines have got `init_info`, so they must get it in another
    thread."""

    def __init__(
        self,
        port: int,
        *,
        world_size: int = 2,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._device = device
        self._group = Group(host, port, 0, world_size, device, timeout_s)

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Send the tensors, in this order, to engines that have got `described(weights)`. Raises
        RuntimeError if one of them is gone, or has refused the update. Nothing was sent then, and
        the next update may follow."""
        self._group.begin()
        for tensor in weights.values():
            self._group.broadcast(tensor.detach().to(self._device).contiguous())

    def close(self) -> None:
        """Leave the group."""
        self._group.close()
