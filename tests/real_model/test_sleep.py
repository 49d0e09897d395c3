"""The default model sleeps: its process gives the memory back, and the tokens after waking are the
same."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.errors import ModelError, RequestError
from pegboard_testing.held_memory import held_bytes

pytestmark = pytest.mark.real_model

FORMS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "packed": {"repack_cache_gb": 0},
    "float": {"dtype": "float32", "plugin_options": {"quantization.gguf": {"compute": "float"}}},
}
"""Where the weights are: in a mapped file, in memory as stored integers, or in memory as floats."""

CASES = [
    pytest.param(
        form,
        level,
        marks=[] if (form, level) in (("mapped", 1), ("packed", 2)) else [pytest.mark.slow],
    )
    for form in FORMS
    for level in (1, 2)
]

PROMPTS = ["The capital of France is", "Once upon a time " * 40]


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(
        enable_sleep_mode=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=1024,
        **FORMS[request.param],
    )
    yield llm
    llm.shutdown()
    del llm
    gc.collect()


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine._parts.executor.worker


@pytest.mark.parametrize(("llm", "level"), CASES, indirect=["llm"])
def test_sleep_releases_memory_and_changes_no_token(llm: LLM, level: int) -> None:
    before = tokens(llm)
    worker = worker_of(llm)
    views = []
    for tensors in worker.running.parts.views.values():
        views += tensors.values()
    for view in views:
        view.zero_()  # so that the whole cache is in memory
    llm.reset_prefix_cache()
    weight_bytes = sum(
        held_bytes(layer.method)
        for layer in worker.models[0].layers
        if getattr(layer, "method", None)
    )
    awake = resident_bytes()
    llm.sleep(level=level)
    released = awake - resident_bytes()
    assert released >= 0.85 * (weight_bytes + (64 << 20)), (
        f"{released >> 20} of {(weight_bytes >> 20) + 64} MiB were released"
    )
    assert llm.is_sleeping()
    with pytest.raises(RequestError, match="wake_up"):
        tokens(llm)
    assert not llm.wake_up(["weights"]) and llm.is_sleeping()
    assert llm.wake_up() and not llm.is_sleeping()
    assert tokens(llm) == before


@pytest.mark.parametrize("llm", ["packed"], indirect=True)
def test_a_layer_whose_weights_do_not_come_back_is_an_error(llm: LLM) -> None:
    worker = worker_of(llm)
    tensor = next(
        layer.weight.data
        for layer, wanted in worker.models[0].declared.items()
        if wanted and "norm" in wanted[0].name
    )
    tensor += 1  # as if the checkpoint had changed
    llm.sleep(level=2)
    with pytest.raises(ModelError, match="differ"):
        llm.wake_up()
    assert llm.is_sleeping(), "it can be woken when the checkpoint is right again"
