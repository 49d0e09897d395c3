"""Moves whole experts between ranks while they serve, so that each rank computes nearly equally
many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pegboard.config.schema import EPLBConfig
from pegboard.errors import ConfigError
from pegboard.layers import Experts, Layer
from pegboard.layers.shards import Group
from pegboard.layers.slots import Slots
from pegboard.log import get_logger
from pegboard.worker.expert_policy import balanced, rank_loads

log = get_logger(__name__)


class ExpertBalance:
    """Keeps the number of tokens of each expert in the last steps, and moves experts every
    `step_interval` steps. layers: of all models, loaded and not bound yet. All ranks of the group
    call the same methods after the same steps. Raises ConfigError if weights cannot move."""

    def __init__(
        self, layers: Iterable[Layer], group: Group, config: EPLBConfig, device: str
    ) -> None:
        assert group.collective is not None, "experts move between ranks that are connected"
        self.collective = group.collective
        self.rank = group.rank
        self.config = config
        self.device = device
        self.layers = [
            (layer, layer.slots)
            for layer in layers
            if isinstance(layer, Experts) and layer.slots is not None
        ]
        for layer, _ in self.layers:
            self._check(layer)
        sizes = [len(slots.counts) for _, slots in self.layers]
        self.counts = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.window = self.counts.new_zeros(config.window_size, len(self.counts))
        for (_, slots), counts in zip(self.layers, self.counts.split(sizes), strict=True):
            slots.counts = counts
        self.step = 0

    def _check(self, layer: Experts) -> None:
        """Compare the form of the layer's weights with that on the other ranks."""
        form = crc32(repr(layer.memory().form).encode())
        forms = self.collective.all_gather(torch.tensor([[form]], device=self.device))
        if len(forms.unique()) > 1:
            raise ConfigError(
                f"{layer.build.path}: the ranks store their experts in different forms, so these "
                "cannot move; remove enable_eplb"
            )

    @torch.inference_mode()
    def forget(self) -> None:
        """Begin to count again."""
        self.step = 0
        self.counts.zero_()
        self.window.zero_()

    @torch.inference_mode()
    def end_step(self) -> None:
        """Take what the layers have counted in a step, and move experts if it is time to."""
        self.window[self.step % len(self.window)] = self.counts
        self.counts.zero_()
        self.step += 1
        if self.step % self.config.step_interval == 0:
            self._balance()

    def _balance(self) -> None:
        """Move experts to where the first rank's policy wants them."""
        largest = np.zeros((2, len(self.layers)))
        total = 0.0
        moved = 0
        for index, (layer, slots) in enumerate(self.layers):
            loads = self._loads(slots)
            before = slots.experts
            self._move(layer, slots, self._decided(balanced(before, loads)))
            largest[:, index] = [rank_loads(each, loads).max() for each in (before, slots.experts)]
            total += loads.sum() / len(before)
            moved += int((before != slots.experts).sum())
        if self.config.log_balancedness and self.rank == 0:
            was, now = total / np.maximum(largest.sum(1), 1)
            log.info(
                "step %d: moved %d experts; mean load of the ranks by the largest: %.2f before, "
                "%.2f now",
                self.step,
                moved,
                was,
                now,
            )

    def _loads(self, slots: Slots) -> np.ndarray:
        """Return the tokens of each expert of a layer in the last steps."""
        first = slots.counts.storage_offset()
        loads: np.ndarray = self.window[:, first : first + len(slots.counts)].sum(0).cpu().numpy()
        return loads

    def _decided(self, experts: np.ndarray) -> np.ndarray:
        """Return what the first rank has decided [ranks, slots]."""
        decided: np.ndarray = (
            self.collective.broadcast(torch.from_numpy(experts).to(self.device), 0).cpu().numpy()
        )
        return decided

    @torch.inference_mode()
    def restore(self) -> None:
        """Move all experts to where the checkpoint is loaded to, and begin to count again."""
        for layer, slots in self.layers:
            self._move(layer, slots, slots.first)
        self.forget()

    def _move(self, layer: Experts, slots: Slots, experts: np.ndarray) -> None:
        """Bring the weights of a layer's experts to these slots [ranks, slots]. Each expert that
        moves comes from the first rank that has it, to all who want it. Its weights are kept beside
        the layer until all have come, because its slot may be wanted before."""
        before = slots.experts
        memory = layer.memory().experts
        arrived: dict[int, Tensor] = {}
        is_new = experts != before
        for expert in np.unique(experts[is_new]).tolist():
            source, slot = np.argwhere(before == expert)[0].tolist()
            parcel = torch.cat([*_bytes(memory[slot if source == self.rank else 0])])
            parcel = self.collective.broadcast(parcel.view(1, -1), source).view(-1)
            wanted = (experts[self.rank] == expert) & is_new[self.rank]
            arrived |= dict.fromkeys(np.flatnonzero(wanted).tolist(), parcel)
        for slot, parcel in arrived.items():
            parts = [*_bytes(memory[slot])]
            for part, data in zip(parts, parcel.split([len(p) for p in parts]), strict=True):
                part.copy_(data)
        slots.place(experts)


def _bytes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield tensor.view(-1).view(torch.uint8)
