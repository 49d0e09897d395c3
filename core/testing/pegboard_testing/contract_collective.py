"""Contract tests of the kind `collective`. A plugin's test file:

    class TestMyCollective(CollectiveContract):
        collective = "my_module:MyCollective"

Each rank is a process. `collective` is what the spec calls `implementation`; it is called with
options None.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pegboard.errors import EngineDeadError
from pegboard.interfaces.collective import CollectiveSetup
from pegboard.plugins.importing import import_object

RUN = (
    "import pickle, sys; from pegboard_testing.contract_collective import run_rank; "
    "run_rank(*pickle.load(sys.stdin.buffer))"
)
SHAPES = [(1, 1), (1, 576), (32, 576), (7, 33), (300, 70), (2000, 1031)]
"""The last one has 8 MB in float32."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT_S = 60.0


def tensor_of(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank gives. Sums are the same in every order, because they are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + shape[0])
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def exchange(collective: Any, rank: int, size: int) -> list[str]:
    """Call everything in every shape, and return what was wrong."""
    wrong = []
    for shape in SHAPES:
        for dtype in DTYPES:
            tensors = [tensor_of(each, shape, dtype) for each in range(size)]
            total = collective.all_reduce(tensors[rank].clone())
            side_by_side = collective.all_gather(tensors[rank].clone())
            if not torch.equal(total, torch.stack(tensors).sum(0)) or total.dtype != dtype:
                wrong.append(f"all_reduce of {shape} {dtype}")
            if not torch.equal(side_by_side, torch.cat(tensors, 1)):
                wrong.append(f"all_gather of {shape} {dtype}")
    return wrong


def roundings(collective: Any, rank: int, size: int) -> bytes:
    """Return the bits of a sum that depends on the order of the ranks."""
    x = torch.randn(19, 23, generator=torch.Generator().manual_seed(rank))
    total: torch.Tensor = collective.all_reduce(x)
    return total.numpy().tobytes()


def parts(collective: Any, rank: int, size: int) -> list[list[float]]:
    """Exchange views: some columns of wider rows."""
    wide = torch.arange(12.0).view(3, 4) + 100 * rank
    total: list[list[float]] = collective.all_reduce(wide[:, 1:3]).tolist()
    return total


def absent(collective: Any, rank: int, size: int) -> str:
    """The last rank does not come to the second exchange."""
    x = torch.ones(2, 3)
    collective.all_reduce(x)
    if rank == size - 1:
        return ""
    try:
        collective.all_reduce(x)
    except EngineDeadError as error:
        return str(error)
    return "no error"


def closed(collective: Any, rank: int, size: int) -> str:
    collective.all_reduce(torch.ones(1, 1))
    collective.close()
    collective.close()
    return "closed"


def run_rank(implementation: str, setup: CollectiveSetup, function: Callable[..., Any]) -> None:
    """The body of a rank's process."""
    torch.set_num_threads(1)
    collective = import_object(implementation)(None, setup)
    result = function(collective, setup.rank, len(setup.ranks))
    sys.stdout.buffer.write(pickle.dumps(result))
    sys.stdout.flush()
    os.close(sys.stdout.fileno())
    time.sleep(LIMIT_S)  # others may still read; the test kills this process


class CollectiveContract:
    """Every collective passes these. Override `collective`."""

    collective: str
    sizes: Sequence[int] = (2, 3)

    def on_ranks(
        self, folder: Path, size: int, function: Callable[..., Any], timeout_s: float = LIMIT_S
    ) -> list[Any]:
        """Return what the function returns on each rank."""
        address = f"{folder.as_uri()}/meet"
        processes = []
        for rank in range(size):
            setup = CollectiveSetup("tensor", tuple(range(size)), rank, address, "cpu", timeout_s)
            process = subprocess.Popen(
                [sys.executable, "-c", RUN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((self.collective, setup, function)))
            process.stdin.close()
            processes.append(process)
        try:
            results = []
            for process in processes:
                assert process.stdout is not None
                results.append(pickle.loads(process.stdout.read()))
            return results
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    def test_sums_and_rows_side_by_side(self, tmp_path: Path) -> None:
        for size in self.sizes:
            folder = tmp_path / str(size)
            folder.mkdir()
            assert self.on_ranks(folder, size, exchange) == [[]] * size

    def test_all_ranks_get_the_same_bits(self, tmp_path: Path) -> None:
        assert len(set(self.on_ranks(tmp_path, 3, roundings))) == 1

    def test_columns_of_wider_rows(self, tmp_path: Path) -> None:
        wide = 2 * torch.arange(12.0).view(3, 4) + 100
        assert self.on_ranks(tmp_path, 2, parts) == [wide[:, 1:3].tolist()] * 2

    def test_a_rank_that_does_not_come_is_an_error(self, tmp_path: Path) -> None:
        message, _ = self.on_ranks(tmp_path, 2, absent, timeout_s=2.0)
        assert "'tensor'" in message and "1" in message, message

    def test_it_may_be_closed_twice(self, tmp_path: Path) -> None:
        assert self.on_ranks(tmp_path, 2, closed) == ["closed"] * 2
