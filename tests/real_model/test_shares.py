"""Two ranks that read their own files of the default model give the tokens of two ranks that read
the GGUF file, and the tokenizer that was in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.real_model


@pytest.mark.slow
def test_the_same_tokens(smollm2_gguf: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 1 << 26,
        "download_dir": str(tmp_path / "cache"),
    }
    params = SamplingParams(temperature=0, max_tokens=16)
    messages = [{"role": "user", "content": "What is the capital of France? Être bref 🙂"}]
    answers = []
    for path in (smollm2_gguf, tmp_path / "shares"):
        with LLM(str(path), **settings) as llm:
            if path == smollm2_gguf:
                llm.save_sharded_state(tmp_path / "shares", max_size=20 << 20)
            answers.append(llm.chat(messages, params, use_tqdm=False)[0])
    first, second = answers
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.outputs[0].text == second.outputs[0].text
    files = [*(tmp_path / "shares").glob("model-rank-1-part-*.safetensors")]
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 31 << 20
