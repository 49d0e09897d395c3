"""Reads what the trainer has written. Nothing is mapped: a trainer that shortens the segment
meanwhile causes an error, and cannot change a tensor that was read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError, RequestError, brief
from pegboard.interfaces.weight_transfer import SentTensor, WeightTransferSetup
from pegboard_weight_transfer_shared_memory.options import SharedMemoryOptions
from pegboard_weight_transfer_shared_memory.segment import FOLDER, num_bytes, placed, raw

NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class SharedMemoryTransfer:
    """Implements `pegboard.interfaces.weight_transfer.WeightTransfer`."""

    def __init__(self, options: SharedMemoryOptions, setup: WeightTransferSetup) -> None:
        self._prefix = options.prefix

    def init(self, info: Mapping[str, Any]) -> None:
        """See `WeightTransfer.init`. There is nothing to connect to, so it takes no values."""
        if info:
            raise RequestError(
                f"init_info: shared_memory takes no values, got {brief(sorted(info))}",
                parameter="init_info",
            )

    def receive(
        self, tensors: Sequence[SentTensor], info: Mapping[str, Any]
    ) -> Generator[Tensor, None, None]:
        """See `WeightTransfer.receive`. info: {"segment": its name}."""
        name = info.get("segment")
        if [*info] != ["segment"] or not isinstance(name, str):
            raise _wrong(
                f"expected the value segment, a name, beside the tensors; got {brief(info)}"
            )
        if not NAME.fullmatch(name) or not name.startswith(self._prefix):
            raise _wrong(
                f"segment {brief(name)} is not a name that begins with {self._prefix!r}; the "
                "option weight_transfer.shared_memory.prefix allows others"
            )
        try:
            file = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ModelError(
                f"the segment {name} of shared memory cannot be read: {error.strerror}; it must "
                "exist on this machine until the update has ended"
            ) from error
        try:
            yield from _read(file, name, tensors)
        finally:
            os.close(file)

    def close(self) -> None:
        """Do nothing: no segment stays open."""


def _read(file: int, name: str, tensors: Sequence[SentTensor]) -> Generator[Tensor, None, None]:
    status = os.fstat(file)
    sizes = [(tensor, num_bytes(tensor.dtype, tensor.shape)) for tensor in tensors]
    places = [*placed(sizes)]
    needed = max((offset + size for _, offset, size in places), default=0)
    if not stat.S_ISREG(status.st_mode) or status.st_size < needed:
        raise ModelError(
            f"the segment {name} has {status.st_size} bytes; its tensors take {needed}"
        )
    for tensor, offset, size in places:
        data = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        _fill(file, raw(data) if size else memoryview(bytearray()), offset, name)
        yield data


def _fill(file: int, buffer: memoryview, offset: int, name: str) -> None:
    while buffer:
        count = os.preadv(file, [buffer], offset)
        if not count:
            raise ModelError(f"the segment {name} became shorter while it was read")
        buffer = buffer[count:]
        offset += count


def _wrong(what: str) -> RequestError:
    return RequestError(f"update_info: {what}", parameter="update_info")
