"""The context that a model gets with the memory that there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pegboard_platform_cpu.platform import CPUPlatform

from pegboard import SamplingParams
from pegboard.errors import ConfigError, KVCacheTooSmall, RequestError

BLOCK_BYTES = 4 * 3 * 2 * 8 * 2 * 4
"""Of keys and values in float32: 4 tokens, 3 layers, 2 heads of 8 channels."""


def answer(llm: Any, num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [3 + i % 100 for i in range(num_tokens)]}
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.one_rank
@pytest.mark.parametrize("asked", ["auto", -1])
def test_auto_serves_what_fits(write: Any, open_llm: Any, asked: Any) -> None:
    reference = write("llama")
    memory = {"kv_cache_memory_bytes": 9 * BLOCK_BYTES}
    with pytest.raises(
        KVCacheTooSmall, match="max_model_len=64 .*at most 32 .-1 takes the largest"
    ):
        open_llm(reference.directory, **memory)
    with open_llm(reference.directory, max_model_len=asked, **memory) as llm:
        assert len(answer(llm, 28)) == 4
        with pytest.raises(RequestError, match="max_model_len is 32"):
            answer(llm, 33)
    with open_llm(reference.directory, max_model_len=asked) as llm:
        assert len(answer(llm, 60)) == 4


def test_a_default_size_grows_until_the_context_fits(
    write: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard_platform_cpu.platform.KV_CACHE_LIMIT", 9 * BLOCK_BYTES)
    with open_llm(write("llama").directory, kv_cache_memory_bytes=None) as llm:
        assert len(answer(llm, 60)) == 4
        assert llm.llm_engine.engine.stats()["num_blocks"] == 17


@pytest.mark.one_rank
def test_more_than_the_machine_has_is_refused(
    write: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checks, the system would kill the process."""
    directory = write("llama").directory
    for memory in (
        {"kv_cache_memory_bytes": 1 << 45},
        {"num_gpu_blocks_override": (1 << 45) // BLOCK_BYTES},
    ):
        with pytest.raises(
            ConfigError, match="KV cache needs 32768.00 GiB.*lower kv_cache_memory_bytes"
        ):
            open_llm(directory, **memory)
    memory = CPUPlatform.memory
    monkeypatch.setattr(
        CPUPlatform,
        "memory",
        lambda self, **more: replace(memory(self, **more), free_bytes=1 << 10),
    )
    with pytest.raises(
        ConfigError, match="the weights of .*model needs .* GiB of memory.*fewer bits"
    ):
        open_llm(directory)
