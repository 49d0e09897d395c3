"""The backends that call other libraries, on a fake GPU with stand-ins for these: they give the
tokens of the CPU, and their steps are recorded in pieces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import attention_of, engine_on_fake_gpu, recorder_notes
from pegboard_attention_flash_attn import backend as flash_attn_backend
from pegboard_attention_flash_attn import probe as flash_attn_probe
from pegboard_attention_flashinfer import backend as flashinfer_backend
from pegboard_attention_flashinfer import probe as flashinfer_probe
from tiny_models import make_model, open_llm

from pegboard import LLM, SamplingParams
from pegboard_testing import fake_flash_attn, fake_flashinfer

PROMPTS = [[5, 7, 9, 2, 6, 8, 3], [11, 4]]
BLOCK_SIZES = {"flash_attn": 256, "flashinfer": 16}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries, as far as their probes see."""
    monkeypatch.setattr(flash_attn_probe, "version", lambda name: "2.8.3")
    monkeypatch.setattr(flash_attn_probe, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_probe, "version", lambda name: "0.5.2")
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 64)
    fake_flash_attn.install(monkeypatch, flash_attn_backend)
    fake_flashinfer.install(monkeypatch, flashinfer_backend)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", BLOCK_SIZES)
def test_a_llama(tmp_path: Path, name: str) -> None:
    """Prompts, one of them in two chunks, and decodes."""
    config = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 61}
    make_model("llama", **config, **heads).save_pretrained(tmp_path)
    with open_llm(tmp_path, max_model_len=16, dtype="bfloat16") as llm:
        expected = tokens(llm)
    settings: Any = {
        "dtype": "bfloat16",
        "max_model_len": 16,
        "block_size": BLOCK_SIZES[name],
        "attention_backend": name,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }
    with engine_on_fake_gpu(tmp_path, False, **settings) as (llm, gpu):
        assert attention_of(llm) == {name}
        (note,) = recorder_notes(llm)
        assert note.startswith("not replayed: decode run eagerly: the attention of"), note
        waits = gpu.host_reads
        replays = gpu.replays
        assert tokens(llm) == expected
        assert gpu.replays - replays > 3, "steps are replayed in pieces"
        assert gpu.host_reads == waits, "no step waits for the device"
