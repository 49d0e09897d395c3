"""Contract tests of the kind `collective`. A plugin's test file:

    class TestMyCollective(CollectiveContract):
        def collective(self, setup: CollectiveSetup) -> Collective:
            return MyCollective(None, setup)

Each rank is a process, which imports the plugin's test file and makes the class in it. Methods
named rank_… run there. A plugin may add its own, and run them with `on_ranks`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import EngineDeadError
from pegboard.interfaces.collective import Collective, CollectiveSetup

SERVE = "import sys; from pegboard_testing.contract_collective import serve; serve(*sys.argv[1:])"
START_S = 60.0
"""How long a process may take to import torch and the plugin."""

LIMIT_S = 30.0
"""How long ranks wait in tests in which all of them come."""

SHORT_S = 1.0
PATIENCE_S = 4.0
"""A rank that waits for one that does not come gets an error after SHORT_S seconds, and at most
PATIENCE_S later."""

CALLS = ("all_reduce", "all_gather", "broadcast")
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""dtype → difference between a sum and the exact one; halves may be rounded after each addition."""

SOME = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)
shapes = st.tuples(st.integers(1, 40), st.sampled_from([1, 5, 16, 33, 576, 1000]))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def tensor_of(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what a rank gives to a call."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(*shape, generator=generator).to(dtype)


class RankProcess:
    """A process that runs methods of a test class."""

    def __init__(self, tests: type) -> None:
        self._connection, other = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(other.fileno()), getfile(tests), tests.__qualname__],
            pass_fds=(other.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        other.close()

    def start(self, method: str, *arguments: Any) -> None:
        self._connection.send_bytes(pickle.dumps((method, arguments)))

    def result(self, limit_s: float) -> Any:
        """Return the method's result, or its exception. A process that does not answer in time is
        killed."""
        if not self._connection.poll(limit_s):
            self.kill()
            return AssertionError(f"a rank has not answered within {limit_s:g} s")
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError as error:
            self.process.wait()
            return error

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


def serve(descriptor: str, path: str, name: str) -> None:
    """The body of a rank's process: run methods until the test's process ends."""
    torch.set_num_threads(1)
    spec = spec_from_file_location("tests_of_a_rank", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = getattr(module, name)()
    connection = Connection(int(descriptor))
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = getattr(tests, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test raises it
            result = error
        connection.send_bytes(pickle.dumps(result))


def error_of(run: Callable[[], object]) -> tuple[str, float]:
    """Return the message of the EngineDeadError that the function raises, and after how long."""
    start = time.monotonic()
    try:
        run()
    except EngineDeadError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def named_memory() -> list[str]:
    """Return the files in shared memory that this process uses and that still have a name: they
    would remain if all ranks were killed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.partition("/dev/shm/")[2] for line in lines}
    return [path for path in paths if path and not path.endswith("(deleted)") and "KMP" not in path]


def held() -> tuple[int, int]:
    """Return how many files and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class CollectiveContract:
    """Every collective passes these. Override `collective`."""

    processes: list[RankProcess]
    kept: Collective

    def collective(self, setup: CollectiveSetup) -> Collective:
        """Return a new collective."""
        raise AssertionError("override CollectiveContract.collective")

    @classmethod
    def setup_class(cls) -> None:
        cls.processes = []

    @classmethod
    def teardown_class(cls) -> None:
        for process in cls.processes:
            process.kill()

    def ranks(self, count: int) -> list[RankProcess]:
        """Return living processes, which later tests use again."""
        living = [each for each in self.processes if each.process.poll() is None]
        while len(living) < count:
            living.append(RankProcess(type(self)))
        self.processes[:] = living
        return living[:count]

    def on_ranks(
        self,
        method: str,
        *arguments: Any,
        ranks: Sequence[int] = (0, 1, 2),
        timeout_s: float = LIMIT_S,
    ) -> list[Any]:
        """Run a method with (setup, *arguments) on each rank, and return the results. Raises what
        it raised, or EOFError if a rank has died. ranks: their global numbers."""
        results = self.answers(method, *arguments, ranks=ranks, timeout_s=timeout_s)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def answers(
        self, method: str, *arguments: Any, ranks: Sequence[int], timeout_s: float
    ) -> list[Any]:
        """Return what a method returned or raised on each rank."""
        with TemporaryDirectory() as folder:
            processes = self.ranks(len(ranks))
            for rank, process in enumerate(processes):
                address = f"{Path(folder).as_uri()}/meet"
                setup = CollectiveSetup("tensor", tuple(ranks), rank, address, "cpu", timeout_s)
                process.start(method, setup, *arguments)
            return [process.result(START_S + timeout_s) for process in processes]

    @contextmanager
    def member(self, setup: CollectiveSetup) -> Iterator[Collective]:
        collective = self.collective(setup)
        try:
            yield collective
        finally:
            collective.close()

    def rank_calls(self, setup: CollectiveSetup, call: str, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the results of calls with tensors of these (shape, dtype)."""
        with self.member(setup) as collective:
            tensors = [tensor_of(setup.rank, shape, dtype) for shape, dtype in inputs]
            return [getattr(collective, call)(x) for x in tensors]

    def check_sums(self, *inputs: tuple[Sequence[int], torch.dtype]) -> None:
        results = self.on_ranks("rank_calls", "all_reduce", inputs)
        for place, (shape, dtype) in enumerate(inputs):
            given = [tensor_of(rank, shape, dtype).double() for rank in range(3)]
            first = results[0][place]
            assert first.dtype == dtype and first.shape == torch.Size(shape)
            expected = torch.stack(given).sum(0)
            error = ERRORS[dtype]
            torch.testing.assert_close(first.double(), expected, rtol=error, atol=error)
            for other in results[1:]:
                assert torch.equal(first, other[place]), "two ranks got different sums"

    @SOME
    @given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
    def test_all_ranks_get_the_same_sums(self, inputs: list[Any]) -> None:
        self.check_sums(*inputs)

    def test_tensors_of_more_dimensions(self) -> None:
        self.check_sums(((3, 4, 5), torch.float32), ((7,), torch.float32))

    def test_large_tensors(self) -> None:
        self.check_sums(((2000, 1031), torch.float32), ((3, 700_001), torch.bfloat16))

    @SOME
    @given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
    def test_rows_are_gathered_in_the_order_of_the_ranks(self, inputs: list[Any]) -> None:
        results = self.on_ranks("rank_calls", "all_gather", inputs)
        for place, (shape, dtype) in enumerate(inputs):
            expected = torch.cat([tensor_of(rank, shape, dtype) for rank in range(3)], 1)
            for result in results:
                assert torch.equal(result[place], expected)

    def test_large_tensors_are_gathered(self) -> None:
        results = self.on_ranks("rank_calls", "all_gather", [((1000, 1031), torch.float32)])
        expected = torch.cat([tensor_of(rank, (1000, 1031), torch.float32) for rank in range(3)], 1)
        for result in results:
            assert torch.equal(result[0], expected)

    def rank_gets(
        self, setup: CollectiveSetup, inputs: Sequence[tuple[int, Any, torch.dtype]]
    ) -> list[Tensor]:
        """Return the results of broadcasts of (source, shape, dtype). Other ranks come later."""
        with self.member(setup) as collective:
            time.sleep(0.002 * setup.rank)
            return [
                collective.broadcast(tensor_of(setup.rank, shape, dtype), source).clone()
                for source, shape, dtype in inputs
            ]

    def check_broadcasts(self, *inputs: tuple[int, Any, torch.dtype]) -> None:
        for results in self.on_ranks("rank_gets", inputs):
            for result, (source, shape, dtype) in zip(results, inputs, strict=True):
                assert torch.equal(result, tensor_of(source, shape, dtype))

    @SOME
    @given(st.lists(st.tuples(st.integers(0, 2), shapes, dtypes), min_size=1, max_size=6))
    def test_all_ranks_get_the_tensor_of_the_source(self, inputs: list[Any]) -> None:
        self.check_broadcasts(*inputs)

    def test_large_tensors_of_a_source(self) -> None:
        self.check_broadcasts(
            (1, (900, 1031), torch.float32),
            (0, (3, 7, 99_001), torch.bfloat16),
            (1, (1,), torch.float16),
        )

    def rank_columns(self, setup: CollectiveSetup) -> list[Tensor]:
        with self.member(setup) as collective:
            wide = torch.arange(12.0).view(3, 4) + 100 * setup.rank
            return [
                collective.all_gather(wide[:, 1:3]),
                collective.broadcast(wide[:, 1:3].clone(), 1),
                collective.all_reduce(wide[:, 1:3]),
            ]

    def test_some_columns_of_wider_rows(self) -> None:
        wide = torch.arange(12.0).view(3, 4)
        gathered = torch.cat([wide[:, 1:3], wide[:, 1:3] + 100], 1)
        for result in self.on_ranks("rank_columns", ranks=(0, 1)):
            assert torch.equal(result[0], gathered)
            assert torch.equal(result[1], wide[:, 1:3] + 100)
            assert torch.equal(result[2], 2 * wide[:, 1:3] + 100)

    def rank_repeats(self, setup: CollectiveSetup, count: int) -> list[str]:
        """Make all calls in turn in two groups at one address. The ranks are not in step."""
        wrong = []
        size = len(setup.ranks)
        second = replace(setup, group="data")
        with self.member(setup) as one, self.member(second) as two:
            for step in range(count):
                if step % 16 == setup.rank:
                    time.sleep(0.002)
                group = two if step % 3 == 1 else one
                x = torch.full((step % 7 + 1, 40), float(step + setup.rank))
                gathered = group.all_gather(x[:, :1])[0].tolist()
                named = group.broadcast(x.clone(), step % size)
                total = group.all_reduce(x)
                if not (named == step + step % size).all():
                    wrong.append(f"broadcast {step}")
                if gathered != [step + rank for rank in range(size)]:
                    wrong.append(f"all_gather {step}: {gathered}")
                if not (total == size * step + sum(range(size))).all():
                    wrong.append(f"all_reduce {step}")
        return wrong

    def test_many_calls_in_two_groups(self) -> None:
        assert self.on_ranks("rank_repeats", 100) == [[]] * 3

    def rank_alone(self, setup: CollectiveSetup, call: str) -> tuple[str, float]:
        """The last rank does not come to the second call, and does not close the group. It is the
        source of broadcasts."""
        collective = self.collective(setup)
        last = len(setup.ranks) - 1
        arguments = (torch.ones(2, 3), last) if call == "broadcast" else (torch.ones(2, 3),)
        getattr(collective, call)(*arguments)
        if setup.rank == last:
            self.kept = collective
            return "", 0
        error = error_of(lambda: getattr(collective, call)(*arguments))
        collective.close()
        return error

    @pytest.mark.parametrize("call", CALLS)
    def test_a_rank_that_does_not_come(self, call: str) -> None:
        """The error names the group, the call and the rank."""
        results = self.on_ranks("rank_alone", call, ranks=(4, 7, 9), timeout_s=SHORT_S)
        for message, seconds in results[:-1]:
            assert "'tensor'" in message and call in message and "9" in message, message
            assert "4" not in message.partition("(")[0], f"rank 4 came: {message}"
            assert seconds < SHORT_S + PATIENCE_S, f"the error came after {seconds:.1f} s"

    def rank_starts_alone(self, setup: CollectiveSetup) -> tuple[str, float]:
        return ("", 0) if setup.rank == 1 else error_of(lambda: self.collective(setup))

    def test_a_rank_that_does_not_start(self) -> None:
        (message, seconds), _ = self.on_ranks("rank_starts_alone", ranks=(4, 7), timeout_s=SHORT_S)
        assert "'tensor'" in message and "7" in message, message
        assert seconds < SHORT_S + PATIENCE_S, f"the error came after {seconds:.1f} s"

    def rank_is_killed(self, setup: CollectiveSetup) -> tuple[str, list[str]]:
        """The last rank dies after the first call."""
        with self.member(setup) as collective:
            collective.all_reduce(torch.ones(2, 3))
            if setup.rank == len(setup.ranks) - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            names = named_memory()
            return error_of(lambda: collective.all_reduce(torch.ones(2, 3)))[0], names

    def test_a_rank_that_is_killed(self) -> None:
        *answers, last = self.answers("rank_is_killed", ranks=(0, 1, 2), timeout_s=SHORT_S)
        assert isinstance(last, EOFError)
        for message, names in answers:
            assert "'tensor'" in message and "all_reduce" in message, message
            assert names == [], f"these files would remain in /dev/shm: {names}"

    def rank_closes(self, setup: CollectiveSetup) -> list[Any]:
        """Return what this process holds after it was in a second and in a third group."""
        counts = []
        for number in range(3):
            collective = self.collective(replace(setup, group=f"group {number}"))
            collective.all_reduce(torch.ones(2, 3))
            collective.all_gather(torch.ones(2, 3))
            collective.close()
            collective.close()
            del collective
            counts.append(held())
        return counts[1:]

    def test_closing_leaves_nothing(self) -> None:
        """A third group leaves nothing that the second one did not leave."""
        for before, after in self.on_ranks("rank_closes"):
            assert before == after
