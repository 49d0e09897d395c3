"""The KV connector `offload` on the fake GPU copies blocks beside the steps, which never wait."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu
from tiny_models import make_model

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("interpreted_triton")

PROMPTS = [{"prompt_token_ids": list(range(start, start + 14))} for start in (3, 5, 7, 9)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
    "max_model_len": 32,
}
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"num_cpu_blocks": 100},
}


def turns(llm: LLM) -> list[list[int]]:
    """Return the answers to all prompts, three times in turn, which the KV cache cannot hold."""
    outputs = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(3)]
    return [list(output.outputs[0].token_ids) for each in outputs for output in each]


@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 10), ("gemma2", 18)])
def test_blocks_come_back_and_no_step_waits(tmp_path: Path, family: str, num_blocks: int) -> None:
    settings = {**SETTINGS, "num_gpu_blocks_override": num_blocks}
    make_model(family, hidden_size=32, intermediate_size=48, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    with engine_on_fake_gpu(tmp_path, False, **settings) as (llm, _):
        expected = turns(llm)
    connected = {**settings, "kv_transfer_config": CONNECTOR}
    with engine_on_fake_gpu(tmp_path, False, **connected) as (llm, gpu):
        before = (gpu.host_reads, gpu.blocking_uploads)
        assert turns(llm) == expected
        assert (gpu.host_reads, gpu.blocking_uploads) == before, "no step waits for the device"
        assert llm.llm_engine.engine.stats()["external_prefix_cache_hits_total"] >= 80
