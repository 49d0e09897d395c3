"""A trainer in another process sends weights: the engine then computes as one that was started with
them, and one that refuses them answers as before."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_new_weights import PROMPTS, check, write_other
from tiny_models import Reference

from pegboard import LLM

SHARED = {"weight_transfer": "shared_memory"}
TRAINER = Path(__file__).parent / "weight_trainer.py"


class Trainer:
    """A process that runs `weight_trainer.py`."""

    def __init__(self, backend: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), backend, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()


@contextmanager
def trainer(backend: str, *words: str) -> Iterator[Trainer]:
    process = Trainer(backend, *words)
    try:
        yield process
    finally:
        process.end()


@pytest.fixture
def models(write: Callable[..., Reference], tmp_path: Path) -> tuple[Reference, Reference]:
    return write("llama"), write_other(tmp_path / "new", "llama", {})


def test_weights_come_through_shared_memory(
    models: tuple[Reference, Reference], open_llm: Callable[..., LLM]
) -> None:
    old, new = models
    with open_llm(old.directory, block_size=16, **SHARED) as llm, trainer("shared_memory") as other:
        check(llm, old, PROMPTS)
        for reference in (new, old, new):
            other.say(str(reference.directory))
            llm.update_weights({"update_info": other.hear()})
            other.say("")
            check(llm, reference, PROMPTS)
        llm.update_weights(old.directory)
        check(llm, old, PROMPTS)


@pytest.fixture
def place() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
    }


def test_weights_come_through_gloo(
    models: tuple[Reference, Reference], open_llm: Callable[..., LLM], place: dict[str, Any]
) -> None:
    old, new = models
    settings: dict[str, Any] = {"weight_transfer_config": {"backend": "nccl"}}
    words = [str(place[name]) for name in ("master_port", "world_size")]
    with (
        open_llm(old.directory, block_size=16, **settings) as llm,
        trainer("torch", *words) as other,
    ):
        llm.init_weight_transfer_engine({"init_info": place})
        for reference in (new, old, new):
            other.say(str(reference.directory))
            llm.update_weights({"update_info": other.hear()})
            other.say("")
            check(llm, reference, PROMPTS)
