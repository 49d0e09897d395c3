"""Embedding models on a fake GPU: Triton's attention of encoders gives the vectors and classes of
the CPU, and nothing waits for the device while steps are submitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from fake_gpu_engine import attention_of, engine_on_fake_gpu, submitted_steps

from pegboard import LLM
from pegboard_testing.fake_gpu import FakeGPU

pytestmark = pytest.mark.usefixtures("interpreted_triton")

PROMPTS = [[5, 7, 9, 2, 6], [11], [3, 8, 4, 1, 9, 10, 12, 5, 6, 7], [2, 3]]


SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}


def write_bert(folder: Path, kind: Any = transformers.BertModel) -> None:
    """A Bert with one layer and random weights. kind: its class in transformers."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)


def vectors(llm: LLM) -> torch.Tensor:
    """Return the vectors of the prompts: [prompts, size]."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.embed(prompts, use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


def waits_of(gpu: FakeGPU) -> tuple[int, int]:
    """Return how often the host has waited to read and to upload."""
    return gpu.host_reads, gpu.blocking_uploads


@pytest.mark.parametrize("pooling_type", ["CLS", "MEAN", "LAST"])
def test_vectors_of_a_bert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling_type: str
) -> None:
    """Prompts of mixed lengths, of which several are in a step. The next step is submitted before
    the vectors of one are read."""
    write_bert(tmp_path)
    settings: Any = {
        **SETTINGS,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_in_flight": 2,
        "pooler_config": {"pooling_type": pooling_type},
    }
    with LLM(str(tmp_path), **settings) as llm:
        expected = vectors(llm)
    steps = submitted_steps(monkeypatch)
    with engine_on_fake_gpu(tmp_path, **settings) as (llm, gpu):
        assert attention_of(llm) == {"triton_encoder"}
        before = waits_of(gpu)
        downloads = gpu.downloads
        torch.testing.assert_close(vectors(llm), expected, rtol=1e-4, atol=1e-5)
        assert waits_of(gpu) == before
        assert gpu.downloads > downloads + 1
    assert [is_idle for _, is_idle in steps] == [True, False]


def test_vectors_of_words(tmp_path: Path) -> None:
    """SPLADE: the largest logits of a prompt's tokens."""
    write_bert(tmp_path, transformers.BertForMaskedLM)
    overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    settings: Any = {**SETTINGS, "hf_overrides": overrides, "max_num_seqs": 3}
    with LLM(str(tmp_path), max_num_batched_tokens=16, **settings) as llm:
        expected = vectors(llm)
    assert expected.shape == (len(PROMPTS), 20)
    with engine_on_fake_gpu(tmp_path, **settings) as (llm, gpu):
        before = waits_of(gpu)
        torch.testing.assert_close(vectors(llm), expected, rtol=1e-4, atol=1e-5)
        assert waits_of(gpu) == before


def test_classes_of_a_bert(tmp_path: Path) -> None:
    write_bert(tmp_path, transformers.BertForSequenceClassification)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def probabilities(llm: LLM) -> torch.Tensor:
        outputs = llm.classify(prompts, use_tqdm=False)
        return torch.tensor([output.outputs.probs for output in outputs])

    with LLM(str(tmp_path), max_num_batched_tokens=16, max_num_seqs=3, **SETTINGS) as llm:
        expected = probabilities(llm)
    with engine_on_fake_gpu(tmp_path, max_num_seqs=3, **SETTINGS) as (llm, gpu):
        before = waits_of(gpu)
        torch.testing.assert_close(probabilities(llm), expected, rtol=1e-4, atol=1e-5)
        assert waits_of(gpu) == before
