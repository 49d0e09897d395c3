"""The pytest plugin of Pegboard: fixtures for plugin authors, and the contract tests of output
parsers, collected from their examples.

Every pytest run loads it if pegboard-testing is installed, so it imports nothing of Pegboard until
something is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pegboard_testing.fake_distributions import FakeDistributions

EXAMPLES_IMPORT = b"pegboard_testing.parser_examples"


class ParserExamples(pytest.Module):
    """Collects a `tests/examples.py` of a package with output parsers."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        from pegboard_testing.contract_output_parser import contract_classes

        vars(self.obj).update(contract_classes(self.obj))
        return super().collect()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects the contract tests of every parser that has examples."""
    if (
        file_path.name != "examples.py"
        or file_path.parent.name != "tests"
        or EXAMPLES_IMPORT not in file_path.read_bytes()
    ):
        return None
    examples: ParserExamples = ParserExamples.from_parent(parent, path=file_path)
    return examples


@pytest.fixture
def fake_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["FakeDistributions"]:
    """A folder on sys.path in which a test installs fake plugin distributions. Their modules are
    removed from sys.modules after the test, and a scan that has seen them is forgotten."""
    from pegboard import installed
    from pegboard.plugins import discovery
    from pegboard_testing.fake_distributions import FakeDistributions

    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    caches = (installed.installed, discovery.scan)
    misses = [cache.cache_info().misses for cache in caches]
    yield FakeDistributions(root)
    for cache, before in zip(caches, misses, strict=True):
        if cache.cache_info().misses != before:
            cache.cache_clear()
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(root)):
            del sys.modules[name]


@pytest.fixture
def interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton kernels compute on the CPU, in Triton's interpreter. The test is skipped unless
    the environment had TRITON_INTERPRET=1 when Triton was imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 is not set, so Triton kernels need a GPU")
    try:
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:
        pytest.skip("triton is not installed")
    from pegboard_testing.fake_triton import corrected_products, rounded_casts, rounded_float8

    monkeypatch.setattr(InterpreterBuilder, "create_dot", corrected_products())
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded_casts())
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", rounded_float8())


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the default model. It is downloaded on first use. If that fails, the test is
    skipped."""
    from pegboard.config.schema import Settings
    from pegboard.errors import PegboardError
    from pegboard.plan.engine_plan import resolve

    try:
        plan, _ = resolve(Settings())
    except PegboardError as error:
        pytest.skip(f"the default model is not available: {error}")
    return plan.checkpoint.path
