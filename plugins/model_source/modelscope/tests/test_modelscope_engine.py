"""An engine gives the same tokens for a model from a fake ModelScope as for its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_modelscope import FakeModelScope

from pegboard import LLM, SamplingParams

PROMPT = {"prompt_token_ids": [3, 4, 5, 6]}


def tokens(model: str, cache: Path) -> list[int]:
    llm = LLM(
        model,
        download_dir=str(cache),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=32,
        kv_cache_memory_bytes=2_000_000,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_engine_from_modelscope(
    site: FakeModelScope, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    site.repositories["org/name"] = {"v1": files}
    expected = tokens(str(folder), tmp_path)
    assert tokens("modelscope:org/name@v1", tmp_path) == expected
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert tokens("modelscope:org/name@v1", tmp_path) == expected


def test_the_variable_of_vllm(
    site: FakeModelScope, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    site.repositories["org/name"] = {
        "master": {path.name: path.read_bytes() for path in folder.iterdir()}
    }
    assert len(tokens("org/name", tmp_path)) == 4
    assert ("master", "model.safetensors") in site.reads
