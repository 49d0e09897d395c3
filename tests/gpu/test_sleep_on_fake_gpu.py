"""Engines on the fake GPU sleep: their memory is given back, all addresses are the same after
waking, and recorded decodes give the same tokens."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import show_sleep
from fake_gpu_engine import engine_on_fake_gpu
from tiny_models import make_model

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError
from pegboard.worker.memory import tensors_of
from pegboard_gpus import platform as gpu_platform
from pegboard_testing.fake_driver import OUT_OF_MEMORY, FakeLibrary, install_driver
from pegboard_testing.fake_gpu import FakeGPU

pytestmark = pytest.mark.usefixtures("interpreted_triton")

PROMPTS = [{"prompt_token_ids": [5, 7, 9]}, {"prompt_token_ids": list(range(3, 14))}]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
    "max_model_len": 32,
    "enable_sleep_mode": True,
    "enable_prefix_caching": False,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeGPU, FakeLibrary]:
    gpu = FakeGPU()
    library = install_driver(monkeypatch, gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        gpu_platform, "pinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    return gpu, library


@pytest.fixture
def llm(tmp_path: Path, device: tuple[FakeGPU, FakeLibrary]) -> Iterator[LLM]:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    spec = "fake_gpu_engine:SLEEPING_GPU"
    with engine_on_fake_gpu(tmp_path, False, platform=spec, gpu=device[0], **SETTINGS) as (llm, _):
        yield llm


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(llm: LLM) -> Any:
    executor: Any = llm.llm_engine.engine._parts.executor
    return executor.worker


def addresses(llm: LLM) -> list[int]:
    worker = worker_of(llm)
    layers = [layer for model in worker.models for layer in model.layers]
    weights = [
        tensor for layer in layers for holder in layer.holders() for tensor in holder.tensors()
    ]
    return [tensor.data_ptr() for tensor in (*weights, *tensors_of(worker.running.parts.views))]


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_comes_back(
    llm: LLM, device: tuple[FakeGPU, FakeLibrary], level: int
) -> None:
    gpu, library = device
    expected = generate(llm)
    before = addresses(llm)
    assert all(library.range_of(address) is not None for address in before), "nothing is left out"
    used = gpu.used_bytes
    segments = sum(place.size for place in library.ranges.values())
    llm.sleep(level=level)
    assert used - gpu.used_bytes == segments and not library.handles
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tensors_of(worker_of(llm).running.parts.views)[0].sum()
    llm.wake_up(tags=["weights"])
    assert gpu.used_bytes < used
    llm.wake_up()
    assert gpu.used_bytes == used and addresses(llm) == before
    replays = gpu.replays
    assert generate(llm) == expected
    assert gpu.replays - replays >= 3, "the recordings are valid"


def test_new_weights_after_level_two(
    llm: LLM, device: tuple[FakeGPU, FakeLibrary], tmp_path: Path
) -> None:
    """They are written to the same addresses."""
    old = generate(llm)
    new = tmp_path / "new"
    other = make_model("llama", **SIZES)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    other.save_pretrained(new)
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(str(new))
    assert generate(llm) != old
    llm.update_weights(str(tmp_path))
    assert generate(llm) == old


def test_an_engine_sleeps_on_while_others_have_its_memory(
    llm: LLM, device: tuple[FakeGPU, FakeLibrary]
) -> None:
    gpu, library = device
    expected = generate(llm)
    llm.sleep(level=1)
    library.failures["MemCreate"] = OUT_OF_MEMORY
    with pytest.raises(ConfigError, match="cannot be taken again .*MemCreate: out of memory"):
        llm.wake_up()
    llm.wake_up()
    assert generate(llm) == expected


def test_an_engine_that_cannot_release_everything_stays_awake(
    llm: LLM, device: tuple[FakeGPU, FakeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = device
    expected = generate(llm)
    used = gpu.used_bytes
    platform = worker_of(llm).setup.platform
    release = platform.release

    def refuse(tensors: Any, *, keep: bool) -> Any:
        if not keep:
            raise ConfigError("no room")
        return release(tensors, keep=keep)

    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", refuse)
        with pytest.raises(ConfigError, match="no room"):
            llm.sleep(level=1)
    assert gpu.used_bytes == used and generate(llm) == expected


def test_a_stopped_engine_leaves_nothing(
    tmp_path: Path, device: tuple[FakeGPU, FakeLibrary]
) -> None:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    spec = "fake_gpu_engine:SLEEPING_GPU"
    with engine_on_fake_gpu(tmp_path, False, platform=spec, gpu=device[0], **SETTINGS) as (llm, _):
        assert device[1].handles
        llm.sleep(level=1)
    del llm
    gc.collect()
    assert not device[1].handles and not device[1].ranges


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_part_of_the_weights_stays_on_the_host(
    tmp_path: Path, device: tuple[FakeGPU, FakeLibrary], sleeps: bool
) -> None:
    """The device reads it there, also in recorded steps. The KV cache is on the device."""
    gpu, library = device
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    settings = {**SETTINGS, "platform": "fake_gpu_engine:SLEEPING_GPU", "enable_sleep_mode": sleeps}
    with engine_on_fake_gpu(
        tmp_path, False, gpu=gpu, **{**SETTINGS, "enable_sleep_mode": False}
    ) as (llm, _):
        expected = generate(llm)
    offload = {"cpu_offload_gb": 2 / 1024}  # one segment
    with engine_on_fake_gpu(tmp_path, False, gpu=gpu, **settings, **offload) as (llm, _):
        (on_host,) = [place for place in library.ranges.values() if place.is_host]
        inside = [
            on_host.address <= each < on_host.address + on_host.size for each in addresses(llm)
        ]
        cache = tensors_of(worker_of(llm).running.parts.views)
        assert any(inside) and not any(inside[-len(cache) :])
        replays = gpu.replays
        assert generate(llm) == expected and gpu.replays - replays >= 3
        if sleeps:
            before = addresses(llm)
            for level in (1, 2):
                llm.sleep(level=level)
                llm.wake_up()
                assert generate(llm) == expected and addresses(llm) == before
        del llm
    gc.collect()
    assert not library.ranges


def test_host_memory_is_refused_on_a_cpu(tmp_path: Path) -> None:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="on a CPU, all weights are in the host's memory"):
        LLM(str(tmp_path), skip_tokenizer_init=True, cpu_offload_gb=1)


def test_what_shows_sleep_on_a_card(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_sleep, "LLM", lambda *given, **settings: nullcontext(llm))
    monkeypatch.setattr(show_sleep, "PROMPTS", PROMPTS)
    monkeypatch.setattr(show_sleep, "GREEDY", GREEDY)
    assert show_sleep.main(["/model"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("equal") for line in lines] == [None, None, True, None, True]
    assert lines[0]["free_gib"] == lines[2]["free_gib"] < lines[1]["free_gib"]


def test_without_the_setting_torch_has_the_memory(
    tmp_path: Path, device: tuple[FakeGPU, FakeLibrary]
) -> None:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    settings = {**SETTINGS, "enable_sleep_mode": False}
    spec = "fake_gpu_engine:SLEEPING_GPU"
    with engine_on_fake_gpu(tmp_path, False, platform=spec, gpu=device[0], **settings) as (llm, _):
        assert not device[1].calls and len(generate(llm)) == 2
