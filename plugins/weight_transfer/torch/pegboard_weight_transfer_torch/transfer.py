"""Receives what the trainer broadcasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from pegboard.errors import ModelError, RequestError, brief
from pegboard.interfaces.weight_transfer import SentTensor, WeightTransferSetup
from pegboard_weight_transfer_torch.group import Group
from pegboard_weight_transfer_torch.options import TorchOptions


class Meeting(BaseModel):
    """Where the trainer is. rank_offset: the rank of the engine's first one; the trainer has rank
    0. world_size: the number of all ranks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1)
    world_size: int = Field(ge=2)


class TorchTransfer:
    """Implements `pegboard.interfaces.weight_transfer.WeightTransfer`."""

    def __init__(self, options: TorchOptions, setup: WeightTransferSetup) -> None:
        self._timeout_s = options.timeout_s
        self._setup = setup
        self._group: Group | None = None

    def init(self, info: Mapping[str, Any]) -> None:
        """See `WeightTransfer.init`. info: as `Meeting`, which is vLLM's."""
        try:
            place = Meeting.model_validate(dict(info))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise _wrong("init_info", f"{field}: {first['msg']}") from error
        setup = self._setup
        if place.rank_offset + setup.ranks > place.world_size:
            raise _wrong(
                "init_info",
                f"world_size is {place.world_size}; the {setup.ranks} ranks of the engines begin "
                f"at {place.rank_offset}, so it must be at least {place.rank_offset + setup.ranks}",
            )
        self.close()
        try:
            self._group = Group(
                place.master_address,
                place.master_port,
                place.rank_offset + setup.rank,
                place.world_size,
                setup.device,
                self._timeout_s,
            )
        except (RuntimeError, OSError) as error:
            raise ModelError(
                f"there is no trainer at {place.master_address}:{place.master_port}, or not all "
                f"of {place.world_size} ranks came within {self._timeout_s:g} s: {error}"
            ) from error

    def receive(
        self, tensors: Sequence[SentTensor], info: Mapping[str, Any]
    ) -> Generator[Tensor, None, None]:
        """See `WeightTransfer.receive`. info: may say `packed` and `is_checkpoint_format` as vLLM
        does, if they ask for what is done here. If the engine stops to read, the others still get
        what the trainer sends."""
        for name, only in (("packed", False), ("is_checkpoint_format", True)):
            if info.get(name, only) is not only:
                raise _wrong("update_info", f"{name} must be {only}, got {brief(info[name])}")
        if more := sorted(info.keys() - {"packed", "is_checkpoint_format"}):
            raise _wrong("update_info", f"there is no value {brief(more[0])}; remove it")
        if self._group is None:
            raise _wrong("update_info", "no trainer is connected; call init_weight_transfer_engine")
        waiting = deque(tensors)
        self._group.begin()
        try:
            while waiting:
                yield self._next(self._group, waiting.popleft())
        finally:
            while waiting and self._group is not None:
                self._next(self._group, waiting.popleft())

    def _next(self, group: Group, tensor: SentTensor) -> Tensor:
        data = torch.empty(
            tensor.shape, dtype=getattr(torch, tensor.dtype), device=self._setup.device
        )
        try:
            group.broadcast(data)
        except RuntimeError as error:
            self.close()
            raise ModelError(
                f"the trainer has not sent {tensor.name}; connect it again with "
                f"init_weight_transfer_engine: {error}"
            ) from error
        return data

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _wrong(parameter: str, what: str) -> RequestError:
    return RequestError(f"{parameter}: {what}", parameter=parameter)
