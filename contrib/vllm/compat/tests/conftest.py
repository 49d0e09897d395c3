"""Checkpoints for the scripts, and a process that forgets `vllm` after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pegboard_vllm_compat import finder

sys.path.insert(0, str(Path(__file__).parent))

from tiny import write_adapter, write_bert, write_llama


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the scripts are given, by name."""
    root = tmp_path_factory.mktemp("models")
    return {
        "MODEL": str(write_llama(root / "model")),
        "CLASSES": str(write_bert(root / "classes", num_labels=3)),
        "SCORES": str(write_bert(root / "scores", num_labels=1)),
        "ADAPTER_1": str(write_adapter(root / "adapter-1", 1)),
        "ADAPTER_2": str(write_adapter(root / "adapter-2", 2)),
    }


@pytest.fixture
def vllm() -> Iterator[None]:
    """`import vllm` works during the test. What a script sets for its process is taken back."""
    yield from with_vllm()


@pytest.fixture(scope="module")
def vllm_in_module() -> Iterator[None]:
    """The same for all tests of a module. Tests with random inputs need this one."""
    yield from with_vllm()


def with_vllm() -> Iterator[None]:
    """Make `import vllm` work until the generator goes on."""
    argv = sys.argv
    path = list(sys.path)
    environment = dict(os.environ)
    finder.install(shadow=True)
    yield
    sys.argv = argv
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, finder.VllmFinder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
