"""Embedding models on a fake GPU: Triton's attention of encoders gives the vectors of the CPU. Only
the pooler waits for the device, because it returns the vectors of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from fake_gpu_engine import attention_of, engine_on_fake_gpu
from pegboard_pooler_sentence.pooler import SentencePooler

from pegboard import LLM
from pegboard_testing.fake_gpu import FakeGPU

pytestmark = pytest.mark.usefixtures("interpreted_triton")

PROMPTS = [[5, 7, 9, 2, 6], [11], [3, 8, 4, 1, 9, 10, 12, 5, 6, 7], [2, 3]]


def write_bert(folder: Path) -> None:
    """A Bert with one layer and random weights."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)


def vectors(llm: LLM) -> torch.Tensor:
    """Return the vectors of the prompts: [prompts, 16]."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.embed(prompts, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def waits_of(gpu: FakeGPU) -> torch.Tensor:
    """Return how often the host has waited to read and to upload."""
    return torch.tensor([gpu.host_reads, gpu.blocking_uploads])


def test_vectors_of_a_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of mixed lengths, of which several are in a step."""
    write_bert(tmp_path)
    settings: Any = {"dtype": "float32", "max_num_seqs": 3, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), max_num_batched_tokens=16, **settings) as llm:
        expected = vectors(llm)
    pool = SentencePooler.pool
    with engine_on_fake_gpu(tmp_path, **settings) as (llm, gpu):
        assert attention_of(llm) == {"triton_encoder"}
        of_pooler = []

        def watched(self: SentencePooler, *given: Any) -> Any:
            before = waits_of(gpu)
            result = pool(self, *given)
            of_pooler.append(waits_of(gpu) - before)
            return result

        monkeypatch.setattr(SentencePooler, "pool", watched)
        before = waits_of(gpu)
        torch.testing.assert_close(vectors(llm), expected, rtol=1e-4, atol=1e-5)
        assert len(of_pooler) > 1
        assert torch.equal(waits_of(gpu) - before, sum(of_pooler)), "attention does not wait"
