"""Models for the examples, and how they are run within the tests' process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parent))

from tiny_examples import write_all

from pegboard import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"
RunExample = Callable[..., str]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny checkpoints, by name."""
    return write_all(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    """The default model."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """run_example(name, *words) runs a program, and returns what it prints."""

    def run(name: str, *words: str | Path) -> str:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run
