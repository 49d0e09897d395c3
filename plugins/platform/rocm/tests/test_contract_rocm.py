"""The platform passes the contract of its kind on a fake of torch.cuda, and the generic contract.
No AMD GPU has run it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from pegboard_platform_rocm.platform import ROCmPlatform, version_of

from pegboard.errors import ConfigError
from pegboard.interfaces.platform import PlatformSetup
from pegboard_gpus import platform as module
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_platform import PlatformContract
from pegboard_testing.fake_gpu import FakeGPU
from pegboard_testing.fake_torch_cuda import fake_torch_cuda


def use_architecture(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    properties = SimpleNamespace(gcnArchName=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    use_architecture(monkeypatch, "gfx942:sramecc+:xnack-")
    with fake_torch_cuda(monkeypatch, module, current_device=lambda: 0) as gpu:
        yield gpu


def test_contract() -> None:
    check_entry(installed_entry("platform", "rocm"))


class TestROCmPlatform(PlatformContract):
    @pytest.fixture(autouse=True)
    def _on(self, gpu: FakeGPU) -> None: ...

    def platform(self, setup: PlatformSetup) -> ROCmPlatform:
        return ROCmPlatform(None, setup)


def test_each_rank_needs_a_device(gpu: FakeGPU) -> None:
    with pytest.raises(ConfigError, match="rank 1 needs a ROCm device of its own"):
        ROCmPlatform(None, PlatformSetup()).start(1)


def test_a_torch_for_cuda_is_refused(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices have the same name, but they are NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match=r"cannot use a ROCm device: .*rocm-smi.*--device cpu"):
        ROCmPlatform(None, PlatformSetup()).start(0)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("gfx90a:sramecc+:xnack-", "bfloat16"),
        ("gfx942", "bfloat16"),
        ("gfx950", "bfloat16"),
        ("gfx1100", "bfloat16"),
        ("gfx1201", "bfloat16"),
        ("gfx906:sramecc+:xnack-", "float16"),
        ("gfx908", "float16"),
        ("gfx1030", "float16"),
        ("gfx9", "float16"),
    ],
)
def test_types_by_checkpoint_and_device(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str
) -> None:
    use_architecture(monkeypatch, architecture)
    platform = ROCmPlatform(None, PlatformSetup())
    assert [platform.defaults(wanted)["dtype"] for wanted in ("float32", None)] == [dtype, dtype]
    assert platform.defaults("float16")["dtype"] == "float16"


def test_numbers_of_architectures() -> None:
    assert version_of("gfx90a:sramecc+") == (9, 0, 10) and version_of("gfx1151") == (11, 5, 1)
    assert version_of("") == version_of("sm_90") == (0, 0, 0)
