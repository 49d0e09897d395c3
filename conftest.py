"""Settings of every test run in this repository."""

import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from pegboard.env import compute_threads, let_compute_threads_sleep

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# before anything imports torch: test processes share the cores, and a waiting thread that spins
# halves the speed
let_compute_threads_sleep()
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, compute_threads() // int(processes))))
# before anything imports Triton; with 0, Triton's tests need a GPU
os.environ.setdefault("TRITON_INTERPRET", "1")

# a shell starts background commands so, and their children inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_torch_numbers() -> None:
    """In CI, what a test draws from torch's own generator is the same in every run, as are the
    inputs of property tests."""
    if os.environ.get("CI") and "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """No test leaves a variable that Pegboard reads, because the next test's processes inherit
    it."""
    before = pegboard_variables()
    yield
    assert pegboard_variables() == before


def pegboard_variables() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(("PEGBOARD_", "VLLM_"))
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all cases but one of every n, where a test is marked `sampled(n)`. It is the
    first of the first n, the last of the next, and so on, so that each value of a parameter has its
    turn."""
    num_cases: Counter[str] = Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is None:
            continue
        test = item.nodeid.partition("[")[0]
        group, place = divmod(num_cases[test], sampled.args[0])
        if (group + place) % sampled.args[0]:
            item.add_marker("slow")
        num_cases[test] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--until",
        type=float,
        help="skip the tests that would start after this time (seconds since the epoch)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Processes take whole files. The tests of the compiled kernels go to one process: compiling
    them twice takes longer."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return (
                "kernels/cpu/tests"
                if nodeid.startswith("kernels/cpu/tests/")
                else super()._split_scope(nodeid)
            )

    return Files(config, log)


@pytest.fixture(autouse=True, scope="module")
def objects_of_earlier_tests_stay() -> None:
    """No garbage collection looks at them again. With all that many tests have imported and
    collected, each would take a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("the time of `make check` is over; `make test` runs this test")
