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
import torch
from pegboard_weight_transfer_shared_memory.trainer import shared
from safetensors.torch import load_file
from test_new_weights import PROMPTS, check, write_other
from tiny_models import Reference, divide

from pegboard import LLM
from pegboard.errors import ConfigError, EngineDeadError, RequestError

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


@pytest.mark.one_rank
def test_weights_that_do_not_fit_leave_the_old_ones(
    models: tuple[Reference, Reference], open_llm: Callable[..., LLM]
) -> None:
    old, new = models
    weights = load_file(new.directory / "model.safetensors")
    name = "model.norm.weight"
    others = {each: tensor for each, tensor in weights.items() if each != name}
    with open_llm(old.directory, block_size=16, **SHARED) as llm:

        def refuse(message: str, update: dict[str, Any]) -> None:
            with pytest.raises(RequestError, match=message) as refusal:
                llm.update_weights({"update_info": update})
            assert refusal.value.parameter == "update_info"

        for wrong, message in (
            (others, f"the update lacks 1 tensors that the model needs: {name}"),
            ({**others, "other.weight": weights[name]}, f"lacks 1 tensors .*: {name}"),
            ({**weights, name: torch.zeros(3)}, rf"{name} has shape \[3\]; the model expects"),
            ({**weights, name: weights[name].int()}, "as float32, .* would send int32"),
        ):
            with shared(wrong) as info:
                refuse(message, info)
        with shared(weights) as info:
            refuse("have .* items", {**info, "shapes": info["shapes"][1:]})
            refuse("a name twice", {**info, "names": [name] * len(weights)})
            refuse("expected the lists names", {"segment": info["segment"]})
            refuse("the type 'load'", {**info, "dtype_names": ["load"] * len(weights)})
        refuse("cannot be read", info)
        check(llm, old, PROMPTS)


@pytest.mark.one_rank
def test_a_transfer_that_fails_after_its_beginning(
    models: tuple[Reference, Reference], open_llm: Callable[..., LLM]
) -> None:
    """The engine reads its last checkpoint again, and says so. If that is gone, it is dead."""
    old, new = models
    weights = load_file(new.directory / "model.safetensors")
    broken = {**weights, [*weights][-1]: torch.full_like(weights[[*weights][-1]], torch.nan)}
    with open_llm(old.directory, block_size=16, enable_sleep_mode=True, **SHARED) as llm:
        for _ in range(2):
            with shared(broken) as info, pytest.raises(RequestError, match="NaN.*last checkpoint"):
                llm.update_weights({"update_info": info})
            check(llm, old, PROMPTS)
            with shared(weights) as info:
                llm.update_weights({"update_info": info})
            check(llm, new, PROMPTS)
        with pytest.raises(ConfigError, match="no checkpoint has them; use sleep level 1"):
            llm.sleep(level=2)
        with pytest.raises(RequestError, match="are in no checkpoint"):
            llm.save_sharded_state(old.directory.parent / "shares")
        llm.sleep(level=1)
        llm.wake_up()
        check(llm, new, PROMPTS)
        (old.directory / "model.safetensors").rename(old.directory / "away")
        with shared(broken) as info, pytest.raises(EngineDeadError, match="incomplete"):
            llm.update_weights({"update_info": info})


def test_an_engine_without_the_setting(
    models: tuple[Reference, Reference], open_llm: Callable[..., LLM]
) -> None:
    with open_llm(models[0].directory) as llm:
        with pytest.raises(RequestError, match="start it with --weight-transfer-config"):
            llm.init_weight_transfer_engine({"init_info": {}})
        for request in ({}, {"update_info": 3}, None):
            with pytest.raises(RequestError, match="update_info"):
                llm.update_weights(request)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_every_rank_takes_its_share(
    models: tuple[Reference, Reference],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
) -> None:
    """Also of an engine that was started without weights."""
    divide(monkeypatch, *sizes)
    new = models[1]
    settings = {**SHARED, "load_format": "dummy"}
    with (
        open_llm(models[0].directory, block_size=16, **settings) as llm,
        shared(load_file(new.directory / "model.safetensors")) as info,
    ):
        llm.update_weights({"update_info": info})
        check(llm, new, PROMPTS)
