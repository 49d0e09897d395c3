"""Drafts on a fake GPU: steps with drafts are scheduled ahead, nothing waits for the device, and
the tokens are those of the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import tiny_drafts
from fake_gpu_engine import engine_on_fake_gpu, submitted_steps
from pegboard_kernel_triton import sampling
from tiny_drafts import METHODS, Drafted
from tiny_models import nightly
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.data.batch import Batch
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.worker.recordings import Recorded
from pegboard.worker.stages import Stages

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

BY_TRITON = ("draft_model", "mtp")
"""The methods whose kernels are interpreted. The kernels do not depend on the method."""
PROMPTS = [[40, 41, 42, 43, 44], [60, 61]]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
DRAWN = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, max_tokens=4, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.5, seed=3, repetition_penalty=1.1, presence_penalty=0.2, max_tokens=6
)
EDITED = SamplingParams(
    temperature=0, bad_words=["."], logit_bias={70: 3.0}, min_tokens=4, max_tokens=5
)


def drafted(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch, noise: float) -> Drafted:
    torch.manual_seed(1)
    monkeypatch.setattr(sampling, "ROWS", 2)  # faster in the interpreter
    monkeypatch.setattr(tiny_drafts, "NOISE", noise)
    return METHODS[method](folder)


def generate(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Return the recordings of whole steps that are replayed from now on."""
    replays: list[Recorded] = []
    decode = Stages.decode

    def watched(stages: Stages, recorded: Recorded, num_tokens: int) -> tuple[Tensor, Tensor]:
        replays.append(recorded)
        return decode(stages, recorded, num_tokens)

    monkeypatch.setattr(Stages, "decode", watched)
    return replays


def logprobs(llm: LLM) -> list[dict[tuple[int, int], float]]:
    """Return (place, token) → logprob for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [
        {
            (place, token): entry.logprob
            for place, entries in enumerate(output.outputs[0].logprobs)
            for token, entry in entries.items()
        }
        for output in outputs
    ]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, bool]]:
    return submitted_steps(monkeypatch)


@pytest.mark.parametrize("method", nightly(METHODS, "draft_model", "mtp"))
def test_right_drafts_are_verified_without_waiting(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    submitted: list[tuple[Batch, bool]],
) -> None:
    here = drafted(method, tmp_path, monkeypatch, noise=0.05)
    expected = generate(LLM(str(here.directory), dtype="float32"), GREEDY)
    settings = {"speculative_config": here.config, "max_in_flight": 2, "max_num_seqs": 2}
    settings["by_triton"] = method in BY_TRITON
    replays = replayed(monkeypatch)
    with engine_on_fake_gpu(here.directory, **settings) as (llm, gpu):
        waits = (gpu.host_reads, gpu.blocking_uploads)
        assert generate(llm, GREEDY) == expected
        assert (gpu.host_reads, gpu.blocking_uploads) == waits, "no step waits for the device"
        verifying = [is_alone for batch, is_alone in submitted if batch.num_draft_tokens.any()]
        assert verifying.count(False) >= 2, "steps with drafts are scheduled ahead"
        assert len(submitted) <= 6, "nearly all drafts are right"
    assert any(each.num_tokens > each.num_rows for each in replays), "recorded with all drafts"


@pytest.mark.parametrize(
    ("method", "params"), [("draft_model", GREEDY), ("eagle", SEEDED)], ids=["greedy", "seeded"]
)
def test_drafts_that_are_often_wrong(
    method: str, params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts, drawn tokens, and requests that need what was sampled before. Torch
    computes, because it is faster than the interpreter of Triton."""
    here = drafted(method, tmp_path, monkeypatch, noise=0.15)
    on_cpu = LLM(str(here.directory), dtype="float32")
    settings = {
        "speculative_config": here.config,
        "max_in_flight": 2,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 6,
        "by_triton": False,
    }
    with engine_on_fake_gpu(here.directory, **settings) as (llm, gpu):
        waits = (gpu.host_reads, gpu.blocking_uploads)
        assert generate(llm, params) == generate(on_cpu, params)
        assert [len(tokens) for tokens in generate(llm, DRAWN)] == [4, 4]
        assert generate(llm, EDITED) == generate(on_cpu, EDITED)
        words = [on_cpu.get_tokenizer().decode([70] * count) for count in (2, 4)]
        forbidding = msgspec.structs.replace(EDITED, bad_words=words, min_tokens=0)
        assert generate(llm, forbidding) == generate(on_cpu, forbidding)
        assert [70, 70] in [ids[:2] for ids in generate(on_cpu, EDITED)]
        assert all(
            [70, 70] not in [ids[i : i + 2] for i in range(4)] for ids in generate(llm, forbidding)
        )
        for ours, theirs in zip(logprobs(llm), logprobs(on_cpu), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
        assert (gpu.host_reads, gpu.blocking_uploads) == waits, "no step waits for the device"


def test_structured_output_waits_for_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: list[tuple[Batch, bool]]
) -> None:
    here = drafted("eagle", tmp_path, monkeypatch, noise=0.05)
    digits = StructuredOutputsParams(regex="[a-z]{4}[0-9]+")
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=digits)
    expected = generate(LLM(str(here.directory), dtype="float32"), params)
    settings = {"max_num_seqs": 2, "speculative_config": here.config, "by_triton": False}
    with engine_on_fake_gpu(here.directory, **settings) as (llm, _):
        assert generate(llm, params) == expected
    assert any(batch.num_draft_tokens.any() for batch, _ in submitted)
