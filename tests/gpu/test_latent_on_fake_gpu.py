"""Models with latent attention on a fake GPU: Triton's kernels and captured steps give the tokens
of the CPU, and no step waits for the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import attention_of, engine_on_fake_gpu, recorder_notes
from test_mtp_drafts import dense_deepseek
from tiny_models import make_model, open_llm

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("interpreted_triton")

PROMPTS = [[5, 7, 9, 2, 6, 8, 3], [11, 4]]
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "vocab_size": 61,
}


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "mtp"])
def test_a_deepseek_without_experts(tmp_path: Path, drafts: bool) -> None:
    """Prompts, one of them in two chunks, and decodes or the verification of drafts."""
    if drafts:
        dense_deepseek(tmp_path, is_right=True)
    else:
        make_model("deepseek_v3", **CONFIG).save_pretrained(tmp_path)
    with open_llm(tmp_path, max_model_len=16) as llm:
        expected = tokens(llm)
    settings: Any = {
        "dtype": "float32",
        "max_model_len": 16,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    if drafts:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    with engine_on_fake_gpu(tmp_path, **settings) as (llm, gpu):
        assert attention_of(llm) == {"triton_mla"}
        assert recorder_notes(llm) == (), "whole steps are captured"
        waits = (gpu.host_reads, gpu.blocking_uploads)
        replays = gpu.replays
        assert tokens(llm) == expected
        assert gpu.replays - replays > 3, "decodes are replayed"
        assert (gpu.host_reads, gpu.blocking_uploads) == waits, "no step waits for the device"
