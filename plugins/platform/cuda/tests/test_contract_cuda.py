"""The platform passes the contract of its kind on a fake of torch.cuda, and the generic
contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pegboard_platform_cuda.platform import CUDAPlatform

from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard_gpus import platform as module
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_platform import PlatformContract
from pegboard_testing.fake_gpu import FakeGPU
from pegboard_testing.fake_torch_cuda import fake_torch_cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    with fake_torch_cuda(monkeypatch, module, get_device_capability=lambda: (9, 0)) as gpu:
        yield gpu


def test_contract() -> None:
    check_entry(installed_entry("platform", "cuda"))


class TestCUDAPlatform(PlatformContract):
    @pytest.fixture(autouse=True)
    def _on(self, gpu: FakeGPU) -> None: ...

    def platform(self, setup: PlatformSetup) -> CUDAPlatform:
        return CUDAPlatform(None, setup)


def test_each_rank_needs_a_device(gpu: FakeGPU) -> None:
    with pytest.raises(
        ConfigError, match="rank 1 needs a CUDA device of its own, but only 1 are visible"
    ):
        CUDAPlatform(None, PlatformSetup()).start(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use a CUDA device: .*--device cpu"):
        CUDAPlatform(None, PlatformSetup()).start(0)


def test_types_by_checkpoint_and_device(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CUDAPlatform(None, PlatformSetup())
    found = [
        platform.defaults(dtype)["dtype"] for dtype in ("float32", "bfloat16", None, "float16")
    ]
    assert found == ["bfloat16", "bfloat16", "bfloat16", "float16"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert platform.defaults("bfloat16")["dtype"] == "float16"
