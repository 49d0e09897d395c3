"""What torch was built for is read from its file. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegboard_gpus import torch_build
from pegboard_gpus.torch_build import torch_reason, torch_versions

ROCM = """
__version__ = '2.13.0+rocm7.2'
debug = False
cuda: Optional[str] = None
git_version = 'cf30153c'
hip: Optional[str] = '7.2.53211'
rocm: Optional[str] = '7.2.0'
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    return lambda text: (tmp_path / "version.py").write_text(text, "utf-8")


def test_a_torch_is_built_for_one_library(install: Any) -> None:
    install(ROCM)
    assert torch_versions() == {"cuda": None, "hip": "7.2.53211"}
    assert torch_reason("hip", "ROCm") is None
    reason = torch_reason("cuda", "CUDA")
    assert reason is not None and "without CUDA: install a torch for CUDA" in reason
    install("cuda: Optional[str] = '12.8'\nhip = None\n")
    assert torch_reason("cuda", "CUDA") is None and torch_reason("hip", "ROCm") is not None


def test_a_file_that_says_nothing_is_no_reason(install: Any) -> None:
    assert torch_versions() == {} and torch_reason("cuda", "CUDA") is None


def test_the_installed_torch_is_read() -> None:
    import torch

    assert torch_versions() == {"cuda": torch.version.cuda, "hip": torch.version.hip}


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "find_spec", lambda name: None)
    assert torch_reason("hip", "ROCm") == "torch is not installed: install a torch for ROCm"
