"""Experts and adapters on a fake GPU: decodes are captured, nothing waits for the device, and the
tokens are those of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu
from pegboard_kernel_triton import sampling
from tiny_models import make_model

from pegboard import LLM, LoRARequest, SamplingParams
from pegboard.worker import worker

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

NUM_EXPERTS = 4
HIDDEN = 16
INNER = 24
CONFIG = {
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 67,
}
PROMPTS = [[40, 41, 42, 43, 44], [60, 61]]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 2}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sampling, "ROWS", 4)  # faster in the interpreter
    make_model("mixtral", **CONFIG).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> list[LoRARequest]:
    """One adapter of experts and attention, and one of attention and the head."""

    def read(registry: Any, base: Any, lora: LoRARequest) -> Any:
        return 2.0, adapter_of(lora.lora_int_id)

    monkeypatch.setattr(worker, "read_files", read)
    return [LoRARequest("one", 1, "/one"), LoRARequest("two", 2, "/two")]


def adapter_of(number: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    rank = 1 + number
    generator = torch.Generator().manual_seed(number)
    shapes = {}
    path = "model.layers.0"
    shapes[f"{path}.self_attn.q_proj"] = (2 * 8, HIDDEN)
    shapes[f"{path}.self_attn.v_proj"] = (8, HIDDEN)
    shapes[f"{path}.self_attn.o_proj"] = (HIDDEN, 2 * 8)
    for expert in range(NUM_EXPERTS if number == 1 else 0):
        experts = f"{path}.block_sparse_moe.experts.{expert}"
        shapes[f"{experts}.w1"] = shapes[f"{experts}.w3"] = (INNER, HIDDEN)
        shapes[f"{experts}.w2"] = (HIDDEN, INNER)
    if number == 2:
        shapes["lm_head"] = (67, HIDDEN)
    return {
        name: (
            torch.randn(rank, columns, generator=generator) / columns**0.5,
            torch.randn(rows, rank, generator=generator),
        )
        for name, (rows, columns) in shapes.items()
    }


def generate(llm: LLM, loras: Sequence[LoRARequest | None] | None = None) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY, lora_request=loras, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_experts_are_captured(model: Path) -> None:
    with LLM(str(model), **SETTINGS) as on_cpu:
        expected = generate(on_cpu)
    with engine_on_fake_gpu(model, **SETTINGS) as (llm, gpu):
        before = (gpu.host_reads, gpu.blocking_uploads, gpu.replays)
        assert generate(llm) == expected
        assert (gpu.host_reads, gpu.blocking_uploads) == before[:2], "no step waits for the device"
        assert gpu.replays - before[2] >= 4, "each decode, and the head for prompts"


@pytest.mark.slow
def test_adapters_are_captured(model: Path, adapters: list[LoRARequest]) -> None:
    """The same recordings serve steps with other adapters, and others those without any."""
    one, two = adapters
    with LLM(str(model), **SETTINGS, **LORA) as on_cpu:
        plain = generate(on_cpu)
        both = generate(on_cpu, [one, two])
        single = generate(on_cpu, [None, one])
    assert single[0] == plain[0]
    assert all(tokens != plain[1] for tokens in (both[1], single[1])) and both[0] != plain[0]
    with engine_on_fake_gpu(model, **SETTINGS, **LORA) as (llm, gpu):
        assert generate(llm, [one, two]) == both, "adapters are read and copied to the device"
        before = (gpu.host_reads, gpu.blocking_uploads, gpu.captures, gpu.replays)
        assert generate(llm, [None, one]) == single
        assert (gpu.host_reads, gpu.blocking_uploads) == before[:2], "no step waits for the device"
        assert gpu.replays - before[3] >= 4, "each decode, and the head for prompts"
        replays = gpu.replays
        assert generate(llm) == plain
        assert gpu.captures == before[2] and gpu.replays - replays >= 4
