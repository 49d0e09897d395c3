"""Collective `shared_memory`: ranks on one host exchange rows through memory that they share (see
csrc/collective.c). It can be recorded.

The memory has no name: the first rank makes it (memfd_create), and the others open it through the
first one's process. So nothing remains, however the processes end.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor

from pegboard.errors import ConfigError, EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard_kernel_cpu.structures import Member, Share, TakeShares
from pegboard_kernel_cpu.values import Call, Value, new, refusal, rows_of, submit

FIRST_SLOT = 65536
LINE = 64
SLOT_BYTES = 64 << 20
"""Bytes of a rank's rows in one exchange. Only pages that are written take memory."""
LOOK_S = 0.002


class SharedMemory:
    """See `pegboard.interfaces.collective.Collective`."""

    def __init__(self, options: None, setup: CollectiveSetup) -> None:
        self.setup = setup
        self.size = len(setup.ranks)
        parts = urlsplit(setup.address)
        if parts.scheme != "file":
            raise ConfigError(f"ranks meet at {setup.address!r}; shared memory needs file:///path")
        names = "-".join(map(str, setup.ranks))
        self.place = Path(f"{unquote(parts.path)}-{setup.group}-{names}")
        self.num_bytes = FIRST_SLOT + 2 * self.size * SLOT_BYTES
        self.memory = self._open()
        view = (ctypes.c_char * self.num_bytes).from_buffer(self.memory)
        self.address = ctypes.addressof(view)
        self.member = Member(
            memory=self.address,
            rank=setup.rank,
            size=self.size,
            slot_bytes=SLOT_BYTES,
            timeout=int(setup.timeout_s * 1e9),
        )
        self.all_reduce(torch.zeros(1, 1))  # all ranks have the memory

    def _open(self) -> mmap.mmap:
        if self.setup.rank == 0:
            file = os.memfd_create("pegboard-ranks")
            os.ftruncate(file, self.num_bytes)
            new_place = self.place.with_suffix(".new")
            new_place.write_text(json.dumps([os.getpid(), file]), "ascii")
            new_place.rename(self.place)
        else:
            process, number = self._first_rank()
            file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(file, self.num_bytes)
        finally:
            if self.setup.rank:
                os.close(file)
            else:
                self.file = file

    def _first_rank(self) -> tuple[int, int]:
        """Return the process of the group's first rank, and its number of the memory."""
        until = time.monotonic() + self.setup.timeout_s
        while time.monotonic() < until:
            try:
                process, number = json.loads(self.place.read_text("ascii"))
            except FileNotFoundError:
                time.sleep(LOOK_S)
            else:
                return process, number
        raise self._error("start", [0])

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange(x, "sum_shares", 1)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._exchange(x, "gather_shares", self.size)

    def _exchange(self, x: Tensor, kernel: str, width: int) -> Tensor:
        rows = rows_of(x)
        columns = rows.shape[1]
        most = SLOT_BYTES // (4 * columns)
        if type(x) is Value:
            if x.shape[0] > most or x.dtype != torch.float32:
                raise refusal(f"exchanges {list(x.shape)} of {x.dtype} between ranks")
            return self._submit(rows, kernel, width).view(*x.shape[:-1], -1)
        parts = [self._submit(part, kernel, width) for part in rows.float().split(most)]
        self.check()
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result.to(x.dtype).view(*x.shape[:-1], -1)

    def _submit(self, rows: Tensor, kernel: str, width: int) -> Tensor:
        columns = rows.shape[1]
        member = ctypes.addressof(self.member)
        out = new(rows, width * columns)
        share = Share(columns=columns, member=member)
        take = TakeShares(columns=columns, member=member)
        submit(
            rows,
            Call("share", share, {"x": rows}, {}, self),
            Call(kernel, take, {}, {"out": out}, self),
        )
        return out

    def check(self) -> None:
        """Raise EngineDeadError if a rank did not come to the last exchanges in time."""
        if ctypes.c_int64.from_address(self.address).value:
            number = self.member.number
            raise self._error(
                f"exchange {number}",
                [rank for rank in range(self.size) if self._written(rank) < number],
            )

    def _written(self, rank: int) -> int:
        return ctypes.c_uint64.from_address(self.address + LINE * (rank + 1)).value

    def _error(self, call: str, absent: list[int]) -> EngineDeadError:
        ranks = ", ".join(str(self.setup.ranks[rank]) for rank in absent) or "none"
        return EngineDeadError(
            f"{call} of the group {self.setup.group!r}: a rank did not come within "
            f"{self.setup.timeout_s:g} s; missing now: {ranks}"
        )

    def close(self) -> None:
        if self.setup.rank == 0 and self.file >= 0:
            os.close(self.file)
            self.file = -1
