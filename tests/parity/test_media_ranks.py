"""Ranks that share out the images of a prompt: the answers of transformers, and an error where one
of them fails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_qwen_vl_parity import FAMILIES, LAYOUTS, MARK
from test_qwen_vl_parity import write as write_qwen
from tiny_media import MediaReference, Prompt, check_media, check_output, open_media_llm, prompt
from tiny_models import TOLERANCE, divide

from pegboard import SamplingParams
from pegboard import installed as installed_plugins
from pegboard.errors import EngineDeadError, PegboardError
from pegboard.plugins import discovery
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_distributions import FakeDistributions

pytestmark = pytest.mark.one_rank  # they divide models themselves
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=-1, ignore_eos=True)
CACHES = (discovery.scan, installed_plugins.installed)
PATIENCE_S = 60
"""A rank that waits for another one gives up much later."""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_qwen(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", LAYOUTS[1])


SIZES = [(40, 20), (13, 50), (24, 24)]


def three_images() -> Prompt:
    first, second, third = (random_image(*size, seed) for seed, size in enumerate(SIZES))
    return prompt(5, first, 6, second, third, 7, mark=MARK)


@pytest.mark.parametrize("budget", [16, 256])
def test_ranks_share_out_three_images(
    qwen: MediaReference, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """In one step, both ranks encode. No image is encoded by both."""
    divide(monkeypatch, 2)
    counts = []
    encode = FAMILIES["qwen2_5_vl"].encode

    def watched(model: Any, modality: str, items: Any) -> Any:
        counts.append(len(items))
        return encode(model, modality, items)

    monkeypatch.setattr(FAMILIES["qwen2_5_vl"], "encode", watched)
    settings = {"max_num_batched_tokens": budget, "max_num_encoder_input_tokens": 256}
    check_media(qwen, [three_images()], repeats=2, **settings)
    assert sum(counts) == 3 and (budget == 16 or sorted(counts) == [1, 2])


def test_a_rank_that_cannot_encode_ends_the_engine(
    qwen: MediaReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads: the other rank is told, and does not wait for the rows."""
    divide(monkeypatch, 2)
    encode = FAMILIES["qwen2_5_vl"].encode

    def failing(model: Any, modality: str, items: Any) -> Any:
        if len(items) == 1:
            raise ZeroDivisionError("no luck")
        return encode(model, modality, items)

    settings = {"max_num_batched_tokens": 256, "max_num_encoder_input_tokens": 256}
    with open_media_llm(qwen.directory, **settings) as llm:
        monkeypatch.setattr(FAMILIES["qwen2_5_vl"], "encode", failing)
        with pytest.raises(PegboardError, match="no luck|ZeroDivision"):
            llm.generate([three_images()], GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate([prompt(5)], GREEDY, use_tqdm=False)


FAILING = """
from dataclasses import replace
from pegboard_model_qwen_vl.plugin import QWEN2_5_VL, QWEN2_5_VL_PROCESSOR
from pegboard_model_qwen_vl.qwen_vl import Qwen25VL

MODEL = replace(QWEN2_5_VL, implementation="acme_encoder:Failing")
PROCESSOR = QWEN2_5_VL_PROCESSOR

class Failing(Qwen25VL):
    def encode(self, modality, items):
        if any(item["pixel_values"].max() < 0 for item in items):
            raise ZeroDivisionError("no luck")
        return super().encode(modality, items)
"""


def test_a_process_that_cannot_encode_ends_the_engine(
    qwen: MediaReference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """One of two processes encodes a black image. Until then, both answer."""
    name = "FailingForConditionalGeneration"
    places = {"model": {name: "acme_encoder:MODEL"}}
    places["multimodal_processor"] = {name: "acme_encoder:PROCESSOR"}
    FakeDistributions(tmp_path).add(
        "acme-encoder", places, {"acme_encoder": FAILING}, requires=["pegboard"]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for cache in CACHES:
        cache.cache_clear()
    request.addfinalizer(lambda: [cache.cache_clear() for cache in CACHES])
    settings = {
        "hf_overrides": {"architectures": [name]},
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 256,
    }
    black = Image.new("RGB", (20, 20))
    started = time.monotonic()
    with open_media_llm(qwen.directory, **settings) as llm:
        (output,) = llm.generate([three_images()], GREEDY, use_tqdm=False)
        check_output(qwen, three_images(), output.outputs[0], TOLERANCE)
        with pytest.raises(PegboardError, match="ZeroDivisionError"):
            llm.generate([prompt(5, black, random_image(9, 40), mark=MARK)], use_tqdm=False)
        with pytest.raises(EngineDeadError):
            llm.generate([prompt(5)], GREEDY, use_tqdm=False)
    assert time.monotonic() - started < PATIENCE_S
