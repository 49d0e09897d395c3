"""Drafts on a fake GPU: steps with drafts are scheduled ahead, nothing waits for the device, and the
tokens are those of plain decoding on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]

from fake_gpu_engine import engine_on_fake_gpu
from tiny_drafts import METHODS, NUM_DRAFTS, Drafted

from pegboard import LLM, SamplingParams

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

PROMPTS = [[20, 21, 22, 23, 24], [40], [60, 61, 3]]


@pytest.fixture(params=METHODS)
def drafted(request: pytest.FixtureRequest, tmp_path: Path) -> Drafted:
    return METHODS[request.param](tmp_path)


def generate(llm: LLM, params: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens(drafted: Drafted) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    expected = generate(LLM(str(drafted.directory), dtype="float32"), greedy)
    with engine_on_fake_gpu(drafted.directory, speculative_config=drafted.config) as (llm, gpu):
        reads = gpu.host_reads
        blocking = gpu.blocking_uploads
        assert generate(llm, greedy) == expected
        assert (gpu.host_reads, gpu.blocking_uploads) == (reads, blocking)
