"""Parity with transformers: fixtures around `tiny_models`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM
from pegboard.errors import ConfigError, ModelError

sys.path.insert(0, str(Path(__file__).parent))

from tiny_encoders import make_encoder, open_encoder
from tiny_models import (
    SIZES,
    VOCAB_SIZE,
    Reference,
    check_cached,
    check_parity,
    divide,
    make_model,
    open_llm,
)

NOT_DIVIDED = re.compile(
    r"layers of this architecture cannot be divided|cannot divide its layers|has no stack of layers"
    r"|no tensor parallel plan"
    r"|\d+ heads, channels or experts to divide among|\d+ layers to divide among"
    r"|which the ranks cannot divide|so ranks cannot divide (them|it)"
    r"|'ThreadsExecutor' object has no attribute 'worker'|not replayed"
)
"""What an engine says of a model that it cannot divide, a test that looks into its only worker, or
one that compares logs of what is recorded: ranks that are threads are not recorded."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Reference]:
    """write(model_type, folder="model", **config values) makes a tiny model and writes its
    checkpoint as safetensors."""

    def make(model_type: str, folder: str = "model", **values: Any) -> Reference:
        model = make_model(model_type, **values)
        model.save_pretrained(tmp_path / folder)
        return Reference(tmp_path / folder, model)

    return make


@pytest.fixture
def write_encoder(tmp_path: Path) -> Callable[..., tuple[Path, Any, Any]]:
    """write_encoder(architecture, head, **config) → its folder, the model and its tokenizer."""
    return lambda *names, **values: make_encoder(tmp_path / "model", *names, **values)


@pytest.fixture(name="open_encoder")
def open_encoder_fixture() -> Callable[..., LLM]:
    return open_encoder


@pytest.fixture
def sizes() -> dict[str, Any]:
    """The common sizes, for configs that nest them."""
    return {**SIZES, "vocab_size": VOCAB_SIZE}


@pytest.fixture(name="check_parity")
def check_parity_fixture() -> Callable[..., None]:
    return check_parity


@pytest.fixture(name="check_cached")
def check_cached_fixture() -> Callable[..., None]:
    return check_cached


@pytest.fixture
def check_recorded(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> Callable[..., None]:
    """With blocks that the native attention supports, the forward is recorded, with the same
    results. No stage runs eagerly."""
    is_whole = ranks_of(request) == (1, 1)

    def check(reference: Reference, **settings: Any) -> None:
        caplog.clear()
        caplog.set_level("INFO", "pegboard")
        check_parity(reference, lengths=(17, 33), block_size=16, **settings)
        if is_whole:
            assert "eagerly" not in caplog.text and "not replayed" not in caplog.text

    return check


def ranks_of(request: pytest.FixtureRequest) -> tuple[int, int]:
    """Return the ranks of each pipeline stage, and the number of stages."""
    count, stages = (request.config.getoption(name, default=1) for name in ("--ranks", "--stages"))
    return count, stages


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        default=1,
        help="divide the layers of models in parity tests among this many ranks",
    )
    parser.addoption(
        "--stages",
        type=int,
        default=1,
        help="divide the models of parity tests into this many pipeline stages",
    )


@pytest.fixture(autouse=True)
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --ranks or --stages, models are divided among ranks that are threads of this
    process."""
    if (numbers := ranks_of(request)) != (1, 1):
        divide(monkeypatch, *numbers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if is_divided(item) and item.get_closest_marker("one_rank"):
        pytest.skip("looks into the only worker of an engine")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip tests of models that cannot be divided so."""
    try:
        return (yield)
    except (ConfigError, ModelError, AttributeError, AssertionError) as error:
        if is_divided(item) and (reason := NOT_DIVIDED.search(str(error))):
            pytest.skip(reason[0])
        raise


def is_divided(item: pytest.Item) -> bool:
    names = ("--ranks", "--stages")
    return any(item.config.getoption(name, default=1) > 1 for name in names)


@pytest.fixture(name="open_llm")
def open_llm_fixture() -> Callable[..., LLM]:
    return open_llm
