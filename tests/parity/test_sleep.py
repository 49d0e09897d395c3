"""Models of every sort of layer sleep: all of their weights are released, and the tokens after
waking are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_adapters_parity import SCALING, random_expert_adapter
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_latent_parity import ARCHITECTURES as LATENT
from test_state_parity import ARCHITECTURES as STATES

from pegboard import LLM, LoRARequest, SamplingParams
from pegboard.worker import worker
from pegboard.worker.weight_memory import WeightMemory

CASES = {
    "experts": EXPERTS["qwen3_moe"],
    "experts, biases": EXPERTS["gpt_oss"],
    "latents": LATENT["deepseek_v3"],
    "states": STATES["mamba2"],
    "a hybrid with experts": STATES["qwen3_next"],
    "fallback": ("olmo2", {}),
}
PROMPTS = [{"prompt_token_ids": list(range(3, length))} for length in (5, 30, 50)]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)


def never(*args: object, **kwargs: object) -> Any:
    raise AssertionError


def tokens(llm: LLM, lora: Any = None) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=lora, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_no_token_changes(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    model_type, config = CASES[name]
    reference = write(model_type, **config)
    has_adapter = name == "experts"
    adapter = random_expert_adapter(reference.model, 4, 1) if has_adapter else {}
    monkeypatch.setattr(worker, "read_files", lambda *given: (SCALING, adapter))
    stored = sum(parameter.numel() * 4 for parameter in reference.model.parameters())
    settings = {"enable_lora": True, "max_lora_rank": 4} if has_adapter else {}
    with open_llm(reference.directory, enable_sleep_mode=True, **settings) as llm:
        loras = [None, LoRARequest("a", 1, "/a")] if has_adapter else [None]
        before = [tokens(llm, lora) for lora in loras]
        assert len(before) == 1 or before[0] != before[1]
        for level in (1, 2):
            models = llm.llm_engine.engine._parts.executor.worker.models
            released = sum(area.numel() for area in WeightMemory(models, never).tensors())
            assert released >= stored, (
                f"{stored - released} of {stored} bytes of weights are not released"
            )
            llm.sleep(level=level)
            llm.wake_up()
            assert [tokens(llm, lora) for lora in loras] == before, f"after level {level}"
