"""For the trainer's process: puts weights into shared memory. Needs only torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pegboard_weight_transfer_shared_memory.options import PREFIX
from pegboard_weight_transfer_shared_memory.segment import FOLDER, placed, raw


@contextmanager
def shared(weights: Mapping[str, Tensor], prefix: str = PREFIX) -> Iterator[dict[str, Any]]:
    """Write tensors to a new segment, which only this user can read, and yield the `update_info`
    with which an engine on this machine takes them. The segment is removed at the end, so the
    engine must have answered by then. weights: all tensors of a checkpoint, by name. Raises
    OSError if there is no room."""
    path = FOLDER / f"{prefix}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            sizes = ((each, each.numel() * each.element_size()) for each in weights.values())
            for tensor, offset, size in placed(sizes):
                if size:
                    _write(file, raw(tensor.detach().cpu().contiguous()), offset)
        finally:
            os.close(file)
        yield {
            "segment": path.name,
            "names": [*weights],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [[*each.shape] for each in weights.values()],
        }
    finally:
        path.unlink(missing_ok=True)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwritev(file, [data], offset)
        data = data[count:]
        offset += count
