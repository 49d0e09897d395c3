"""The executor passes the contract of its kind and the generic contract."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray>=2.40'", allow_module_level=True)

from pegboard_executor_ray.executor import RayExecutor

from pegboard.interfaces.executor import ExecutorSetup
from pegboard_testing.contract_executor import ExecutorContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("executor", "ray"))


@pytest.mark.usefixtures("cluster")
class RayContract(ExecutorContract):
    def executor(self, setup: ExecutorSetup) -> RayExecutor:
        return RayExecutor(None, setup)


@pytest.mark.slow
class TestOneRank(RayContract):
    pass


@pytest.mark.sampled(4)
class TestTwoRanks(RayContract):
    ranks = 2
    sampling = range(2)


@pytest.mark.slow
class TestTwoStages(RayContract):
    ranks = 3
    sampling = range(1, 3)
